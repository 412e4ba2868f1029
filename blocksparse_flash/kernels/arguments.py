"""Kernel arguments computed from operator arguments: scale, dropout, score mods, plan tensors, device limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import philox, plan_format
from ..plan_format import TILE
from ..runtime.launch import Config, axis_strides, cache_key_of, device_limits
from ..runtime.tensor_spec import TensorSpec, TensorSpecs, is_token_major, spec_of, tma_can_load
from ..score_mods import LOG2_E, Scores
from .schedule import padded_dim

MAX_FLOAT32 = torch.finfo(torch.float32).max
# fewest elements of q and k together for which TMA descriptors repay their host time
MIN_TMA_ELEMENTS = 1 << 20

Shape = tuple[int, ...]
# records, indices, bitmask ids and bitmasks of one direction of a plan; all None without a plan
TileLists = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
# cache key of one direction of a plan: shape of its records (None without a plan), and which of its tensors are aligned
# (() if all are)
PlanSpecs = tuple[Shape | None, tuple[bool, ...]]


def wants_descriptors(major: int, *tensors: TensorSpec) -> bool:
    """Whether TMA (sm90 and later) should load all of these (batch, heads, length, head_dim) tensors.

    Small tensors do not repay the host time of making descriptors.
    """
    if major < 9 or math.prod(tensors[0].shape) + math.prod(tensors[1].shape) < MIN_TMA_ELEMENTS:
        return False
    return all(tma_can_load(t.dtype.itemsize, t.shape, t.strides, t.is_aligned) for t in tensors)


class ScoreSpecs(NamedTuple):
    """Cache key of the score mods of a call.

    bias_cell  queries and keys of a bias cell; None without block_bias
    modifies_scores  whether score mods apply between product and mask
    tables     specs of the bias tables, by direction
    others     specs of sinks and slopes
    pair_bias  its spec
    wanted     whether the gradients of sinks, slopes, block_bias and pair_bias are needed
    """

    softcap: float
    bias_cell: tuple[int, int] | None
    modifies_scores: bool
    tables: tuple[TensorSpec | None, ...]
    others: tuple[TensorSpec | None, ...]
    pair_bias: TensorSpec | None
    wanted: tuple[bool, ...]


def score_specs_of(scores: Scores, *tables: torch.Tensor | None, wanted: Sequence[bool] = ()) -> ScoreSpecs:
    """The cache key of score mods and their bias tables."""
    added = scores.alibi_slopes, scores.block_bias, scores.pair_bias
    modifies_scores = scores.softcap > 0 or any(each is not None for each in added)
    others, specs = (spec_of(scores.sinks), spec_of(scores.alibi_slopes)), tuple(map(spec_of, tables))
    of_pairs = spec_of(scores.pair_bias)
    return ScoreSpecs(scores.softcap, scores.bias_cell, modifies_scores, specs, others, of_pairs, tuple(wanted))


class Options(NamedTuple):
    """Cache key of a call besides q, k, v, dout and the plan's tensors.

    others       the keys of further tensors
    tile         tokens per side of the plan's tiles
    out_strides  (batch, head, row) strides of out, in a backward
    """

    scale: float
    causal: bool
    dropout_p: float
    tf32: bool
    device: int | None
    major: int
    shared_memory: int
    others: tuple[tuple[torch.dtype, bool] | None, ...]
    tile: int = TILE
    scores: ScoreSpecs | None = None
    out_strides: Shape | None = None

    @property
    def modifies_scores(self) -> bool:
        """Whether score mods apply between product and mask; sinks do not."""
        return self.scores is not None and self.scores.modifies_scores


def options_of(
    q: torch.Tensor,
    plan: Sequence[torch.Tensor],
    scale: float,
    causal: bool,
    dropout_p: float,
    *others: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> Options:
    """The options of a call with q's dtype and device.

    plan    the tensors of a Plan; empty for dense or causal calls
    others  contiguous tensors whose shapes follow from q, k and v
    out     of a backward
    """
    index = q.device.index
    keys = tuple([cache_key_of(other) for other in (*others, out)])
    out_strides = None if out is None else out.stride()[:3]
    tile = plan_format.tile_of(plan)
    # torch's older switches set it too
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return Options(scale, causal, dropout_p, tf32, index, *device_limits(index), keys, tile, None, out_strides)


def sign(scale: float) -> int:
    """-1, 0 or 1: the forward multiplies scores by it before it takes their maximum."""
    return (scale > 0) - (scale < 0)


def scale_log2(scale: float) -> float:
    """The forward's factor on scores times their sign, in base 2: positive, so that it commutes with the maximum."""
    return abs(scale) * LOG2_E if scale != 0 else 1.0


class Constants(NamedTuple):
    """Compile-time arguments of a Triton kernel.

    GROUP            query heads per KV head
    TILE             tokens per side of the plan's tiles
    PRECISION        of products of float32: "tf32" or "ieee"
    TMA              whether q, k, v and dout are TMA descriptors
    DIM, DIM_V       HEAD_DIM and V_DIM, padded
    SIGN             of the scale, in kernels that take a maximum
    MODIFIES_SCORES  whether score mods apply between product and mask
    CELL_Q, CELL_KV  queries and keys of a bias cell; 0 without a bias
    Q_BY_TOKEN, K_BY_TOKEN, V_BY_TOKEN  whether out and dq, dk, and dv are (batch, length, heads, columns) in memory,
                     as q, k and v are; else (batch, heads, length, columns)
    """

    GROUP: int
    CAUSAL: bool
    DROPOUT: bool
    PRECISION: str
    TMA: bool
    HEAD_DIM: int
    V_DIM: int
    DIM: int
    DIM_V: int
    TILE: int
    MODIFIES_SCORES: bool
    SIGN: int = 1
    CELL_Q: int = 0
    CELL_KV: int = 0
    BLOCK_Q: int = 0
    BLOCK_KV: int = 0
    Q_BY_TOKEN: bool = False
    K_BY_TOKEN: bool = False
    V_BY_TOKEN: bool = False

    def with_blocks(self, chosen: Config) -> Constants:
        """The constants with the block sizes of a configuration."""
        return self._replace(BLOCK_Q=chosen.block_q, BLOCK_KV=chosen.block_kv)

    def with_orders(self, q: TensorSpec, k: TensorSpec, v: TensorSpec) -> Constants:
        """The constants of a kernel whose outputs have the memory orders of q, k and v."""
        of_q, of_k, of_v = (is_token_major(spec.shape, spec.strides) for spec in (q, k, v))
        return self._replace(Q_BY_TOKEN=of_q, K_BY_TOKEN=of_k, V_BY_TOKEN=of_v)


class Tuning(NamedTuple):
    """The facts by which the launch tables of the Triton kernels choose.

    dim, smaller_dim  padded head dimensions: the larger one of q and v, and the smaller one
    element_size      bytes of an element of q
    major             of the compute capability
    tma               whether TMA loads the inputs
    shared_memory     bytes available to a program
    modifies_scores   see Options
    group             query heads per KV head
    """

    dim: int
    element_size: int
    major: int
    tma: bool
    dropout: bool
    shared_memory: int
    modifies_scores: bool = False
    smaller_dim: int = 0
    group: int = 1


def tuning_of(fixed: Constants, element_size: int, options: Options) -> Tuning:
    """The facts by which the launch of a kernel with these constants and options is chosen."""
    dims = sorted((fixed.DIM, fixed.DIM_V))
    limits = options.major, fixed.TMA, fixed.DROPOUT, options.shared_memory
    return Tuning(dims[1], element_size, *limits, options.modifies_scores, dims[0], fixed.GROUP)


class Strides(NamedTuple):
    """Strides of the tensors of a Triton kernel, in elements; None for tensors that it does not take.

    q, k, v, dout          (batch, head, row)
    records, tables, sums  (batch, head) of a plan's records, bias tables and bias sums
    pair_batch, pair_head, pair_q, pair_kv  of pair_bias, 0 along an axis that is shared. Not nested, since Triton 3.6
                           loses strides of 1 in nested tuples
    """

    q: Shape
    k: Shape
    v: Shape
    dout: Shape | None = None
    records: Shape = (0, 0)
    tables: Shape | None = None
    sums: Shape | None = None
    pair_batch: int | None = None
    pair_head: int | None = None
    pair_q: int | None = None
    pair_kv: int | None = None


def constants(head_dim: int, v_dim: int, group: int, tma: bool, options: Options) -> Constants:
    """The constants that do not depend on lengths, configuration or scale."""
    cell = None if options.scores is None else options.scores.bias_cell
    return Constants(
        GROUP=group,
        CAUSAL=options.causal,
        DROPOUT=options.dropout_p > 0.0,
        PRECISION="tf32" if options.tf32 else "ieee",
        TMA=tma,
        HEAD_DIM=head_dim,
        V_DIM=v_dim,
        DIM=padded_dim("triton", head_dim),
        DIM_V=padded_dim("triton", v_dim),
        TILE=options.tile,
        MODIFIES_SCORES=options.modifies_scores,
        CELL_Q=cell[0] if cell else 0,
        CELL_KV=cell[1] if cell else 0,
    )


def dropout_arguments(dropout_p: float) -> dict[str, Any]:
    """The threshold of philox.py, and the factor on weights that are kept."""
    return {"threshold": philox.threshold(dropout_p), "keep_scale": 1.0 / philox.kept_share(dropout_p)}


def columns_of_values(dim: int, dim_v: int, element_size: int, major: int) -> int:
    """DIM_V of a kernel that computes p @ v; widened to 64 on sm90 in 16 bits to avoid a ptxas bug.

    For narrower values that neither TMA nor cp.async can load, the ptxas of Triton 3.6 and 3.7 reads an uninitialized
    register as shared memory address (seen on an H200 with head_dim 100 and v_head_dim 3: random wrong results).
    """
    return max(dim_v, min(dim, 64)) if major == 9 and element_size == 2 else dim_v


def softcap_arguments(options: Options, scale: float) -> dict[str, Any]:
    """The softcap in base 2, or None, and with a softcap the factor on raw scores in place of scale_log2.

    scale  factor on this kernel's scores, without its sign in the forward (see `sign`)
    """
    scores = options.scores
    if scores is None or scores.softcap == 0:
        return {"cap": None}
    # c tanh(s / c), in base 2
    return {"cap": scores.softcap * LOG2_E, "scale_log2": scale_over_softcap(scale, scores.softcap)}


def scale_over_softcap(scale: float, softcap: float) -> float:
    """Their ratio, the nearest finite float32 if it is beyond: 0 times it stays 0, and tanh saturates anyway."""
    return max(-MAX_FLOAT32, min(scale / softcap, MAX_FLOAT32))


def strides_of_records(record_shape: Shape | None) -> tuple[int, int]:
    """(batch, head) strides of a plan's records; 0 along a broadcast dimension and without a plan."""
    return (0, 0) if record_shape is None else axis_strides(record_shape)


def strides_of(specs: TensorSpecs, options: Options, record_shape: Shape | None, direction: int = 0) -> Strides:
    """The strides of a kernel over tile rows (direction 0) or tile columns (1), without those of sums.

    specs  of q, k and v, or also of dout
    """
    tables = bias = None
    if options.scores is not None:
        tables, bias = options.scores.tables[direction], options.scores.pair_bias
    of_pairs: dict[str, Any] = {}
    if bias is not None:
        names = "pair_batch", "pair_head", "pair_q", "pair_kv"
        sizes = zip(names, bias.shape, bias.strides, strict=True)
        of_pairs = {name: 0 if size == 1 else stride for name, size, stride in sizes}
    of_tables = None if tables is None else axis_strides(tables.shape)
    q, k, v, *dout = (spec.strides[:3] for spec in specs.tensors)
    return Strides(q, k, v, dout[0] if dout else None, strides_of_records(record_shape), of_tables, **of_pairs)


def tile_lists(plan: list[torch.Tensor], first: int) -> TileLists:
    """The lists of a plan's tile rows (first = ROW_LISTS) or tile columns (COL_LISTS)."""
    return (plan[first], plan[first + 1], plan[first + 2], plan[-1]) if plan else (None,) * 4


def plan_specs_of(tensors: tuple[torch.Tensor | None, ...]) -> PlanSpecs:
    """The cache key of one direction of a plan."""
    records = tensors[0]
    if records is None:
        return None, ()
    addresses = [tensor.data_ptr() for tensor in tensors]  # type: ignore[union-attr]
    off = (addresses[0] | addresses[1] | addresses[2] | addresses[3]) % 16
    return records.shape, tuple([address % 16 == 0 for address in addresses]) if off else ()


def seed_arguments(
    seed: torch.Tensor | None, dropout_p: float, device: torch.device
) -> tuple[torch.Tensor | None, int]:
    """A dropout seed for `load_seed` of tile.py: a tensor of this GPU as it is, the value of any other."""
    if seed is None:
        assert dropout_p == 0.0, "dropout_p > 0 needs a seed"
        return None, 0
    assert seed.dtype == torch.int64, f"seed must be int64, got {seed.dtype}"
    return (None, int(seed.item())) if seed.is_cpu or seed.device != device else (seed, 0)
