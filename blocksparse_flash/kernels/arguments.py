"""How do operator arguments become kernel arguments? Tensor references, scale, lengths, dropout; and what the GPU is.

Knows: torch tensors, Triton's descriptors. Does not know: what a kernel computes, layouts, autograd.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from .. import philox
from ..runtime.launch import axis_strides, cache_key_of, device_limits
from ..runtime.tensor_spec import TensorSpec, spec_of, tma_can_load
from ..score_mods import Scores

LOG2_E = 1.4426950408889634
# side of a plan's tile, in tokens
TILE = 128
# elements of q and k from which on descriptors pay
WORTH_DESCRIBING = 1 << 20


Shape = tuple[int, ...]
# of one direction of a plan: the shape of its records, None without a plan; which of its tensors are aligned, () for all
PlanSpecs = tuple[Shape | None, tuple[bool, ...]]


def padded_dim(head_dim: int) -> int:
    """Columns a program holds for `head_dim`: the next power of two, at least 16 (tensor cores want 16)."""
    return max(16, triton.next_power_of_2(head_dim))


def allows_tf32(dtype: torch.dtype) -> bool:
    """float32 products are IEEE unless torch's matmul precision allows TF32 (its older switches set this one too)."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def wants_descriptors(major: int, *tensors: TensorSpec) -> bool:
    """Whether the copy engine (TMA, sm90 and later) should read all of these (batch, heads, length, head_dim) tensors.

    Making a descriptor costs the host time, which small tensors do not repay.
    """
    if major < 9 or math.prod(tensors[0].shape) + math.prod(tensors[1].shape) < WORTH_DESCRIBING:
        return False
    return all(tma_can_load(t.dtype.itemsize, t.shape, t.strides, t.is_aligned) for t in tensors)


class ScoreSpecs(NamedTuple):
    """What a launch must know of the options of the scores.

    tables  the biases that each kernel reads, by direction
    wanted  which of the gradients of sinks, slopes and bias are
    """

    softcap: float
    pieces: tuple[int, int] | None
    changes: bool
    tables: tuple[TensorSpec | None, ...]
    others: tuple[TensorSpec | None, ...]
    wanted: tuple[bool, ...]


def score_specs_of(scores: Scores, *tables: torch.Tensor | None, wanted: Sequence[bool] = ()) -> ScoreSpecs:
    """The facts about the options of the scores, and about the tables that go with them."""
    changes = scores.softcap > 0 or scores.alibi_slopes is not None or scores.block_bias is not None
    others = spec_of(scores.sinks), spec_of(scores.alibi_slopes)
    return ScoreSpecs(scores.softcap, scores.pieces, changes, tuple(map(spec_of, tables)), others, tuple(wanted))


class Options(NamedTuple):
    """What a launch must know besides q, k, v, dout and the plan; `others`, of further tensors, only tell calls apart."""

    scale: float
    causal: bool
    dropout_p: float
    tf32: bool
    device: int | None
    major: int
    shared_memory: int
    others: tuple[tuple[torch.dtype, bool] | None, ...]
    scores: ScoreSpecs | None = None

    @property
    def changes_scores(self) -> bool:
        """Whether something is done to scores between product and mask."""
        return self.scores is not None and self.scores.changes


def options_of(q: torch.Tensor, scale: float, causal: bool, dropout_p: float, *others: torch.Tensor | None) -> Options:
    """The options of a call on q's type and device, with `others` among its tensors, whose shapes follow."""
    index = q.device.index
    told = tuple([cache_key_of(other) for other in others])
    return Options(scale, causal, dropout_p, allows_tf32(q.dtype), index, *device_limits(index), told)


def scaling(scale: float) -> dict[str, Any]:
    """A forward's scale: a positive base-2 factor, and a sign for the raw scores, whose maximum is scaled afterwards.

    Scale 0 multiplies the scores by 0, then by 1.
    """
    return {"scale_log2": abs(scale) * LOG2_E if scale != 0 else 1.0, "SIGN": (scale > 0) - (scale < 0)}


def constants(head_dim: int, v_dim: int, group: int, tma: bool, options: Options) -> dict[str, Any]:
    """The arguments of every portable kernel that depend on neither lengths, configuration nor scale."""
    dropout_p = options.dropout_p
    return {
        "threshold": philox.threshold(dropout_p),
        "keep_scale": 1.0 / philox.kept_share(dropout_p),
        "GROUP": group,
        "CAUSAL": options.causal,
        "DROPOUT": dropout_p > 0.0,
        "PRECISION": "tf32" if options.tf32 else "ieee",
        "TMA": tma,
        "HEAD_DIM": head_dim,
        "V_DIM": v_dim,
        "DIM": padded_dim(head_dim),
        "DIM_V": padded_dim(v_dim),
    }


def columns_of_values(dim: int, dim_v: int, element_size: int, major: int) -> int:
    """DIM_V of a kernel that multiplies p by values; more than it must be on sm90, in 16 bits.

    Of narrower values whose rows neither the copy engine nor cp.async takes, the ptxas of Triton 3.6 and 3.7 loses the address in
    shared memory: it reads a register that nothing wrote (head_dim 100 with 3, an H200: wrong numbers, others at each call).
    """
    return max(dim_v, min(dim, 64)) if major == 9 and element_size == 2 else dim_v


def score_arguments(options: Options, direction: int, *, scale: float) -> dict[str, Any]:
    """The arguments of a kernel that the options of the scores give, and scale_log2 where a cap changes it.

    scale  the factor on this kernel's scores: without its sign where that is multiplied first (see `scaling`)
    """
    arguments: dict[str, Any] = {"cap": None, "tables_strides": None, "PIECE_Q": 0, "PIECE_KV": 0}
    scores = options.scores
    if scores is None:
        return arguments
    if scores.softcap > 0:
        # c tanh(s / c), in base 2
        arguments |= {"cap": scores.softcap * LOG2_E, "scale_log2": scale / scores.softcap}
    tables = scores.tables[direction]
    if scores.pieces is not None and tables is not None:
        arguments["tables_strides"] = axis_strides(tables.shape)
        arguments["PIECE_Q"], arguments["PIECE_KV"] = scores.pieces
    return arguments


def walk_strides(items: Shape | None) -> tuple[int, int]:
    """(batch, head) strides of a plan's records; 0 along an axis that all share, or without a plan."""
    return (0, 0) if items is None else axis_strides(items)


def walk(plan: list[torch.Tensor], first: int) -> tuple[torch.Tensor | None, ...]:
    """items, indices, ids, words of one direction of a plan: its rows (first = 0) or its columns (3). Empty is dense."""
    return (plan[first], plan[first + 1], plan[first + 2], plan[6]) if plan else (None,) * 4


def plan_specs_of(walked: tuple[torch.Tensor | None, ...]) -> PlanSpecs:
    """The facts about one direction of a plan."""
    items = walked[0]
    if items is None:
        return None, ()
    addresses = [tensor.data_ptr() for tensor in walked]  # type: ignore[union-attr]
    off = (addresses[0] | addresses[1] | addresses[2] | addresses[3]) % 16
    return items.shape, tuple([address % 16 == 0 for address in addresses]) if off else ()


def device_seed(seed: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """The seed on the device: a fill when it is on the host, never a wait."""
    if seed is None or seed.device == device:
        return seed
    return torch.full((1,), int(seed.item()), dtype=torch.int64, device=device)
