"""SelfAttention over a sequence shared by several ranks."""

from __future__ import annotations

from einops import rearrange
from torch import Tensor, nn

from ..nn.arguments import Heads, check_features, positive_int
from ..nn.positions import rotary_table, rotate
from ..nn.projections import heads_of
from .context_plan import ContextPlan, check_layer, check_plan
from .dtensors import are_dtensors
from .functional import attention


class SelfAttention(nn.Module):
    """blocksparse_flash.nn.SelfAttention over a shared sequence, with the same state dict.

    embed_dim  features per token, a multiple of the plan's query heads
    plan       ContextPlan; its heads are those of this module
    layer      index of the plan's layout
    rope       base of rotary positions, counted in the whole sequence; None adds no positions
    sinks, softcap, alibi  not supported by `distributed.attention`: anything but the default raises
    raises     TypeError, ValueError

    The plan belongs to a process group, so it is not part of the `state_dict`. A pickled layer has it, and only the
    same rank of the same group can load it. After `destroy_process_group`, set `layer.plan` to a new plan.

    The gradients of the weights are this rank's share: **sum** them over the ranks of the plan. With FSDP or DDP, which
    average over `n` processes, backpropagate the sum of this rank's losses * n / (tokens of all `n`): the average is
    then the gradient of the mean over all tokens.
    """

    def __init__(
        self,
        embed_dim: int,
        plan: ContextPlan,
        *,
        layer: int = 0,
        rope: float | None = None,
        sinks: bool = False,
        softcap: float | None = None,
        alibi: bool = False,
    ) -> None:
        super().__init__()
        for name, value, default in (("sinks", sinks, False), ("softcap", softcap, None), ("alibi", alibi, False)):
            if value is not default:
                raise ValueError(
                    f"{name} must be {default}, got {value!r}: distributed.attention has no options that change "
                    "scores; blocksparse_flash.nn.SelfAttention has them, in one process"
                )
        check_plan(plan)
        check_layer(plan, layer)
        num_heads, kv_heads = plan.heads
        if positive_int("embed_dim", embed_dim) % num_heads:
            raise ValueError(f"embed_dim must be a multiple of the plan's {num_heads} query heads, got {embed_dim}")
        sizes = Heads.of(embed_dim, num_heads, kv_heads, None, rope)
        self.embed_dim, self.head_dim, self.rope = sizes.embed_dim, sizes.head_dim, sizes.rope
        self.num_heads, self.kv_heads = num_heads, kv_heads
        self.plan, self.layer = plan, layer
        self.qkv = nn.Linear(embed_dim, (num_heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, plan.local_length, embed_dim), the tokens of this rank, to the same shape."""
        check_plan(self.plan)
        check_features("x", x)
        if are_dtensors(x):
            raise ValueError("x must be a plain tensor, got a DTensor; x.to_local() has the part of this rank")
        if x.dim() != 3 or x.shape[1:] != (self.plan.local_length, self.embed_dim):
            raise ValueError(
                f"x must have shape (batch, {self.plan.local_length}, {self.embed_dim}), the tokens of rank "
                f"{self.plan.rank}, got {tuple(x.shape)}; plan.shard(x, dim=1) takes them from the whole sequence"
            )
        q, k, v = heads_of(self.qkv(x), (self.num_heads, self.kv_heads, self.kv_heads), self.head_dim)
        if self.rope is not None:
            table = rotary_table(self.plan.positions, self.rope, self.head_dim)
            q, k = rotate(q, table), rotate(k, table)
        out = attention(q, k, v, self.plan, layer=self.layer)
        return self.out(rearrange(out, "batch heads length d -> batch length (heads d)"))

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.plan!r}, layer={self.layer}, rope={self.rope}"
