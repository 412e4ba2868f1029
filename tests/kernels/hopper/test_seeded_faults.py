"""Seeded faults, which are changes in the sources of the Hopper kernels, are detected on the simulator."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from blocksparse_flash import BlockLayout
from blocksparse_flash.kernels.hopper.backward import Config as BackwardConfig
from blocksparse_flash.kernels.hopper.forward import Config as ForwardConfig
from blocksparse_flash.plan_format import FINE_TILE, GATHERED_TILE
from blocksparse_flash.plan_format import TILE as TILE_SIDE
from tests import test_zoo as zoo
from tests.kernels.hopper.test_protocol import (
    BFLOAT16,
    CAUSAL,
    LARGE_SCORES,
    LONG_LINES,
    MIXED_FINE,
    WINDOW,
    mixed,
    split,
)
from tests.support import cases
from tests.support.gluon_machine import ProtocolError
from tests.support.gluon_simulator import Change, Simulation

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter: a GPU runs the kernels")

FORWARD, BACKWARD, SOFTMAX = (f"hopper.{name}" for name in ("forward", "backward", "softmax"))
FORWARD_CONSUMER, BACKWARD_CONSUMER = "hopper.forward_consumer", "hopper.backward_consumer"
WIDE_DKDV, WIDE_DQ = "hopper.wide_dkdv", "hopper.backward_dq"
FINE_FORWARD, FINE_BACKWARD, FINE_TILES = (f"hopper.fine_{name}" for name in ("forward", "backward", "tiles"))
ROWS, COLS, TILE = "hopper.forward_producer", "hopper.backward_producer", "triton.tile"
# faults of split tile rows and columns
SPLIT_FAULTS = {
    "split starts at the first step of the tile row": Change(
        ROWS, "            begin = begin + first\n", "            pass\n"
    ),
    "partial steps of a split counted over the whole tile row": Change(
        TILE, "tl.minimum(tl.maximum(n_front - begin, 0), end - begin)", "n_front"
    ),
    "workspace block of a split without its head": Change(
        TILE,
        "(i_split * n_split_lines + i_launch) * n_batch_heads + batch_head",
        "(i_split * n_split_lines + i_launch) * n_batch_heads",
    ),
    "extra splits counted in the positions of whole tile rows": Change(
        TILE, "i_work - n_more),\n        tl", "i_work),\n        tl"
    ),
    "split stored as a whole tile row": Change(
        FORWARD_CONSUMER, "elif work_tile.target < sizes.n_batch_heads:", "elif work_tile.target >= 0:"
    ),
    "split stored as a whole tile column": Change(
        BACKWARD_CONSUMER, "        elif work_tile.i_block < 0:\n", "        elif work_tile.i_block >= -1:\n"
    ),
}
# faults of the kernels for tiles of 64 x 64, with kv_lengths
FINE_FAULTS = {
    "tile loaded while another warp multiplies it": Change(FINE_TILES, "    if not IS_FREE:\n", "    if IS_FREE:\n"),
    "tail zeroed without a fence": Change(FINE_TILES, "        fence_async_shared()\n", ""),
    "tail zeroed from the next token on": Change(
        FINE_TILES, "gl.expand_dims(o_row < limit, 1)", "gl.expand_dims(o_row <= limit, 1)"
    ),
    "next keys loaded before the product": Change(
        FINE_FORWARD,
        """    b_scores = warpgroup_mma_wait(0, deps=(scores_token,))
    load_step(k_desc, buffers.k, buffers.k_full, i_batch, i_kv_head, next_starts, has_next)
""",
        """    load_step(k_desc, buffers.k, buffers.k_full, i_batch, i_kv_head, next_starts, has_next)
    b_scores = warpgroup_mma_wait(0, deps=(scores_token,))
""",
    ),
    "keys waited for in the wrong phase": Change(
        FINE_FORWARD, "mbarrier.wait(buffers.k_full, i_step & 1)", "mbarrier.wait(buffers.k_full, i_step & 1 ^ 1)"
    ),
    "values not waited for": Change(FINE_FORWARD, "    mbarrier.wait(buffers.v_full, i_step & 1)\n", ""),
    "keys loaded for a step that does not exist": Change(
        FINE_FORWARD, "has_next = i_step + 1 < n_steps", "has_next = i_step < n_steps"
    ),
    "queries loaded by a program without steps": Change(
        FINE_FORWARD, "i_head, (q_start,), has_steps)", "i_head, (q_start,), True)"
    ),
    "out in flight at the end": Change(FINE_FORWARD, "        tma.store_wait(0)\n", ""),
    "out stored without a fence": Change(
        FINE_FORWARD, "fence_async_shared()\n        tma_store(out_desc", "tma_store(out_desc"
    ),
    "stages of the next head begin anew": Change(FINE_BACKWARD, "        n_done += n_steps\n", ""),
    "record of the first head for the whole group": Change(
        FINE_BACKWARD, "        if GROUP > 1:\n", "        if GROUP > 9:\n"
    ),
    "dO not waited for": Change(FINE_BACKWARD, "    mbarrier.wait(buffers.dout_full.index(stage), phase)\n", ""),
    "queries loaded again before dk is complete": Change(
        FINE_BACKWARD,
        "b_dk = warpgroup_mma_wait(0, deps=(dk_token,))",
        "b_dk = warpgroup_mma_wait(1, deps=(dk_token,))",
    ),
    "keys loaded while dq reads them": Change(
        FINE_BACKWARD,
        """    b_dq = warpgroup_mma_wait(0, deps=(dq_token,))
    has_next = i_step + STAGES < n_steps
    load_step(k_desc, k_buffer, k_full, i_batch, i_kv_head, next_starts, has_next)
""",
        """    has_next = i_step + STAGES < n_steps
    load_step(k_desc, k_buffer, k_full, i_batch, i_kv_head, next_starts, has_next)
    b_dq = warpgroup_mma_wait(0, deps=(dq_token,))
""",
    ),
    "keys of the next step in place of those of the step after it": Change(
        FINE_BACKWARD,
        "i_next = gl.where(i_step + STAGES < n_steps, i_step + STAGES, 0)",
        "i_next = gl.where(i_step + STAGES < n_steps, i_step + 1, 0)",
    ),
    "phase of the keys counted in steps": Change(
        FINE_BACKWARD, "i_step % STAGES, i_step // STAGES & 1", "i_step % STAGES, i_step & 1"
    ),
    "values of a step that does not exist": Change(
        FINE_BACKWARD, "has_next = i_step + STAGES < n_steps", "has_next = i_step + STAGES <= n_steps"
    ),
    "delta not waited for": Change(
        FINE_BACKWARD,
        "b_delta = wait_for_values(buffers.delta, buffers.delta_full, stage, phase, gl.SliceLayout(0, score_layout))",
        "b_delta = buffers.delta.index(stage).load(gl.SliceLayout(0, score_layout))",
    ),
    "lse of the first head": Change(FINE_BACKWARD, "(o_head + starts[0]).to(gl.int32)", "starts[0].to(gl.int32)"),
    "every split starts at the first tile": Change(FINE_TILES, "        begin = begin + first\n", ""),
    "split stored as a whole tile row": Change(
        FINE_FORWARD, "    if work_tile.i_split < 0:\n", "    if work_tile.i_split < 9:\n"
    ),
    "dv of a split in place of its dk": Change(FINE_BACKWARD, "p_split + SIDE * DIM, b_dv", "p_split, b_dv"),
    "scores masked before a negative scale": Change(
        FINE_BACKWARD,
        """    b_scores, b_tanh = apply_score_mods(b_scores, mods, slope, o_query, o_key)
    b_scores = b_scores - gl.expand_dims(b_lse, 1)
    # after scaling, since the scale may be negative
    if MASKED:
        b_scores = mask_columns(b_scores, bitmask, o_kv)
""",
        """    if MASKED:
        b_scores = mask_columns(b_scores, bitmask, o_kv)
    b_scores, b_tanh = apply_score_mods(b_scores, mods, slope, o_query, o_key)
    b_scores = b_scores - gl.expand_dims(b_lse, 1)
""",
    ),
}
# faults of gathered plans
GATHERED_FAULTS = {
    "bytes of one tile expected": Change(
        FINE_TILES, "mbarrier.expect(full, len(starts) * (COLUMNS", "mbarrier.expect(full, (COLUMNS"
    ),
    "second tile in the place of the first": Change(
        FINE_TILES,
        "buffer.slice(i_load * GATHERED_TILE, GATHERED_TILE, 2)",
        "buffer.slice(i_load // 2 * GATHERED_TILE, GATHERED_TILE, 2)",
    ),
    "all tiles from the start of the first": Change(
        FINE_TILES, "starts[i_load], column], full", "starts[0], column], full"
    ),
    "bits of the first tile for the second": Change(
        FINE_TILES, "return b_low & 0xFFFF | b_high & -0x10000", "return b_low"
    ),
    "bits of the first two tiles for the others": Change(
        FINE_TILES, "load_half_words(p_ids + 2, bitmasks_ptr, o_row)", "load_half_words(p_ids, bitmasks_ptr, o_row)"
    ),
    "lengths compared with positions in the step": Change(
        FINE_FORWARD, "positions(starts, o_kv) < kv_limit", "starts[0] + o_kv < kv_limit"
    ),
    "lengths compared with positions in the step of dq": Change(
        FINE_BACKWARD, "positions(starts, o_kv) < kv_limit", "starts[0] + o_kv < kv_limit"
    ),
    "lse of neighbors of the first tile": Change(
        FINE_BACKWARD, "o_query = o_head + positions(starts, o_q)", "o_query = o_head + starts[3] + o_q % 16"
    ),
    "tail zeroed by the start of the first tile": Change(
        FINE_TILES, "        last = gl.maximum(last, starts[i_load])\n", "        pass\n"
    ),
}
# faults of the forward and the backward on dense calls with kv_lengths
FORWARD_FAULTS = {
    "V released before it is read": Change(
        FORWARD_CONSUMER,
        """        b_out, b_out_tail = wait_for_products(0, out_token, out_tail_token)
        consumer_release(v, v_stage)
""",
        """        consumer_release(v, v_stage)
        b_out, b_out_tail = wait_for_products(0, out_token, out_tail_token)
""",
    ),
    "empty barrier of K counts one warpgroup": Change(
        FORWARD,
        "k=allocate_pipeline(k_buffers, STAGES, CONSUMERS=WARPGROUPS)",
        "k=allocate_pipeline(k_buffers, STAGES, CONSUMERS=1)",
    ),
    "full barrier of V not waited for": Change(FORWARD_CONSUMER, "    consumer_wait(v, stage, i_load // STAGES)\n", ""),
    "full barrier of K waited for in the wrong phase": Change(
        FORWARD_CONSUMER, "consumer_wait(k, stage, i_load // STAGES)", "consumer_wait(k, stage, i_load // STAGES + 1)"
    ),
    "scores not waited for": Change(
        FORWARD_CONSUMER, "warpgroup_mma_wait(0 if FIRST else PV_PRODUCTS,", "warpgroup_mma_wait(0 if FIRST else 2,"
    ),
    "last ping-pong arrivals left over": Change(
        FORWARD_CONSUMER, "    ping_pong_finish(WARPGROUP, WARPGROUPS)", "    pass"
    ),
    "ping-pong started without arrivals": Change(
        FORWARD_CONSUMER, "    ping_pong_start(WARPGROUP, WARPGROUPS)", "    pass"
    ),
    "tail of V zeroed inside a ping-pong turn": Change(
        FORWARD_CONSUMER,
        """        zero_values_from(v, v_tails, ptrs, work_tile, i_step - 1, i_load - 1, kv_limit, WARPGROUP, STAGES)
    ping_pong_wait(WARPGROUP, WARPGROUPS)""",
        """        pass
    ping_pong_wait(WARPGROUP, WARPGROUPS)
    if not FIRST:
        zero_values_from(v, v_tails, ptrs, work_tile, i_step - 1, i_load - 1, kv_limit, WARPGROUP, STAGES)""",
    ),
    "out stored without a proxy fence": Change(
        FORWARD_CONSUMER, "    fence_async_shared()\n    q_start", "    q_start"
    ),
    "out overwritten while TMA stores it": Change(
        FORWARD_CONSUMER,
        "        # wait until TMA has read the previous tile row from the buffer\n        tma.store_wait(0)\n",
        "        pass\n",
    ),
    "empty barrier of work tiles counts one warpgroup": Change(
        FORWARD, "WORK_TILE_STAGES, CONSUMERS=WARPGROUPS)", "WORK_TILE_STAGES, CONSUMERS=1)"
    ),
    "out not rescaled": Change(FORWARD_CONSUMER, "b_out = scale_rows(b_out, b_decay, CAN_SKIP)", "pass"),
    "second partial step skipped": Change(
        FORWARD_CONSUMER, "for i_step in range(1, n_partial)", "for i_step in range(2, n_partial)"
    ),
    "full barrier of Q not waited for": Change(FORWARD_CONSUMER, "        consumer_wait(q, i_buffer, phase)\n", ""),
    "tail of V not zeroed": Change(
        "hopper.registers", "gl.where(gl.expand_dims(o_kv < limit, 1), b_tile, 0.0)", "b_tile"
    ),
}
BACKWARD_FAULTS = {
    "ds read before the other warpgroup has written its half": Change(
        BACKWARD_CONSUMER,
        """        ds_tile.slice(FIRST, WARPGROUP_ROWS, 0).store(b_ds)
        fence_async_shared()
        if i_step_total % 2 != WARPGROUP:
            # wait until TMA has read the dq of the step before, which the other warpgroup will overwrite
            tma.store_wait(0)
            named_barrier("arrive", DQ_BARRIER + 1 - WARPGROUP)
""",
        """        if i_step_total % 2 != WARPGROUP:
            tma.store_wait(0)
            named_barrier("arrive", DQ_BARRIER + 1 - WARPGROUP)
        ds_tile.slice(FIRST, WARPGROUP_ROWS, 0).store(b_ds)
        fence_async_shared()
""",
    ),
    "dq multiplied before the other warpgroup has arrived": Change(
        BACKWARD_CONSUMER, '            named_barrier("sync", DQ_BARRIER + WARPGROUP)\n', ""
    ),
    "both warpgroups at one barrier for dq": Change(
        BACKWARD_CONSUMER, "DQ_BARRIER + 1 - WARPGROUP", "DQ_BARRIER + WARPGROUP"
    ),
    "both warpgroups compute dq of the same steps": Change(
        BACKWARD_CONSUMER, "        if i_step_total % 2 == WARPGROUP:\n", "        if i_step_total % 2 == 0:\n"
    ),
    "one buffer of ds instead of two": Change(
        BACKWARD_CONSUMER, "staging.ds.index(i_step_total % 2)", "staging.ds.index(0)"
    ),
    "ds read without a proxy fence": Change(
        BACKWARD_CONSUMER,
        "        fence_async_shared()\n        if i_step_total",
        "        if i_step_total",
    ),
    "dq added without a proxy fence": Change(
        BACKWARD_CONSUMER,
        "            fence_async_shared()\n            tma_reduce_add",
        "            tma_reduce_add",
    ),
    "Q released before it is read": Change(
        BACKWARD_CONSUMER,
        """    b_dk, b_dk_tail = wait_for_products(0, dk_token, dk_tail_token)
    consumer_release(pipelines.q, stage)""",
        """    consumer_release(pipelines.q, stage)
    b_dk, b_dk_tail = wait_for_products(0, dk_token, dk_tail_token)""",
    ),
    "dq overwritten while TMA adds it": Change(
        BACKWARD_CONSUMER,
        """            tma.store_wait(0)
            named_barrier("arrive", DQ_BARRIER""",
        """            named_barrier("arrive", DQ_BARRIER""",
    ),
    "full barrier of dO expects no bytes of delta": Change(
        COLS, "dout_bytes + descs.delta.block_type.nbytes", "dout_bytes"
    ),
    "dk written over ds that is still read": Change(
        BACKWARD_CONSUMER,
        "    # wait until the other warpgroup has read ds, or K and V, and TMA its dq\n"
        '    named_barrier("sync", CONSUMERS_BARRIER)\n',
        "\n\n",
    ),
    "dv written over dq that TMA still adds": Change(
        BACKWARD_CONSUMER,
        """            # wait until TMA has read the last dq, whose buffer may be that of dv
            tma.store_wait(0)
""",
        "            pass\n\n",
    ),
    "ds written over dk that TMA still stores": Change(
        BACKWARD_CONSUMER,
        """        # wait until TMA has read dk and dv of the previous work tile from the buffers that the steps write
        tma.store_wait(0)
""",
        "\n\n",
    ),
    "ds written over dk that the other warpgroup still stores": Change(
        BACKWARD_CONSUMER,
        '        tma.store_wait(0)\n        named_barrier("sync", CONSUMERS_BARRIER)\n        kv_stage',
        "        tma.store_wait(0)\n\n        kv_stage",
    ),
    "K and V never released": Change(
        BACKWARD_CONSUMER,
        """        if not HAS_TAIL:
            consumer_release(pipelines.kv, kv_stage)
""",
        "",
    ),
    "empty barrier of K and V counts one warpgroup": Change(
        BACKWARD,
        "empty=allocate_mbarriers(KV_STAGES, 2)",
        "empty=allocate_mbarriers(KV_STAGES, 1)",
    ),
    "empty barrier of K and V waited for in the wrong phase": Change(
        COLS, "producer_acquire(kv, stage, i_tile // KV_STAGES)", "producer_acquire(kv, stage, i_tile // KV_STAGES + 1)"
    ),
    "empty barrier of work tiles counts one warpgroup": Change(
        BACKWARD,
        "allocate_pipeline(work_tile_ints, WORK_TILE_STAGES, CONSUMERS=2)",
        "allocate_pipeline(work_tile_ints, WORK_TILE_STAGES, CONSUMERS=1)",
    ),
    "dp not waited for": Change(
        BACKWARD_CONSUMER,
        "b_dp = warpgroup_mma_wait(0, deps=(dp_token,))",
        "b_dp = warpgroup_mma_wait(1, deps=(dp_token,))",
    ),
    "partial step computed as a full step": Change(BACKWARD_CONSUMER, "MASKED=not FULL", "MASKED=False"),
}
# faults of three consumer warpgroups
THREE_WARPGROUP_FAULTS = {
    "ping-pong started without arrivals": FORWARD_FAULTS["ping-pong started without arrivals"],
    "last ping-pong arrivals left over": FORWARD_FAULTS["last ping-pong arrivals left over"],
    "ping_pong_finish without arrivals": Change("hopper.barriers", "range(WARPGROUP + 1, WARPGROUPS - 1)", "range(0)"),
    "ping-pong arrivals at the next warpgroup only": Change(
        "hopper.barriers", "if other != WARPGROUP:", "if other == (WARPGROUP + 1) % WARPGROUPS:"
    ),
    "empty barrier of K counts two warpgroups": Change(
        FORWARD,
        "k=allocate_pipeline(k_buffers, STAGES, CONSUMERS=WARPGROUPS)",
        "k=allocate_pipeline(k_buffers, STAGES, CONSUMERS=2)",
    ),
    "empty barrier of V counts two warpgroups": Change(
        FORWARD,
        "v=allocate_pipeline(v_buffers, STAGES, CONSUMERS=WARPGROUPS)",
        "v=allocate_pipeline(v_buffers, STAGES, CONSUMERS=2)",
    ),
    "empty barrier of work tiles counts two warpgroups": Change(
        FORWARD, "WORK_TILE_STAGES, CONSUMERS=WARPGROUPS)", "WORK_TILE_STAGES, CONSUMERS=2)"
    ),
    "tile rows start every 128 queries": Change(ROWS, "i_launch) * BLOCK_Q", "i_launch) * TILE"),
    "steps counted for tile rows of 128 queries": Change(
        ROWS, "BLOCK_Q=BLOCK_Q, BLOCK_KV=BLOCK_KV", "BLOCK_Q=TILE, BLOCK_KV=BLOCK_KV"
    ),
}
# faults of two stages of Q and a rescale threshold
Q_STAGE_FAULTS = {
    "phase of Q changes with every work tile": Change(ROWS, "(i_tile // CONFIG.q_stages) & 1", "i_tile & 1"),
    "both stages of Q in one buffer": Change(
        ROWS, "return i_tile % CONFIG.q_stages * CONFIG.warpgroups + WARPGROUP,", "return WARPGROUP,"
    ),
    "full barrier of Q not waited for": FORWARD_FAULTS["full barrier of Q not waited for"],
    "Q released before it is read": Change(
        FORWARD_CONSUMER,
        "        if n_steps > 0:\n            state",
        "        consumer_release(q, i_buffer)\n        if n_steps > 0:\n            state",
    ),
    "out not rescaled": Change(FORWARD_CONSUMER, "return rescale(b_out, b_factor)", "return b_out"),
    "running maximum not updated": Change(SOFTMAX, "return b_p, b_decay, b_new_max,", "return b_p, b_decay, b_max,"),
}
# faults of dq that the consumers add with atomics
DQ_FROM_REGISTERS_FAULTS = {
    "ds read before the other warpgroup has written its half": Change(
        BACKWARD_CONSUMER, '        named_barrier("sync", CONSUMERS_BARRIER)\n        ds_part = ', "        ds_part = "
    ),
    "one buffer of ds instead of two": BACKWARD_FAULTS["one buffer of ds instead of two"],
    "ds read without a proxy fence": Change(
        BACKWARD_CONSUMER,
        '        fence_async_shared()\n        named_barrier("sync", CONSUMERS_BARRIER)\n        ds_part = ',
        '        named_barrier("sync", CONSUMERS_BARRIER)\n        ds_part = ',
    ),
    "dv written over dk": Change(
        BACKWARD, "staging_buffer(ds_buffers, dv_desc, bytes_of(", "staging_buffer(ds_buffers, dv_desc, 0 * bytes_of("
    ),
    "both warpgroups add dq to the first half": Change(
        BACKWARD_CONSUMER, "SHARE[0] * DIM + WARPGROUP_ROWS * SHARE[1]", "0"
    ),
}


class Run(NamedTuple):
    """One call on the simulator, with few pipeline stages and SMs, so that buffers are soon reused.

    seed               chooses the order of events
    layout             a layout, or (q_len, kv_len) of a dense call
    config             of the forward
    dq_from_registers  of the backward: the consumers add dq with atomics, not with TMA
    n_sms              SMs of the simulated GPU
    splits             (num_splits, split tile rows and columns of each head), None without splits
    has_backward       False: the forward only
    n_interleaved      heads whose tile rows and columns are interleaved; None: as the launch chooses
    """

    seed: int
    layout: cases.Case | tuple[int, int]
    call: zoo.Call
    config: ForwardConfig = ForwardConfig(stages=2)
    dq_from_registers: bool = False
    n_sms: int = 1
    splits: tuple[int, int] | None = None
    has_backward: bool = True
    tile: int = TILE_SIDE
    n_interleaved: int | None = None


def staircase() -> BlockLayout:
    """Causal blocks of 64 tokens, 300 queries and 400 keys."""
    return BlockLayout.from_predicate(lambda q_pos, kv_pos: kv_pos <= q_pos + 100, 300, 400, block_size=64)


def scattered() -> BlockLayout:
    """Random blocks of 16: full and partial tiles, and steps with tiles that only fill them."""
    mask = torch.rand(1, 4, 20, 25, generator=torch.Generator().manual_seed(0)) < 0.2
    mask[:, :, :4, [1, 3, 8, 9, 24]] = True
    return BlockLayout.from_block_mask(mask, 310, 397, block_size=16)


MIXED = cases.Case("mixed", lambda: mixed(TILE_SIDE))
SCATTERED = cases.Case("scattered", scattered)
MHA, GQA = zoo.Call(head_dim=64, dtype=torch.float16), zoo.Call(head_dim=64, dtype=torch.float16, kv_heads=1)
CAUSAL_LENGTHS = zoo.Call(head_dim=64, causal=True, has_kv_lengths=True, dtype=BFLOAT16)
# more tile columns than programs
COLUMNS = [
    (MIXED, MHA),
    (cases.Case("staircase", staircase), zoo.Call(head_dim=64, has_kv_lengths=True, dtype=BFLOAT16)),
]
# tile columns with an even and with an odd number of steps
DENSE = [Run(seed, lengths, CAUSAL_LENGTHS) for lengths in ((203, 400), (300, 400)) for seed in range(8)]
SPLIT = [Run(seed, MIXED, GQA, splits=(2, 1)) for seed in range(8)]
THREE_WARPGROUPS = [
    Run(seed, (577, 300), CAUSAL, config=ForwardConfig(stages=2, warpgroups=3), has_backward=False)
    for seed in range(24)
]
Q_STAGES = [
    Run(
        seed,
        (203, 600),
        LARGE_SCORES[0],
        config=ForwardConfig(stages=2, q_stages=2, rescale_threshold=8.0),
        has_backward=False,
    )
    for seed in range(24)
]
FINE = [
    Run(seed, layout, dataclasses.replace(call, has_kv_lengths=True), tile=FINE_TILE)
    for seed, (layout, call) in enumerate(
        itertools.product((MIXED_FINE, WINDOW), (MHA, dataclasses.replace(GQA, scale=-0.3)))
    )
]
FINE += [run._replace(seed=10 + run.seed, splits=(2, 2)) for run in FINE[::3]]
GATHERED = [
    Run(seed, layout, dataclasses.replace(call, has_kv_lengths=True), tile=GATHERED_TILE)
    for seed, (layout, call) in enumerate(itertools.product((SCATTERED, WINDOW), (MHA, GQA)))
]
# faults of score mods, and of the steps of causal groups
MODS = "hopper.score_mods"
SCORE_MOD_FAULTS = {
    "slope of a negative distance": Change(MODS, "slope * gl.abs(b_distance)", "slope * b_distance"),
    "slope in the natural base": Change(
        MODS, "gl.load(mods.slopes_ptr + i_head) * LOG2_E", "gl.load(mods.slopes_ptr + i_head)"
    ),
    "sink of the wrong head": Change(
        FORWARD_CONSUMER, "mods, batch_head % sizes.n_heads, has_sink)", "mods, 0, has_sink)"
    ),
    "out not decayed by the sink": Change(MODS, ", b_decay / b_sum", ", 1.0 / b_sum"),
    "sink in every split": Change(FORWARD_CONSUMER, "sizes.n_batch_heads * (1 + sizes.n_split_lines)", "(1 << 30)"),
    "positions aligned to the first key": Change(FORWARD_CONSUMER, " + (sizes.kv_len - sizes.q_len)\n", "\n"),
    "ds without the derivative of the softcap": Change(MODS, " * (1.0 - b_tanh * b_tanh)", ""),
    # left out, it would only raise the maximum of rows whose near keys do not attend
    "distance of the query subtracted from the maximum": Change(
        SOFTMAX, "        b_new_max = b_new_max + b_shift\n", "        b_new_max = b_new_max - b_shift\n"
    ),
    "distance of the query left out of p": Change(SOFTMAX, "b_new_max - b_shift", "b_new_max"),
    "distance of the key left out": Change(MODS, " + gl.expand_dims(slope * o_col.to(gl.float32), 0)", ""),
    "keys after a query taken to be masked": Change(
        MODS, "scores.is_causal and scores.alibi_slopes", "scores.alibi_slopes"
    ),
    "positions of the tile column left out": Change(
        BACKWARD_CONSUMER, "(sizes.kv_len - sizes.q_len) - kv_start + o_query", "(sizes.kv_len - sizes.q_len) + o_query"
    ),
}
# of a bias: the wrong number, or a sum in the wrong place
BIAS_FAULTS = {
    "bias of the next tile": Change(
        FORWARD_CONSUMER, "gl.load(p_bias + (work_tile.begin + i_step", "gl.load(p_bias + (work_tile.begin + 1 + i_step"
    ),
    "bias of the tile in the row": Change(
        FORWARD_CONSUMER, "gl.load(p_bias + (work_tile.begin + i_step", "gl.load(p_bias + (i_step"
    ),
    "bias of a step in place of that of its tile": Change(
        FORWARD_CONSUMER, "(work_tile.begin + i_step // (TILE // BLOCK_KV))", "(work_tile.begin + i_step)"
    ),
    "bias of the first head": Change(
        FORWARD_CONSUMER, "mods.bias_strides, i_batch, i_head)", "mods.bias_strides, i_batch, i_head * 0)"
    ),
    "bias of the first batch": Change(
        FORWARD_CONSUMER, "mods.bias_strides, i_batch, i_head)", "mods.bias_strides, i_batch * 0, i_head)"
    ),
    "bias in place of the distance of the query": Change(
        FORWARD_CONSUMER, "b_shift = bias if b_shift is None else b_shift + bias", "b_shift = bias"
    ),
    "bias in the natural base": Change(MODS, "(direction, base_2=True)", "(direction, base_2=False)"),
    "bias by tile rows for tile columns": Change(
        BACKWARD, "bias_table(scores, 1)\n", "bias_table(scores, 0)\n"
    ),
    "bias of the next tile of the column": Change(
        BACKWARD_CONSUMER,
        "gl.load(p_bias + step // (TILE // BLOCK_Q))",
        "gl.load(p_bias + step // (TILE // BLOCK_Q) + 1)",
    ),
    "bias of the KV head": Change(
        BACKWARD_CONSUMER,
        "mods.bias_strides, i_batch, i_head)",
        "mods.bias_strides, i_batch, batch_head % sizes.n_heads)",
    ),
    "bias of the next tile of the row for dq": Change(
        WIDE_DQ, "b_lse - gl.load(p_bias + i_entry)", "b_lse - gl.load(p_bias + i_entry + 1)"
    ),
    "bias left out for dq": Change(WIDE_DQ, "b_lse - gl.load(p_bias + i_entry)", "b_lse"),
    "sum of ds with the derivative of the softcap": Change(
        WIDE_DQ, "b_ds, STRIDE=PARTS)", "b_ds * (1 - b_tanh * b_tanh), STRIDE=PARTS)"
    ),
    "sum of ds of the next tile": Change(WIDE_DQ, "p_sums + i_entry.to", "p_sums + (i_entry + 1).to"),
    "sums of one head": Change(WIDE_DQ, "bias_strides[2:], i_batch, i_head)", "bias_strides[2:], i_batch, i_head * 0)"),
    "sums of the first warpgroup alone": Change(WIDE_DQ, "p_sum + 4 * WARPGROUP * PARTS", "p_sum"),
    "sums of the first keys alone": Change(WIDE_DQ, " + i_step % PARTS", ""),
    "sums of one batch": Change(
        WIDE_DQ, "bias_strides[2:], i_batch, i_head)", "bias_strides[2:], i_batch * 0, i_head)"
    ),
    "sum of ds of the column with the derivative of the softcap": Change(
        MODS, "store_warp_sums(p_sum, b_ds, STRIDE=1)",
        "store_warp_sums(p_sum, b_ds * (1.0 - b_tanh * b_tanh), STRIDE=1)",
    ),
    "sum of ds of the next step of the column": Change(
        BACKWARD_CONSUMER, "step.to(gl.int64) * CONSUMER_WARPS", "(step + 1).to(gl.int64) * CONSUMER_WARPS"
    ),
    "sums of one warpgroup of the column": Change(
        BACKWARD_CONSUMER, "CONSUMER_WARPS + 4 * WARPGROUP", "CONSUMER_WARPS"
    ),
    "sums of the columns of one head": Change(
        BACKWARD_CONSUMER, "bias_strides[2:], i_batch, i_head)", "bias_strides[2:], i_batch, i_head * 0)"
    ),
    "sums of the columns of one batch": Change(
        BACKWARD_CONSUMER, "bias_strides[2:], i_batch, i_head)", "bias_strides[2:], i_batch * 0, i_head)"
    ),
    "sums of columns past the last key left unwritten": Change(
        BACKWARD, "is_partial=kv_lengths is not None", "is_partial=False"
    ),
    "sums of columns read as those of rows": Change(BACKWARD, "direction = 1 if", "direction = 0 if"),
    "bias of the first half of the tile column": Change(
        WIDE_DKDV, "gl.load(p_bias + step // (TILE // BLOCK_Q))", "gl.load(p_bias + step)"
    ),
}  # fmt: skip
BIASED_CALLS = [
    zoo.Call(head_dim=64, bias="batch", softcap=2.0, has_kv_lengths=True, dtype=torch.float16, kv_heads=2),
    zoo.Call(
        head_dim=64, bias="blocks", has_slopes=True, are_slopes_fixed=True, causal=True, dtype=torch.float16, kv_heads=1
    ),
    zoo.Call(head_dim=192, bias="batch", has_kv_lengths=True, dtype=torch.float16),
    zoo.Call(head_dim=128, bias="batch", has_kv_lengths=True, dtype=torch.float16, kv_heads=2),
]  # fmt: skip
BIASED = [
    Run(0, zoo.BIAS_LAYOUTS[-4], BIASED_CALLS[0]),
    Run(1, zoo.BIAS_LAYOUTS[-2], BIASED_CALLS[1], config=ForwardConfig(block_kv=64)),
    Run(2, zoo.BIAS_LAYOUTS[-3], BIASED_CALLS[2], config=ForwardConfig(block_kv=64, out_in_q=True)),
    Run(3, zoo.BIAS_LAYOUTS[-4], BIASED_CALLS[3]),
]
ALL_MODS = zoo.Call(
    head_dim=64, softcap=2.0, has_slopes=True, are_slopes_fixed=True, has_sinks=True, causal=True, kv_heads=1,
    dtype=torch.float16,
)  # fmt: skip
# work tiles by query head: four heads add to the sums of one KV head
BY_HEAD_FAULTS = {
    "keys of the query head": Change(COLS, "i_kv_head // sizes.heads_per_kv", "i_kv_head % 2"),
    "sums of each query head": Change(
        BACKWARD_CONSUMER, "work_tile.batch_head // sizes.heads_per_kv", "work_tile.batch_head % 1"
    ),
    "dv added to the second half alone": Change(
        BACKWARD_CONSUMER, "add_rows(ptrs.dv_sum_ptr, i_row, ", "add_rows(ptrs.dv_sum_ptr, 64, "
    ),
}
BY_HEAD = [
    Run(seed, (300, 400), zoo.Call(head_dim=64, causal=True, dtype=torch.float16, kv_heads=2), n_sms=1)
    for seed in range(3)
]
# the backward beyond head_dim 128, with kv_lengths and splits
WIDE_FAULTS = {
    "p overwritten before the other warpgroup has read it": Change(
        WIDE_DKDV, "    producer_acquire(pipelines.p, i_buffer, i_step_total // P_STAGES)\n", ""
    ),
    "p read before it is written": Change(
        WIDE_DKDV, "    consumer_wait(pipelines.p, i_buffer, i_step_total // P_STAGES)\n", ""
    ),
    "p released twice": Change(
        WIDE_DKDV,
        "    consumer_release(pipelines.p, i_buffer)\n",
        "    consumer_release(pipelines.p, i_buffer)\n    consumer_release(pipelines.p, i_buffer)\n",
    ),
    "queries released during their product": Change(
        WIDE_DKDV,
        "    b_dk, b_dk_tail = wait_for_products(0, dk_token, tail_token)\n    consumer_release(pipelines.q, stage)\n",
        "    consumer_release(pipelines.q, stage)\n    b_dk, b_dk_tail = wait_for_products(0, dk_token, tail_token)\n",
    ),
    "dO released during its product": Change(
        WIDE_DKDV,
        "    b_dv, b_dv_tail = wait_for_products(0, dv_token, tail_token)\n"
        "    consumer_release(pipelines.dout, stage)\n",
        "    consumer_release(pipelines.dout, stage)\n"
        "    b_dv, b_dv_tail = wait_for_products(0, dv_token, tail_token)\n",
    ),
    "dk and dv stored while the other warpgroup multiplies": Change(
        WIDE_DKDV, '    named_barrier("sync", CONSUMERS_BARRIER)\n    if ptrs', "    if ptrs"
    ),
    "dk and dv stored without a fence": Change(WIDE_DKDV, "    fence_async_shared()\n    store_rows", "    store_rows"),
    "keys released before dk is stored": Change(WIDE_DKDV, "    tma.store_wait(0)\n", ""),
    "bitmask of the first half of the keys": Change(WIDE_DKDV, "o_part = kv_start % TILE", "o_part = 0"),
    "split of the first half of the keys": Change(
        WIDE_DKDV, "SPLIT_OFFSET + kv_start % TILE", "SPLIT_OFFSET + kv_start % 1"
    ),
    "second half of the keys left out": Change(COLS, "    n_work = n_work * (TILE // KEYS)\n", ""),
    "both halves of the keys at the same place": Change(COLS, "kv_start=kv_start + i_half * KEYS", "kv_start=kv_start"),
    "values released during their product": Change(
        WIDE_DQ,
        "    b_dp = warpgroup_mma_wait(0, deps=(dp_token,))\n    consumer_release(v, v_stage)\n",
        "    consumer_release(v, v_stage)\n    b_dp = warpgroup_mma_wait(0, deps=(dp_token,))\n",
    ),
    "keys released during their product": Change(
        WIDE_DQ,
        "    b_dq, b_dq_tail = wait_for_products(0, dq_token, tail_token)\n    consumer_release(k, stage)\n",
        "    consumer_release(k, stage)\n    b_dq, b_dq_tail = wait_for_products(0, dq_token, tail_token)\n",
    ),
    "dO not waited for": Change(WIDE_DQ, "        consumer_wait(dout, i_buffer, phase)\n", ""),
    "queries released before dq is stored": Change(WIDE_DQ, "    tma.store_wait(0)\n", ""),
    "lse of the first warpgroup": Change(
        WIDE_DQ, "first = work_tile.q_start + WARPGROUP * WARPGROUP_ROWS", "first = work_tile.q_start"
    ),
    "tail of dO not multiplied": Change(
        WIDE_DKDV, "dp_token = warpgroup_mma(tile_at(kv.v_tail, 0)", "ignored = warpgroup_mma(tile_at(kv.v_tail, 0)"
    ),
    "tail of k not multiplied": Change(
        WIDE_DQ, "scores_token = warpgroup_mma(q_tail", "ignored = warpgroup_mma(q_tail"
    ),
    "tail of dq of a split at its first columns": Change(
        WIDE_DQ, "store_split(p_split + DIM, b_dq_tail", "store_split(p_split, b_dq_tail"
    ),
    "tail of the last keys not zeroed": Change(
        WIDE_DKDV,
        "            zero_keys_from(tile_at(kv.k_tail, 0), kv_start, kv_limit, WARPGROUP)\n",
        "            pass\n",
    ),
    "values of the last step not zeroed": Change(
        WIDE_DQ, "        zero_keys_from(v_tile, kv_start, kv_limit, WARPGROUP)\n", ""
    ),
}
WIDE_LENGTHS = zoo.Call(head_dim=192, v_dim=136, causal=True, has_kv_lengths=True, dtype=torch.float16, kv_heads=2)
# the derivative of the softcap is NaN for keys that are not zeroed
WIDE_SOFTCAP = dataclasses.replace(WIDE_LENGTHS, softcap=2.0)
WIDE_PLAIN = zoo.Call(head_dim=200, v_dim=40, dtype=torch.float16, kv_heads=1)
WIDE = [
    *(
        Run(seed, (300, 400), WIDE_LENGTHS, config=ForwardConfig(out_in_q=True), n_sms=1 + seed % 2)
        for seed in range(3)
    ),
    *(Run(seed, WINDOW, WIDE_PLAIN, n_sms=1 + seed % 2) for seed in range(3)),
    Run(0, WINDOW, WIDE_SOFTCAP, config=ForwardConfig(out_in_q=True), splits=(2, 1)),
]
BOTH_SIDES = zoo.Call(head_dim=64, has_slopes=True, are_slopes_fixed=True, dtype=torch.float16)
SCORE_MODS = [
    Run(0, (300, 400), ALL_MODS),
    Run(1, MIXED, ALL_MODS, splits=(2, 1)),
    Run(2, (300, 400), BOTH_SIDES),
    Run(3, SCATTERED, ALL_MODS, tile=GATHERED_TILE),
    Run(4, MIXED_FINE, ALL_MODS, tile=FINE_TILE),
]
# rows whose last third is a tail: 96 columns, and 192 in the forward
TMA = "hopper.tma"
TAIL_FAULTS = {
    "tail of q not multiplied": Change(
        BACKWARD_CONSUMER, "scores_token = warpgroup_mma(k_tail, q_tail", "ignored = warpgroup_mma(k_tail, q_tail"
    ),
    "full barrier of Q expects the bytes of a third": Change(
        COLS, "bytes_of_rows(descs.q.block_type.nbytes, q_tail is not None)", "descs.q.block_type.nbytes"
    ),
    "tail loaded from the first columns": Change(TMA, "start, COLS], full, tail)", "start, 0], full, tail)"),
    "tail stored to the first columns": Change(TMA, "start, COLS], tail)", "start, 0], tail)"),
    "scores read while the tail is multiplied": Change(
        BACKWARD_CONSUMER, "DV_PRODUCTS: gl.constexpr = 1 if kv.v_tail is None else 2", "DV_PRODUCTS: gl.constexpr = 3"
    ),
    "dq added while dk is waited for": Change(
        BACKWARD_CONSUMER, "b_dq = warpgroup_mma_wait(DK_PRODUCTS", "b_dq = warpgroup_mma_wait(1 + DK_PRODUCTS"
    ),
    "K and V loaded while dk and dv are stored from them": Change(
        BACKWARD_CONSUMER,
        """            # wait until TMA has read dk and dv from the buffers of K and V
            tma.store_wait(0)
""",
        "",
    ),
    "dk written over keys that are still read": Change(
        BACKWARD_CONSUMER,
        "    # wait until the other warpgroup has read ds, or K and V, and TMA its dq\n"
        '    named_barrier("sync", CONSUMERS_BARRIER)\n',
        "",
    ),
    "tail of dv in place of that of dk": Change(
        BACKWARD_CONSUMER, "store_split(p_dv + DIM_V, sums.dv_tail", "store_split(p_dk + DIM_V, sums.dv_tail"
    ),
    "tail of keys past the last not zeroed": Change(
        BACKWARD_CONSUMER, "            zero_rows(kv.k_tail, kv_stage, kv_start, kv_limit, WARPGROUP)\n", ""
    ),
    "tail of a sum over heads at its first columns": Change(
        BACKWARD_CONSUMER, "atomic_add_sum(p_rows + WARPGROUP_ROWS * COLS, ", "atomic_add_sum(p_rows, "
    ),
    "tail of k not multiplied in the forward": Change(
        FORWARD_CONSUMER, "scores_token = warpgroup_mma(q_tail, k_tail", "ignored = warpgroup_mma(q_tail, k_tail"
    ),
    "scores read while the tail of v is multiplied": Change(
        FORWARD_CONSUMER, "PV_PRODUCTS: gl.constexpr = 1 if v_tails is None else 2", "PV_PRODUCTS: gl.constexpr = 3"
    ),
    "tail of out not rescaled": Change(
        FORWARD_CONSUMER, "b_out_tail = scale_rows(b_out_tail, b_decay, CAN_SKIP)", "b_out_tail = b_out_tail"
    ),
    "tail of values past the last not zeroed": Change(
        FORWARD_CONSUMER,
        "        if v_tails is not None:\n            zero_keys_from(",
        "        if False:\n            zero_keys_from(",
    ),
    "out of 64 columns staged in buffers for q of 96": Change(
        FORWARD, "        out_width = min(width, out_width)\n", "        pass\n"
    ),
    "tail of out of a split at its first columns": Change(
        FORWARD_CONSUMER, "store_split(p_split + DIM_V, b_out_tail", "store_split(p_split, b_out_tail"
    ),
    "tail of out stored over the tail of the other warpgroup": Change(
        FORWARD_CONSUMER, "else pipelines.q_tails.index(i_buffer)", "else pipelines.q_tails.index(0)"
    ),
}
TAIL_LENGTHS = zoo.Call(head_dim=96, has_kv_lengths=True, dtype=torch.float16)
TAIL_STAGES = ForwardConfig(q_stages=2, out_in_q=True)
TAILS = [
    Run(0, (130, 300), TAIL_LENGTHS, config=TAIL_STAGES, dq_from_registers=True),
    Run(
        1, (300, 400), zoo.Call(head_dim=80, causal=True, dtype=torch.float16, kv_heads=2), config=TAIL_STAGES,
        dq_from_registers=True,
    ),
    Run(
        2, (130, 300), zoo.Call(head_dim=96, dtype=torch.float16), splits=(2, 9), config=TAIL_STAGES,
        dq_from_registers=True,
    ),
    Run(
        3, (130, 300), zoo.Call(head_dim=136, v_dim=128, dtype=torch.float16), config=ForwardConfig(out_in_q=True),
        has_backward=False,
    ),
    Run(
        4, (130, 300), zoo.Call(head_dim=72, v_dim=144, has_kv_lengths=True, dtype=torch.float16), splits=(2, 1),
        config=ForwardConfig(out_in_q=True), has_backward=False,
    ),
    Run(
        5, (130, 300), zoo.Call(head_dim=160, dtype=torch.float16), config=ForwardConfig(out_in_q=True),
        has_backward=False,
    ),
    Run(6, (130, 300), zoo.Call(head_dim=72, v_dim=40, dtype=torch.float16), config=TAIL_STAGES, has_backward=False),
]  # fmt: skip
WORK_TILES = "hopper.work_tiles"
INTERLEAVED_FAULTS = {
    "long lines counted among the others": Change(
        WORK_TILES, "n_lines - n_long, n_batch_heads", "n_lines, n_batch_heads"
    ),
    "first long lines taken twice": Change(WORK_TILES, "n_long + i_line)", "i_line)"),
    "other lines start after one long line": Change(WORK_TILES, "n_first = n_long * n_batch_heads", "n_first = n_long"),
    "as many heads in the last group as in the others": Change(
        WORK_TILES, "n_batch_heads - first, n_interleaved", "n_interleaved, n_interleaved"
    ),
}
# of a program's next work tile, with and without a counter
NEXT_ITEM_FAULTS = {
    "static waves overlap": Change(WORK_TILES, "n_programs - 1 - i_program", "n_programs - i_program"),
    "a static wave left out": Change(WORK_TILES, "i_wave = i_tile + 1", "i_wave = i_tile + 2"),
    "two work tiles taken during a tile row of one step": Change(
        ROWS, "if work_tile.n_steps == 0:", "if work_tile.n_steps <= 1:"
    ),
    "a work tile left out after each tile column": Change(
        COLS, "next_work_index(ptrs.tile_counter_ptr, i_tile)", "next_work_index(ptrs.tile_counter_ptr, i_tile) + 1"
    ),
}
NEXT_ITEM = [
    Run(0, (300, 400), CAUSAL, n_sms=7, has_backward=False),
    Run(1, zoo.PER_HEAD, zoo.Call(head_dim=64, dtype=BFLOAT16, kv_heads=1)),
]
INTERLEAVED = [Run(0, LONG_LINES, CAUSAL, n_interleaved=2), Run(1, (300, 270), CAUSAL, n_interleaved=3)]
# (faults, runs): each fault must be detected in one of the runs
FAULTS: dict[str, tuple[dict[str, Change], list[Run]]] = {
    "forward": (FORWARD_FAULTS, DENSE),
    "backward": (BACKWARD_FAULTS, DENSE),
    "splits": (SPLIT_FAULTS, SPLIT),
    "dq from registers": (
        DQ_FROM_REGISTERS_FAULTS,
        [
            Run(seed, *COLUMNS[i], n_sms=1 + seed % 3, dq_from_registers=True)
            for seed, i in itertools.product(range(4), range(2))
        ],
    ),
    "3 warpgroups": (THREE_WARPGROUP_FAULTS, THREE_WARPGROUPS),
    "2 stages of Q": (Q_STAGE_FAULTS, Q_STAGES),
    "tiles of 64": (FINE_FAULTS, FINE),
    "gathered tiles": (GATHERED_FAULTS, GATHERED),
    "score mods": (SCORE_MOD_FAULTS, SCORE_MODS),
    "bias": (BIAS_FAULTS, BIASED),
    "by query head": (BY_HEAD_FAULTS, BY_HEAD),
    "wide heads": (WIDE_FAULTS, WIDE),
    "tails": (TAIL_FAULTS, TAILS),
    "interleaved heads": (INTERLEAVED_FAULTS, INTERLEAVED),
    "next work tile": (NEXT_ITEM_FAULTS, NEXT_ITEM),
}
# runs that must be accurate without a fault
CORRECT_RUNS = {
    "dense": DENSE,
    "splits": SPLIT[:2],
    "dq by TMA": [Run(seed, *COLUMNS[seed % 2], n_sms=1 + seed % 3) for seed in range(6)],
    "dq from registers": [
        *(Run(seed, (300, 400), CAUSAL_LENGTHS, dq_from_registers=True) for seed in range(6)),
        *(Run(seed, *COLUMNS[seed % 2], n_sms=1 + seed % 3, dq_from_registers=True) for seed in range(6)),
    ],
    "3 warpgroups": THREE_WARPGROUPS[:4],
    "2 stages of Q": Q_STAGES[:4],
    "tiles of 64": FINE,
    "gathered tiles": GATHERED,
    "score mods": SCORE_MODS,
    "bias": BIASED,
    "by query head": BY_HEAD,
    "next work tile": NEXT_ITEM,
    "wide heads": WIDE,
    "tails": TAILS,
    "interleaved heads": INTERLEAVED,
}


@pytest.fixture
def check_run(check, monkeypatch):
    """Raises if a Run, with changes in the kernels' sources, is not as accurate as the reference."""

    def check_run(run: Run, *changes: Change) -> None:
        simulation = Simulation(seed=run.seed, changes=changes, n_sms=run.n_sms)
        forward, backward = simulation.hopper_forward, simulation.hopper_backward
        monkeypatch.setattr(forward, "config", lambda *_: run.config)
        monkeypatch.setattr(forward, "three_warpgroups_pay", lambda *_, causal: run.config.warpgroups == 3)
        monkeypatch.setattr(backward, "config", lambda *_: BackwardConfig(dq_from_registers=run.dq_from_registers))
        if run.n_interleaved is not None:
            for module in (forward, backward):
                monkeypatch.setattr(module, "interleaved_heads", lambda *_, is_uneven: run.n_interleaved)
        if run.splits is not None:
            split(simulation, *run.splits)
        check(simulation, run.layout, run.call, backward=run.has_backward, tile=run.tile)

    return check_run


# test_protocol.py has such runs
@pytest.mark.thorough
@pytest.mark.parametrize(
    "run", [pytest.param(run, id=f"{name}-{i}") for name, runs in CORRECT_RUNS.items() for i, run in enumerate(runs)]
)
def test_runs_without_a_fault_are_accurate(check_run, run):
    check_run(run)


@pytest.mark.sweep(by=lambda group, fault: {group})
@pytest.mark.parametrize(
    ("group", "fault"), [(group, fault) for group, (faults, _) in FAULTS.items() for fault in faults]
)
def test_seeded_faults_are_detected(check_run, group, fault):
    faults, runs = FAULTS[group]
    change = faults[fault]
    # faults of the forward are detected without the backward, which takes longer
    concerns_backward = change.module in (
        BACKWARD, BACKWARD_CONSUMER, COLS, TILE, FINE_BACKWARD, FINE_TILES, MODS, TMA, WIDE_DKDV, WIDE_DQ,
        WORK_TILES,
    )  # fmt: skip
    with pytest.raises((ProtocolError, AssertionError)):
        for run in runs:
            check_run(run._replace(has_backward=run.has_backward and concerns_backward), change)
