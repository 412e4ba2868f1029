"""Score mods of the Hopper kernels: softcap and ALiBi slopes before the mask, sinks in the epilogue; in base 2.

Block bias is one number per tile of 128 x 128, so it takes no instruction per score: the forward shifts the maxima
of rows by it (`online_softmax`), and the backward subtracts it from lse.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...plan_format import TILE
from ...runtime.launch import axis_strides, cache_key_of
from ...runtime.tensor_spec import TensorSpec, spec_of
from ...score_mods import LOG2_E as LOG2_E_VALUE
from ...score_mods import Scores, sums_shape
from ..arguments import PlanSpecs, scale_log2, scale_over_softcap, sign
from ..triton.tile import LOG2_E
from .registers import round_p_ds, store_warp_sums

# ---- tanh ----

# values of a thread that take a branch together
TANH_VALUES = gl.constexpr(16)
# tanh x = x + x^3 P(x^2) for |x| < NEAR, else x P(x^2) / Q(x^2), with x limited to FAR, where tanh is 1 - 7e-8: minimax
# fits, coefficients in descending powers
NEAR, FAR = 1.0, 8.6
NEAR_P = (1.0582556e-3, -6.2593119e-3, 2.0359728e-2, -5.3498693e-2, 1.3326408e-1, -3.3332986e-1)
FAR_P = (1.4146902e-8, 2.1171739e-5, 3.5295382e-3, 1.3409567e-1, 1.0)
FAR_Q = (8.0978298e-7, 3.3413008e-4, 2.6005987e-2, 4.6742892e-1, 1.0)


def _constant(value: float) -> str:
    """A float32 constant in PTX."""
    return f"0f{struct.pack('>f', value).hex().upper()}"


def _polynomial(name: str, coefficients: Sequence[float]) -> str:
    """PTX that sets register `name` to a polynomial of register z."""
    first, *rest = map(_constant, coefficients)
    return " ".join([f"mov.f32 {name}, {first};", *(f"fma.rn.f32 {name}, {name}, z, {each};" for each in rest)])


def _tanh_assembly(n_values: int) -> str:
    """PTX of n_values results $0, $1, ... of as many values.

    In Triton's operations, whose intermediate tensors are all alive, the registers would not suffice.
    """
    pairs = [(f"${i}", f"${n_values + i}") for i in range(n_values)]
    largest = [f"abs.f32 a, {x}; max.f32 z, z, a;" for _, x in pairs]
    near = [
        f"mul.f32 z, {x}, {x}; {_polynomial('a', NEAR_P)} mul.f32 a, a, z; fma.rn.f32 {out}, {x}, a, {x};"
        for out, x in pairs
    ]
    far = [
        f"max.NaN.f32 b, {x}, {_constant(-FAR)}; min.NaN.f32 b, b, {_constant(FAR)}; mul.f32 z, b, b;"
        f" {_polynomial('a', FAR_P)} mul.f32 b, b, a; {_polynomial('a', FAR_Q)} rcp.approx.ftz.f32 a, a;"
        f" mul.f32 {out}, b, a;"
        for out, x in pairs
    ]
    return (
        "{ .reg .pred p; .reg .f32 a, b, z; mov.f32 z, 0f00000000;"
        f" {' '.join(largest)} setp.lt.f32 p, z, {_constant(NEAR)}; vote.sync.all.pred p, p, 0xFFFFFFFF; @p bra NEAR;"
        f" {' '.join(far)} bra END; NEAR: {' '.join(near)} END: }}"
    )


TANH = gl.constexpr(_tanh_assembly(TANH_VALUES.value))
# the results are written before all values are read
TANH_CONSTRAINTS = gl.constexpr(",".join(["=&f"] * TANH_VALUES.value + ["f"] * TANH_VALUES.value))

# ---- kernels ----


class ScoreMods(NamedTuple):
    """What changes the scores; None for what a call does not have.

    cap         softcap in base 2; with it `factor` is the scale over the softcap, else the scale in base 2
    sinks_ptr   (heads,) float32, in the forward
    slopes_ptr  (heads,) float32
    bias_ptr    (batch | 1, heads | 1, listed tiles) float32, in base 2
    bias_strides  its (batch, head) strides in elements, and those of the sums of ds, if there are any
    """

    factor: Any
    cap: Any
    sinks_ptr: Any
    slopes_ptr: Any
    bias_ptr: Any
    bias_strides: Any


@gluon.jit
def tanh(b_x):
    """tanh with a relative error of at most 4e-7; tanh.approx has one of 5e-4.

    Where all scores of a warp are below the softcap, it takes no MUFU instruction.
    """
    return gl.inline_asm_elementwise(TANH, TANH_CONSTRAINTS, [b_x], dtype=gl.float32, is_pure=True, pack=TANH_VALUES)


@gluon.jit
def load_slope(mods, i_head):
    """The slope of a head in base 2; 0 without slopes."""
    if mods.slopes_ptr is not None:
        return gl.load(mods.slopes_ptr + i_head) * LOG2_E
    else:
        return 0.0


@gluon.jit
def apply_score_mods(b_scores, mods, slope, o_row, o_col):
    """(scores in base 2, tanh of the softcap) of q k^T [rows, columns]; the second is used with a softcap only.

    slope         of the head, in base 2
    o_row, o_col  positions of queries and keys from a common origin, one of them along each axis
    """
    b_scores = b_scores * mods.factor
    b_tanh = b_scores
    if mods.cap is not None:
        b_tanh = tanh(b_scores)
        b_scores = b_tanh * mods.cap
    if mods.slopes_ptr is not None:
        # whole numbers up to 2^24 are exact
        b_distance = gl.expand_dims(o_row.to(gl.float32), 1) - gl.expand_dims(o_col.to(gl.float32), 0)
        b_scores = b_scores - slope * gl.abs(b_distance)
    return b_scores, b_tanh


@gluon.jit
def apply_one_sided_mods(b_scores, mods, slope, o_row, o_col):
    """(scores in base 2 without b_shift, b_shift [rows]) of q k^T [rows, columns]; see softmax.online_softmax.

    For slopes in calls that mask every key after its query. A distance is then a sum of two terms, one of the query and
    one of the key. The former is left to b_shift, and the latter is the addend of the multiplication by the factor, so
    that slopes take one instruction per score instead of three. For steps without masked pairs: no query is before the
    last key, so both terms are at most the distance, and their rounding errors at most those of the distance.

    slope         of the head, in base 2
    o_row, o_col  positions of the queries, and of the keys, relative to the last key of the step
    """
    factor = mods.factor
    if mods.cap is not None:
        b_scores, factor = tanh(b_scores * factor), mods.cap
    b_scores = b_scores * factor + gl.expand_dims(slope * o_col.to(gl.float32), 0)
    return b_scores, -slope * o_row.to(gl.float32)


@gluon.jit
def finish_rows(b_max, b_sum, mods, i_head, has_sink):
    """(lse in base 2, factor that normalizes out) from the maximum and the sum of each row.

    has_sink  False in splits that leave the sink to another one. A sink is a key without a value; a sink of
              -inf has no effect
    """
    b_decay = 1.0
    if mods.sinks_ptr is not None:
        sink = gl.where(has_sink, gl.load(mods.sinks_ptr + i_head) * LOG2_E, float("-inf"))
        b_new_max = gl.maximum(b_max, sink)
        b_decay = gl.exp2(b_max - b_new_max)
        b_sum = b_sum * b_decay + gl.exp2(sink - b_new_max)
        b_max = b_new_max
    m_empty = b_sum == 0.0
    b_sum = gl.where(m_empty, 1.0, b_sum)
    return gl.where(m_empty, float("-inf"), b_max + gl.log2(b_sum)), b_decay / b_sum


@gluon.jit
def round_p_ds_with_mods(b_p, b_dp, b_delta, b_tanh, p_sum, mods, dtype: gl.constexpr):
    """`round_p_ds`, with the derivative of the softcap.

    b_tanh  see apply_score_mods
    p_sum   where this warpgroup's sums of ds go, see store_warp_sums; None: not wanted
    """
    if mods.cap is not None or p_sum is not None:
        b_ds = b_p * (b_dp - gl.expand_dims(b_delta, 0))
        if p_sum is not None:
            # before the derivative of the softcap, which precedes the bias
            store_warp_sums(p_sum, b_ds, STRIDE=1)
        if mods.cap is not None:
            b_ds = b_ds * (1.0 - b_tanh * b_tanh)
        return b_p.to(dtype), b_ds.to(dtype)
    else:
        return round_p_ds(b_p, b_dp, b_delta, dtype)


# ---- launches ----


class ModSpecs(NamedTuple):
    """Cache key of the score mods of a call.

    sinks, slopes  cache keys of these tensors
    is_one_sided   whether there are slopes, and keys after a query are masked
    tables         specs of the bias of each tile: by tile rows and, in a backward, by tile columns; () without a bias
    has_bias_gradient  whether the gradient of the bias is computed
    """

    softcap: float = 0.0
    sinks: tuple[torch.dtype, bool] | None = None
    slopes: tuple[torch.dtype, bool] | None = None
    is_one_sided: bool = False
    tables: tuple[TensorSpec | None, ...] = ()
    has_bias_gradient: bool = False

    @property
    def modifies_scores(self) -> bool:
        """Whether scores change between product and mask. A block bias changes row maxima and lse instead."""
        return self.softcap > 0 or self.slopes is not None

    def arguments(self, scale: float, *, is_forward: bool) -> dict[str, Any]:
        """The kernel arguments that depend on the scale, and in the forward ONE_SIDED.

        Without score mods the forward takes the maximum of raw q k^T, so its factor must be positive; SIGN applies the
        sign first.
        """
        of_forward = {"SIGN": 1, "ONE_SIDED": self.is_one_sided}
        if not self.modifies_scores:
            factor = scale_log2(scale) if is_forward else scale * LOG2_E_VALUE
            of_forward["SIGN"] = sign(scale)
            cap = None
        else:
            factor = scale_over_softcap(scale, self.softcap) if self.softcap > 0 else scale * LOG2_E_VALUE
            cap = self.softcap * LOG2_E_VALUE if self.softcap > 0 else None
        return {"scale_log2": factor, "cap": cap, **(of_forward if is_forward else {})}

    def bias_strides(self, direction: int, of_sums: tuple[int, ...] | None = None) -> tuple[int, ...] | None:
        """(batch, head) strides of the bias by tile rows (direction 0) or tile columns (1); None without a bias.

        of_sums  shape of the sums of ds, whose (batch, head) strides follow
        """
        table = self.tables[direction] if self.tables else None
        if table is None:
            return None
        return *axis_strides(table.shape), *(() if of_sums is None else axis_strides(of_sums))

    def sums_shape(
        self, direction: int, batch_heads: tuple[int, int], lists: PlanSpecs, step: tuple[int, int]
    ) -> tuple[int, ...]:
        """Shape of the sums of ds for the gradient of the bias: score_mods.sums_shape.

        lists  of the plan's tile rows (direction 0) or tile columns (1)
        step   queries and keys that a warp sums in one step
        """
        (record_shape, _), table = lists, self.tables[direction]
        assert record_shape is not None and table is not None
        return sums_shape(batch_heads, record_shape, table.shape[2], (TILE, TILE), step)


PLAIN = ModSpecs()


def mod_specs_of(
    scores: Scores | None, *tables: torch.Tensor | None, wanted: Sequence[bool] = (False,) * 4
) -> ModSpecs:
    """The cache key of score mods. tables: of `bias_table`, by direction; wanted: as `backward` has it."""
    if scores is None:
        return PLAIN
    assert scores.block_bias is None or tables, "calls with block_bias have tiles of 128 x 128"
    is_one_sided = scores.is_causal and scores.alibi_slopes is not None
    has_bias = scores.block_bias is not None
    return ModSpecs(
        scores.softcap,
        cache_key_of(scores.sinks),
        cache_key_of(scores.alibi_slopes),
        is_one_sided,
        tuple(map(spec_of, tables)) if has_bias else (),
        has_bias and wanted[2],
    )


def bias_table(scores: Scores | None, direction: int) -> torch.Tensor | None:
    """The bias of each listed tile, by tile rows (direction 0) or tile columns (1), in base 2; None without a bias."""
    if scores is None or scores.block_bias is None:
        return None
    assert scores.bias_cell == (TILE, TILE), "dispatch refuses block_bias for smaller blocks"
    return scores.tables(direction, base_2=True)
