"""Work, balance and predicted time of a call: the numbers behind `explain`."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import torch

from ..dispatch import FEW_QUERIES
from ..kernels.schedule import are_uneven, interleaved_heads, padded_dim
from ..plan_format import BEGIN, COL_LISTS, GATHERED_TILE, N_PARTIAL, N_TILES, RECORD, ROW_LISTS, Plan
from . import memory, prediction
from .call import Call
from .prediction import Calibration, Device, Kernel, Prediction, Rates
from .scheduling import Lines, Sides, interleaved, split_lines

# share of the peak memory bandwidth that a copy reaches (H200: 4.3 of 4.9 TB/s)
COPY_SHARE = 0.875
# for the balance on a GPU without measurements: work in tiles, not in time
GENERIC = Rates((Kernel("rows", 1, 1.0),), 1.0, 0.3, 1.0, 0.0)


# ---- tiles and pairs ----


def _pairs_of_plan(plan: Plan) -> int:
    """Attending pairs over the batches and heads of a plan."""
    records, ids, words = (tensor.cpu().numpy() for tensor in (plan.row_records, plan.row_bitmask_ids, plan.bitmasks))
    records = records.reshape(-1, RECORD).astype(np.int64)
    begin, n_tiles, n_partial = records[:, BEGIN], records[:, N_TILES], records[:, N_PARTIAL]
    # partial tiles come first in each line
    passed = np.cumsum(n_partial) - n_partial
    entries = np.repeat(begin - passed, n_partial) + np.arange(n_partial.sum())
    if plan.tile == GATHERED_TILE:
        # bitmask 0 is empty; each bit is there twice
        return int(np.bitwise_count(words.view(np.uint32)).sum(axis=1, dtype=np.int64)[ids].sum() // 2)
    of_bitmask = np.bitwise_count(words.view(np.uint32)).sum(axis=(1, 2), dtype=np.int64)
    return int(of_bitmask[ids[entries]].sum() + (n_tiles - n_partial).sum() * plan.tile**2)


def _attending(call: Call) -> int:
    """Attending pairs over all batches and heads."""
    n_batch_heads = call.batch * call.heads
    if call.plan is not None:
        n_plan_heads = call.plan.row_records.shape[0] * call.plan.row_records.shape[1]
        return n_batch_heads // n_plan_heads * _pairs_of_plan(call.plan)
    if call.causal:
        sees = np.arange(1, call.q_len + 1) + (call.kv_len - call.q_len)
        return n_batch_heads * int(sees.clip(0, call.kv_len).sum())
    return n_batch_heads * call.q_len * call.kv_len


class Balance(NamedTuple):
    """How evenly tiles are spread over tile rows and columns, and what that costs.

    longest_row, mean_row  tiles of a tile row
    longest_col, mean_col  tiles of a tile column, over all query heads that share a KV head
    n_sms                  SMs of the GPU; None on another device, as are forward and backward
    forward, backward      how many times longer the kernels take than with work spread evenly over the SMs
    """

    longest_row: int
    mean_row: float
    longest_col: int
    mean_col: float
    n_sms: int | None
    forward: float | None
    backward: float | None


class Work(NamedTuple):
    """Counts over all batches and heads.

    tiles, partial  computed tiles, and those that are masked pair by pair
    grid            all tiles, computed or not
    computed, attending  pairs in computed tiles, and pairs that attend
    """

    tiles: int
    partial: int
    grid: int
    computed: int
    attending: int


def work(call: Call) -> Work:
    """What a call computes."""
    if call.is_empty:
        return Work(0, 0, 0, 0, 0)
    n_batch_heads = call.batch * call.heads
    tile = call.side
    # of the tokens as they are
    grid = n_batch_heads * -(-call.q.shape[2] // tile) * -(-call.k.shape[2] // tile)
    if call.backend == "reference":
        pairs = n_batch_heads * call.q_len * call.kv_len
        return Work(grid, grid, grid, pairs, _attending(call))
    rows = call.sides.rows
    tiles, partial = int(rows.tiles.sum()), int(rows.partial.sum())
    return Work(tiles, partial, grid, tiles * tile**2, _attending(call))


# ---- the GPU ----


@functools.cache
def device_of(device: torch.device) -> Device | None:
    """The properties of a GPU that predictions use; None for another device."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    # missing for GPUs that share the host's memory, and in some versions of PyTorch
    clock, memory_clock, bus = (
        getattr(found, name, 0) for name in ("clock_rate", "memory_clock_rate", "memory_bus_width")
    )
    # kHz; memory transfers twice a cycle
    bandwidth = COPY_SHARE * 2 * memory_clock * bus / 8 * 1e-6
    return Device(found.name, (found.major, found.minor), found.multi_processor_count, clock * 1e-3, bandwidth)


def unmeasured(call: Call) -> str:
    """Why no GPU has measurements for such a call; empty if one may."""
    if not call.has_kernels:
        return f'"{call.backend}" on {call.q.device} was not measured'
    if call.is_empty:
        return "there is nothing to compute"
    if not call.is_half:
        return f"{call.dtype} was not measured"
    if call.dropout_p > 0:
        return "dropout was not measured"
    if call.scores is not None:
        return "sinks, softcap, alibi_slopes, block_bias and pair_bias were not measured"
    if call.q_len <= FEW_QUERIES:
        return "the kernels for few queries were not measured"
    if memory.has_separate_dq(call):
        return (
            "the backward of hopper with a launch for dq alone, for few tiles per row, few long tile columns or "
            "deterministic=True, was not measured"
        )
    return ""


def kernels_of(call: Call) -> dict[str, str]:
    """The kernels of each direction, as the calibrations name them."""
    is_own = call.backend == "triton" or memory.uses_hopper_backward(call)
    return {"fwd": call.kernels, "bwd": call.kernels if is_own else "triton"}


def predict(call: Call, device: Device | None, table: tuple[Calibration, ...]) -> tuple[Prediction | None, str]:
    """(prediction or None, why there is none)."""
    why = unmeasured(call)
    if why or device is None:
        return None, why
    # without a layout the kernels may be others: tiles are of 128 x 128
    dense_call = dataclasses.replace(call, layout=None)
    used, dense_used = (_calibrations(each, device, table) for each in (call, dense_call))
    dim = max(call.head_dim, call.v_dim)
    if used is None or dense_used is None:
        return None, (
            f'"{call.kernels}" was not measured at a head dimension of {padded_dim(call.kernels, dim)} or wider on a '
            f"GPU of compute capability {device.capability[0]}.{device.capability[1]}"
        )
    is_known = device.clock > 0 and device.bandwidth > 0
    if not (is_known or all(prediction.is_same(each.device, device) for each in used)):
        return None, f"the model was not fitted to this {device.name}, which does not report clock and bandwidth"
    mine, dense = _times(call, device, *used), _times(dense_call, device, *dense_used)
    said = [caveat for each in used for caveat in prediction.caveats(each, device, dim)]
    if call.batch * max(call.q_len, call.kv_len) < prediction.MIN_TOKENS:
        said.append(f"with fewer than {prediction.MIN_TOKENS:,} tokens host time dominates, which is not predicted")
    if call.has_kv_lengths:
        said.append("kv_lengths are ignored, as if all were kv_len")
    if call.unreadable:
        said.append(f"where TMA cannot load {' and '.join(call.unreadable)}, nothing was measured")
    return Prediction(*mine, *dense, basis=prediction.basis(used), caveats=tuple(dict.fromkeys(said))), ""


def _calibrations(call: Call, device: Device, table: tuple[Calibration, ...]) -> tuple[Calibration, Calibration] | None:
    """The calibrations of a call's forward and backward; None if one is missing."""
    dim = max(call.head_dim, call.v_dim)
    forward, backward = (
        prediction.find(table, device, kernels, dim, direction) for direction, kernels in kernels_of(call).items()
    )
    return None if forward is None or backward is None else (forward, backward)


def programs(call: Call, n_sms: int) -> tuple[Sides, Sides]:
    """Tiles of the programs of the forward and of the backward on a GPU with n_sms SMs. `hopper` splits long lines."""

    by_head, is_uneven = memory.sums_dkdv(call, n_sms), are_uneven(call.plan or (), call.causal)

    def programs_of(lines: Lines, first: int, n_batch_heads: int) -> Lines:
        chosen = memory.split(call, first, n_sms)
        if chosen.num_splits > 1 or call.is_fine:
            return split_lines(lines, chosen.n_split_lines * n_batch_heads, chosen.num_splits)
        n_lines, lengths = len(lines.tiles) // n_batch_heads, (call.q_len, call.kv_len)
        n_interleaved = interleaved_heads(
            n_lines, n_batch_heads, n_sms, *lengths, is_uneven=is_uneven or (first == COL_LISTS and by_head)
        )
        return interleaved(lines, n_batch_heads, n_interleaved, call.n_long(first))

    forward = backward = call.sides
    if call.backend == "hopper":
        forward = forward._replace(rows=programs_of(forward.rows, ROW_LISTS, call.batch * call.heads))
    if memory.uses_hopper_backward(call):
        # kernels that keep their sums in registers iterate over tile rows too, for dq
        rows = forward.rows if memory.sums_in_registers(call) else backward.rows
        cols = call.cols_of_query_heads if by_head else backward.cols
        backward = Sides(rows, programs_of(cols, COL_LISTS, call.batch * (call.heads if by_head else call.kv_heads)))
    return forward, backward


def _times(call: Call, device: Device, forward: Calibration, backward: Calibration) -> tuple[float, float]:
    """Milliseconds of forward and backward."""

    def one(found: Calibration, sides: Sides, moved: memory.Moved) -> float:
        rates, known = prediction.on_device(found, device)
        return prediction.direction_ms(rates, sides, known, main_bytes=moved.main_bytes, extra_bytes=moved.extra_bytes)

    sides, n_sms = programs(call, device.n_sms), device.n_sms
    return (one(forward, sides[0], memory.forward(call, n_sms)), one(backward, sides[1], memory.backward(call, n_sms)))


def balance(call: Call, device: Device | None, table: tuple[Calibration, ...]) -> Balance:
    """The balance of a call, with the rates measured on its GPU, or else generic ones."""
    if call.is_empty:
        return Balance(0, 0.0, 0, 0.0, None, None, None)
    rows, cols = (side.tiles for side in call.sides)
    spread = int(rows.max()), float(rows.mean()), int(cols.max()), float(cols.mean())
    if device is None or not call.has_kernels:
        return Balance(*spread, None, None, None)
    dim = max(call.head_dim, call.v_dim)
    losses = []
    programs_of = programs(call, device.n_sms)
    for (direction, kernels), side, sides in zip(kernels_of(call).items(), ("rows", "cols"), programs_of, strict=True):
        found = prediction.find(table, device, kernels, dim, direction)
        generic = GENERIC._replace(kernels=(Kernel(side, 1, 1.0),))
        losses.append(prediction.loss(generic if found is None else found.rates, sides, device.n_sms))
    return Balance(*spread, device.n_sms, *losses)
