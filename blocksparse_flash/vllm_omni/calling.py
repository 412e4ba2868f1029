"""Attention with the arguments of vLLM-Omni 0.30.0: tensors (batch, tokens, heads, head_dim) and a metadata object."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..blocks.checks import boolean, check_tensor
from ..diffusers.selecting import Choice, top_blocks
from ..diffusers.using import Use, _check_layout, _checked_order, _Layer
from ..dispatch import BACKENDS
from ..functional import attention
from ..layout import BlockLayout
from ..runtime import tracing
from ..validation import checked_scale

Grid = tuple[int, int, int]
# function of a grid (frames, height, width) of latent tokens and a sparsity: layout and order of `diffusers.use`
Pattern = Callable[[Grid, float], tuple[BlockLayout | Choice | None, Tensor | None]]

# keys of `extra` that give the number of tokens before the padding
USED = ("valid_kv_length", "max_seqlen_q", "max_seqlen_k")


def select_blocks(grid: Grid, sparsity: float) -> tuple[Choice, Tensor]:
    """Drops the share `sparsity` of the key blocks, those with the lowest scores of block means.

    grid      latent tokens (frames, height, width)
    sparsity  share of the blocks of 64 tokens that are dropped, at least 0 and below 1
    returns   `diffusers.top_blocks(1 - sparsity)`, and the order in which blocks are cubes of 4 x 4 x 4 tokens
    """
    # imports the mask builders
    from ..masks import tile_order

    return top_blocks(1 - sparsity), tile_order(grid, tile=(4, 4, 4))


# a prompt of another length needs another layout; eight are enough for a few prompts, with and without guidance
@functools.lru_cache(maxsize=8)
def _use_of(pattern: Pattern, grid: Grid, sparsity: float, n_text: int, backend: str) -> Use:  # noqa: ARG001
    made: object = pattern(grid, sparsity)
    if not isinstance(made, tuple) or len(made) != 2:
        raise TypeError(f"pattern must return a layout and an order, such as (layout, None), got {made!r}")
    layout, order = made
    _check_layout(layout)
    use = Use(layout, _checked_order(order, layout), backend)
    if use._tokens not in (None, math.prod(grid)):
        raise ValueError(
            f"pattern must return a layout and an order of the {math.prod(grid)} tokens of the grid {grid}, got "
            f"{use._tokens} tokens"
        )
    return use


def _video_of(layout: Any) -> tuple[int, Grid, int]:
    """First token and grid of the video in a `video_layout`, and the number of tokens before padding."""
    targets = [span for span in layout.video_spans if span.role == "target"]
    if layout.video_spans and (len(targets) != 1 or layout.used_len is None):
        raise ValueError(
            "video_layout.video_spans must have one span of role 'target', and video_layout a used_len, got "
            f"{len(targets)} and {layout.used_len}"
        )
    begin, grid = (targets[0].start, targets[0].latent_grid) if targets else (layout.prefix_len, layout.latent_grid)
    if begin is None or grid is None:
        raise ValueError("video_layout must have prefix_len and latent_grid, or video_spans, got neither")
    used = begin + math.prod(grid) if layout.used_len is None else layout.used_len
    if begin < 0 or used < begin + math.prod(grid):
        raise ValueError(f"video_layout must have its video of {grid} from token {begin} within used_len={used}")
    return begin, tuple(grid), used


@dataclasses.dataclass(frozen=True)
class VideoAttention:
    """Attention with the arguments that vLLM-Omni gives its backends, without importing vLLM-Omni.

    pattern   function of a grid (frames, height, width) and a sparsity that returns the `layout` and `order` of
              `diffusers.use` for these tokens
    sparsity  argument of the pattern, at least 0 and below 1; 0 is dense attention, whatever the pattern
    scale     factor on the scores; None is head_dim ** -0.5
    causal    queries do not attend to later keys; in packed sequences, positions count from the end of each
    backend   as in `blocksparse_flash.attention`
    raises    ValueError

    A call takes query, key and value (batch, tokens, heads, head_dim), keys and values with as many heads or fewer
    (grouped), and None or an AttentionMetadata of vLLM-Omni. It returns a tensor like query, from these fields:

    video_layout  describes the video to which the pattern applies. All other tokens, such as text and reference videos,
                  attend to all tokens, and all attend to them. Outputs of padding are 0. Without video_layout,
                  attention is dense
    attn_mask     bool or integers (batch, keys), nonzero attends; or a mask of four dimensions that broadcasts to
                  (batch, heads, queries, keys), bool, or floating and added to the scores. With video_layout, only
                  (batch, keys), which is not read: in vLLM-Omni, it then masks only the padding
    extra         cu_seqlens_q and cu_seqlens_k, in batch 1: tokens attend within their sequence. valid_kv_length: later
                  keys are padding. kv_cache_dtype must be unquantized. Unknown keys are ignored, as vLLM-Omni requires
    joint_query   and the other joint tensors are ignored: layers have already joined them to query, key and value

    Whatever else would change the result raises ValueError with the name of the field.
    """

    pattern: Pattern = select_blocks
    _: dataclasses.KW_ONLY
    sparsity: float = 0.8
    scale: float | None = None
    causal: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        if not callable(self.pattern):
            raise ValueError(f"pattern must be a function of a grid and a sparsity, got {self.pattern!r}")
        if not isinstance(self.pattern, Hashable):
            raise ValueError(
                f"pattern must be hashable, since its layouts are cached, got {self.pattern!r}: "
                "@dataclass(frozen=True) makes dataclasses hashable"
            )
        is_number = isinstance(self.sparsity, int | float) and not isinstance(self.sparsity, bool)
        if not is_number or not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must be a number of at least 0 and below 1, got {self.sparsity!r}: 0 is dense")
        boolean(self.causal, "causal")
        # of any head_dim
        checked_scale(self.scale, 1, torch.float32)
        if self.backend not in BACKENDS:
            raise ValueError(f'backend must be one of {BACKENDS}, got {self.backend!r}; "auto" chooses')

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, metadata: Any = None) -> Tensor:
        """Attention of query, key and value (batch, tokens, heads, head_dim) with metadata; see the class."""
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_tensor(name, tensor)
            if tensor.ndim != 4:
                raise ValueError(f"{name} must be (batch, tokens, heads, head_dim), got {tuple(tensor.shape)}")
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        if metadata is None:
            return self._attend(q, k, v).transpose(1, 2)
        mask, extra = metadata.attn_mask, metadata.extra
        for name in ("full_attn_spans", "query_ranges", "packed_padding"):
            # a mask of pairs already includes the spans
            if getattr(metadata, name) is not None and (name == "packed_padding" or mask is None or mask.ndim != 4):
                raise ValueError(f"{name} must be None, got {getattr(metadata, name)}: give attn_mask instead")
        if metadata.joint_attn_mask is not None and mask is None:
            raise ValueError("joint_attn_mask must be a part of attn_mask, which is None")
        if extra.get("kv_cache_dtype") not in (None, "auto", "float"):
            raise ValueError(f"extra['kv_cache_dtype'] must be 'float', got {extra['kv_cache_dtype']!r}")
        valid = extra.get("valid_kv_length")
        if valid is not None and not (isinstance(valid, int) and 0 < valid <= key.shape[1]):
            raise ValueError(f"extra['valid_kv_length'] must be an int from 1 to {key.shape[1]}, got {valid!r}")
        if metadata.video_layout is not None:
            out = self._attend_video(q, k, v, metadata)
        elif "cu_seqlens_q" in extra or "cu_seqlens_k" in extra:
            out = self._attend_packed(q, k, v, metadata)
        else:
            out = self._attend(q, k, v, mask, valid)
        return out.transpose(1, 2)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        valid: int | None = None,
        layout: BlockLayout | None = None,
    ) -> Tensor:
        """Attention without a video, tensors (batch, heads, tokens, head_dim). A layout is causal if `self` is."""
        batch, heads, q_len, kv_len = *q.shape[:3], k.shape[2]
        causal = self.causal and layout is None
        if causal and q_len != kv_len:
            raise ValueError(f"causal must be False for {q_len} queries and {kv_len} keys, whose ends differ")
        options: dict[str, Any] = {"layout": layout, "causal": causal, "scale": self.scale, "backend": self.backend}
        if valid is not None:
            options["kv_lengths"] = torch.full((batch,), valid, dtype=torch.int32, device=q.device)
        if mask is None:
            return attention(q, k, v, **options)
        is_of_keys = mask.shape == (batch, kv_len) and not mask.is_floating_point()
        sizes = (batch, heads, q_len, kv_len)
        is_of_pairs = mask.ndim == 4 and all(size in (1, full) for size, full in zip(mask.shape, sizes, strict=True))
        if not is_of_keys and not (is_of_pairs and (mask.dtype == torch.bool or mask.is_floating_point())):
            raise ValueError(
                f"attn_mask must be bool or integers ({batch}, {kv_len}), or bool or floating and broadcast to "
                f"{sizes}, got {mask.dtype} {tuple(mask.shape)}"
            )
        if is_of_keys:
            mask = mask != 0
            if not causal and layout is None:
                # without positions, the order of keys does not matter: those that attend come first
                order = mask[:, :valid].byte().argsort(dim=1, descending=True, stable=True)[:, None, :, None]
                options["kv_lengths"] = mask[:, :valid].sum(1)
                return attention(q, k.take_along_dim(order, 2), v.take_along_dim(order, 2), **options)
            mask = mask[:, None, None]
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
        return attention(q, k, v, pair_bias=mask.expand(-1, -1, q_len, kv_len), **options)

    @tracing.untraced
    def _attend_packed(self, q: Tensor, k: Tensor, v: Tensor, metadata: Any) -> Tensor:
        from ..masks import documents

        cu_q, cu_k = (metadata.extra.get(f"cu_seqlens_{name}") for name in "qk")
        if cu_q is None or cu_k is None or q.shape[0] != 1:
            names = "extra['cu_seqlens_q'] and extra['cu_seqlens_k']"
            raise ValueError(f"{names} must both be given, in batch 1, got {cu_q}, {cu_k}, batch {q.shape[0]}")
        keys = None if cu_k is cu_q else cu_k
        layout = documents(cu_q, kv_cu_seqlens=keys, length=(q.shape[2], k.shape[2]), causal=self.causal)
        return self._attend(q, k, v, metadata.attn_mask, metadata.extra.get("valid_kv_length"), layout)

    @tracing.untraced
    def _attend_video(self, q: Tensor, k: Tensor, v: Tensor, metadata: Any) -> Tensor:
        begin, grid, used = _video_of(metadata.video_layout)
        mask, n_tokens, length = metadata.attn_mask, math.prod(grid), k.shape[2]
        if q.shape[2] != length or used > length:
            raise ValueError(
                f"video_layout of {used} tokens must fit the queries and keys, which must be as many, got {q.shape[2]} "
                f"queries and {length} keys"
            )
        if mask is not None and (mask.shape != (q.shape[0], length) or mask.is_floating_point()):
            got = f"{mask.dtype} {tuple(mask.shape)}"
            raise ValueError(f"attn_mask with video_layout must be bool ({q.shape[0]}, {length}), got {got}")
        # boundaries are on the device and not read: those of the video and padding alone have its length as the largest
        packed = {f"max_seqlen_{name}" for name in "qk" if f"cu_seqlens_{name}" in metadata.extra}
        lengths = {f"extra['{name}']": metadata.extra.get(name, None if name in packed else used) for name in USED}
        for name, value, expected in (("causal", self.causal, False), *((*each, used) for each in lengths.items())):
            if value != expected:
                raise ValueError(f"{name} with this video_layout must be {expected}, got {value}")
        before, video, after = torch.arange(used, device=q.device).tensor_split((begin, begin + n_tokens))
        # `Use` expects text before the video
        order = torch.cat([before, after, video]) if len(after) else slice(used)
        options = self.pattern, grid, self.sparsity, used - n_tokens, self.backend
        use = _use_of(*options) if self.sparsity else Use(None, None, self.backend)
        layer = _Layer("attention with video_layout", use, "first")
        out = use._attend(q[:, :, order], k[:, :, order], v[:, :, order], None, self.scale, layer)
        out = out[:, :, order.argsort()] if isinstance(order, Tensor) else out
        return F.pad(out, (0, 0, 0, length - used)) if used < length else out
