"""The kernel launches of a call without a GPU: launchers run on CPU tensors, and each launch is caught."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from blocksparse_flash.kernels import arguments
from blocksparse_flash.kernels.hopper import backward as hopper_backward
from blocksparse_flash.kernels.hopper import (
    backward_dq,
    fine_backward,
    fine_forward,
    selected_backward,
    selected_forward,
    wide_backward,
)
from blocksparse_flash.kernels.hopper import forward as hopper_forward
from blocksparse_flash.kernels.inputs import BackwardInputs, Pages
from blocksparse_flash.kernels.schedule import LONG_COLUMN, Split
from blocksparse_flash.kernels.triton import (
    backward,
    block_choice,
    block_selection,
    forward,
    gated_sum,
    gather_scatter,
    gather_tokens,
    group_weights,
    index_scores,
    packed_plan,
    page_scores,
    paged,
    plan_builder,
    rotary,
    selected_plan,
    split_kv,
)
from blocksparse_flash.plan_format import FINE_TILE, TILE, TILES_PER_STEP, Plan, SelectedSizes
from blocksparse_flash.score_mods import Scores
from tests.support.compiled_calls import FINE, SHARED_MEMORY


def launches(
    arch: int, *, num_splits: int = 1, small: bool = False, **call: Any
) -> list[tuple[JITFunction, dict[str, Any]]]:
    """(kernel, keyword arguments) of every launch of one forward and backward, or of one decoding step.

    num_splits  splits of the two tile rows and columns of each head that `hopper` splits; 1: none is split
    small       whether the call leaves SMs idle: blocks of queries are halved, and one launch computes dk, dv and dq
    """
    caught: list[tuple[JITFunction, dict[str, Any]]] = []

    def catch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        caught.append((kernel, {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}))

    # cached launches may be for another device or number of SMs
    for launches_of in (
        forward.forward_launch,
        backward.backward_launches,
        split_kv.split_kv_launches,
        paged.paged_launches,
        paged.look_up_launch,
        page_scores.page_scores_launch,
        hopper_forward.forward_launches,
        hopper_backward.backward_launches,
        wide_backward.backward_launches,
        fine_forward.forward_launches,
        fine_backward.backward_launches,
        selected_forward.forward_launches,
        selected_backward.backward_launches,
        selected_plan.plan_launches,
    ):
        launches_of.cache_clear()
    limits = (arch // 10, SHARED_MEMORY[arch])
    with (
        mock.patch.object(JITFunction, "run", catch),
        mock.patch.object(arguments, "device_limits", lambda _: limits),
        mock.patch.object(forward, "num_sms", lambda _: 1 << 30 if small else 0),
        mock.patch.object(backward, "num_sms", lambda _: 1 << 30 if small else 0),
        mock.patch.object(hopper_forward, "num_sms", lambda _: 132),
        mock.patch.object(hopper_backward, "num_sms", lambda _: 132),
        mock.patch.object(hopper_forward, "split_of", lambda *_: Split(2, num_splits)),
        mock.patch.object(hopper_backward, "split_of", lambda *_: Split(2, num_splits)),
        mock.patch.object(backward_dq, "num_sms", lambda _: 132),
        mock.patch.object(wide_backward, "num_sms", lambda _: 132),
        mock.patch.object(wide_backward, "split_of", lambda *_: Split(2, num_splits)),
        mock.patch.object(fine_forward, "num_sms", lambda _: 132),
        mock.patch.object(fine_backward, "num_sms", lambda _: 132),
        mock.patch.object(fine_forward, "split_of", lambda *_: Split(2, num_splits, FINE_TILE)),
        mock.patch.object(fine_backward, "split_of", lambda *_: Split(2, num_splits, FINE_TILE)),
        mock.patch.object(selected_forward, "num_sms", lambda _: 132),
        mock.patch.object(selected_backward, "num_sms", lambda _: 132),
        mock.patch.object(split_kv, "num_sms", lambda _: 132),
        mock.patch.object(paged, "num_sms", lambda _: 132),
    ):
        run_both(**call)
    return caught


def run_both(
    head_dim: int,
    dtype: torch.dtype,
    *,
    v_dim: int | None = None,
    mode: str = "layout",
    length: int = 8192,
    q_len: int | None = None,
    group: int = 1,
    limited: bool = False,
    dropout_p: float = 0.0,
    has_gpu_seed: bool = False,
    dlse: bool = False,
    backend: str = "triton",
    deterministic: bool = False,
    scores: str = "",
    scale: float = 0.125,
    rows: int = 16,
    tokens: int = 1,
    rounds: int = 1,
    by_token: bool = False,
) -> None:
    """Call the launchers of a backend, forward and backward.

    mode     "layout"; "columns": a layout with long tile columns; "fine": a layout in tiles of 64 x 64; "gathered": of
             64 x 16; "neighbors": the same, loaded four at a time; "dense"; "causal"; "rows": the kernels that gather
             and scatter rows; "select": the kernels that select blocks; "paged16" or "paged64": keys in pages of this
             size; "selected16" or "selected64": the same with selected pages; "window64": with a window; "window16":
             with one so small that keys are not split; "keys64" or "keys128": key blocks of this size that query
             blocks select, listed by key block
    length   of the keys, and of the queries if q_len is None; with q_len only the forward runs
    group    query heads per KV head
    limited  whether there are kv_lengths
    has_gpu_seed  whether kernels load the dropout seed; otherwise they get its value
    scores   score mods, in the words of `scores_of`
    rows, tokens, rounds  of selected key blocks: rows and tokens of a query block, and launches
    by_token  q, k, v and dout are (batch, length, heads, head_dim) in memory
    """
    if mode == "rows":
        run_rows(head_dim, dtype, length)
        return
    if mode == "select":
        run_selection(head_dim, dtype, length)
        return
    heads = 2 * group
    dims = (head_dim, head_dim if v_dim is None else v_dim)
    if mode.startswith(("paged", "selected", "window")):
        assert q_len is not None
        q = torch.empty(2, heads, q_len, head_dim, dtype=dtype)
        run_paged(q, dims, mode, scale, scores_of(scores, 1, (heads, q.shape[2], length)) if scores else None)
        return
    q, dout = (torch.empty(2, heads, length if q_len is None else q_len, dim, dtype=dtype) for dim in dims)
    k, v = (torch.empty(2, 2, length, dim, dtype=dtype) for dim in dims)
    if by_token:
        q, k, v, dout = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v, dout))
    records = torch.zeros(1, 1, 8 if q_len is None else 1, 8, dtype=torch.int32)
    # so many tiles per row that dq has no separate launch; or so many per column that there are sums over query heads
    n_cols = -(-length // TILE)
    indices = torch.zeros(LONG_COLUMN * n_cols if mode == "columns" else 33, dtype=torch.int32)
    side = FINE_TILE if mode == "fine" else TILE
    bitmasks = torch.zeros(3, side, side // 32, dtype=torch.int32)
    if mode in ("gathered", "neighbors"):
        indices = indices.new_zeros(33, TILES_PER_STEP if mode == "gathered" else 1)
        bitmasks = bitmasks.new_zeros(3, FINE_TILE)
    plan = Plan(records, indices, indices, records, indices, indices, bitmasks)
    lengths = torch.zeros(2, dtype=torch.int64) if limited else None
    seed = torch.zeros(1, dtype=torch.int64)
    if mode.startswith("keys"):
        run_key_blocks((q, k, v, dout), int(mode.removeprefix("keys")), (rows, tokens), rounds, scale, dlse=dlse)
        return
    options = (
        list(plan) if mode in ("layout", "columns", *FINE) else [],
        lengths,
        seed,
        scale,
        mode == "causal",
        dropout_p,
    )
    needs_grad: tuple[Any, ...] = ()
    if scores:
        options = (*options, scores_of(scores, len(indices), (heads, q.shape[2], length)))
        # slopes have a gradient only if they are learned
        has_bias_gradient = "bias" in scores and "fixed" not in scores
        needs_grad = (["sinks" in scores, "learned" in scores, has_bias_gradient, "pairs" in scores],)
    if backend == "hopper":
        options = (*options[:2], None, *options[3:])
        if mode in FINE:
            out, lse = fine_forward.forward(q, k, v, *options)
            fine_backward.backward(BackwardInputs(dout, None, q, k, v, out, lse), *options, *needs_grad)
            return
        out, lse = hopper_forward.forward(q, k, v, *options)
        dlse = torch.empty_like(lse) if dlse else None
        inputs = BackwardInputs(dout, dlse, q, k, v, out, lse)
        hopper_backward.backward(inputs, *options, *needs_grad, deterministic=deterministic)
        return
    with contextlib.ExitStack() as stack:
        if has_gpu_seed:
            for module in (forward, backward):
                stack.enter_context(mock.patch.object(module, "seed_arguments", lambda given, *_: (given, 0)))
        out, lse = forward.forward(q, k, v, *options)
        if q_len is not None:
            return
        inputs = BackwardInputs(dout, torch.empty_like(lse) if dlse else None, q, k, v, out, lse)
        backward.backward(inputs, *options, *needs_grad)


def scores_of(words: str, n_tiles: int, shape: tuple[int, int, int]) -> Scores:
    """Score mods by their words.

    sinks, softcap, slopes, learned (slopes), bias16 (block_bias with blocks of 16 tokens), fixed (bias), pairs (a
    float32 pair_bias that batches share), halfpairs (a bfloat16 one of each batch and head), causal (keys after a query
    are masked)
    """
    (heads, *_), pairs = shape, None
    bias, index = None, list[torch.Tensor]()
    if "bias" in words:
        blocks = TILE // int(words.split("bias")[1].split()[0])
        table = torch.zeros(n_tiles, blocks, blocks, dtype=torch.int32)
        bias, index = torch.zeros(1, heads, n_tiles), [table] * 2 + [torch.zeros(n_tiles, 1, dtype=torch.int64)] * 2
    sinks, slopes = (torch.zeros(heads) if word in words else None for word in ("sinks", "slopes"))
    if "pairs" in words:
        is_half = "halfpairs" in words
        pairs = torch.empty(1 + is_half, *shape, dtype=torch.bfloat16 if is_half else torch.float32)
    return Scores(sinks, slopes, bias, index, 30.0 if "softcap" in words else 0.0, pairs, "causal" in words)


def run_rows(head_dim: int, dtype: torch.dtype, length: int) -> None:
    """Pack and unpack rows of up to four tensors, move, add and merge them, and gather tokens of each head.

    Also the pointwise kernels of layers.
    """
    x, lse = torch.empty(2, 4, length, head_dim, dtype=dtype), torch.empty(2, 4, length)
    bits = lse[..., None].view(dtype)
    order, table = torch.zeros(length, dtype=torch.int64), torch.zeros(2, length, dtype=torch.int32)
    one, two, four, result = (
        torch.empty(length, 2, 4, n * head_dim + m * bits.shape[3], dtype=dtype)
        for n, m in ((1, 0), (2, 0), (3, 1), (1, 1))
    )
    gather_scatter.pack([x], one, order)
    gather_scatter.unpack(one, [x], order)
    gather_scatter.pack([x, x], two, order)
    gather_scatter.move([x, lse[..., None]], [x, lse[..., None]], order, None)
    gather_scatter.pack([x, x, x, bits], four, order)
    gather_scatter.add([x, x], [x, x], two, [[x, x]], table, order, 0)
    gather_scatter.add([x], [x], one, [], table, None, 0)
    gather_scatter.merge(x, lse, (x, lse), result, table, order, 0)
    for batch_heads in ((1, 1), (2, 2)):
        for tokens in (x, lse[..., None]):
            gather_tokens.gather_tokens(tokens, torch.zeros(*batch_heads, length, dtype=torch.int32))
    table = torch.empty(length, head_dim // 2)
    for is_inverse in (False, True):
        rotary.rotated(x, table, table, is_inverse=is_inverse)
    tensors = [torch.empty_like(x, requires_grad=True) for _ in range(3)]
    out = gated_sum.GatedSum.apply(torch.empty(2, 4, length, 3), *tensors)
    torch.autograd.backward(out, x)


def run_selection(side: int, dtype: torch.dtype, length: int) -> None:
    """Select blocks of `side` tokens by scores and by indices, and build plans of 128 x 128 and of 64 x 64 tiles.

    Also the plans of packed documents.

    Causal if a block is smaller than 128 x 128.
    """
    n = length // side
    selected = block_selection.BlockGrid(2, n, n, length, length, (side, side))
    block_selection.of_scores(torch.empty(2, n, n, dtype=dtype), selected, 16, causal=side < 128)
    bits, *_ = block_selection.of_indices(torch.empty(2, n, 16, dtype=torch.int64), selected)
    block_selection.bits_of_block_list(torch.empty(2 * (n + 1 + n * n), dtype=torch.int32), selected)
    for tile in (TILE, FINE_TILE):
        grid = plan_builder.Grid(selected, causal=side < 128, tile=tile)
        plan_builder.build_from_bits(bits, grid, (1, 2), (33, 35, 37))
    for dim in (64, 128) if dtype.itemsize == 2 else ():
        queries, keys = torch.empty(1, 2, 4, 256, dim, dtype=dtype), torch.empty(1, 2, 128, dim, dtype=dtype)
        group_weights.group_weights(queries, keys, torch.empty(1, 2, 4, 256), 256, 0.125, 32, 16)
        for block_size in (16, 64, 128, 256):
            index_scores.index_scores(queries[:, 0], keys[:, :1], 256, 8, block_size)
    ranges, chosen = torch.empty(256, 1, dtype=torch.int64), torch.empty(1, 2, 256, 16, dtype=torch.int64)
    # weights of compressed keys, and scores of blocks
    for n_keys, strides in ((4096, (4, 2)), (n, (1, 1))):
        scores = torch.empty(1, 2, 256, n_keys, dtype=torch.float32 if strides[0] > 1 else dtype)
        block_choice.choose_blocks(scores, ranges, ranges, chosen, 0, always=(1, 2), strides=strides)
    boundaries = torch.empty(2, 9, dtype=torch.int32 if side == 64 else torch.int64)
    for tile, causal in ((TILE, True), (FINE_TILE, False)):
        packing = packed_plan.Packing(
            batch=2, q_len=length, kv_len=length, n_documents=8, left=256, right=0, has_window=causal,
            has_prefix=not causal, max_seqlen=(length, length), causal=causal, tile=tile, n_runs=5, capacity=(4, 4),
            reach=(2, 2), is_sorted=causal,
        )  # fmt: skip
        packed_plan.build(boundaries, boundaries, boundaries[:, 1:].contiguous(), packing)
    # by token: bitmasks of each tile, of 2^16 patterns, and of 16
    for group in (1, 4, 16) if side < 128 else ():
        by_token = block_selection.BlockGrid(4, length, n, length * group, length, (group, side))
        bits, *_ = block_selection.of_indices(torch.empty(4, length, 16, dtype=torch.int64), by_token)
        grid = plan_builder.Grid(by_token, causal=True, tile=FINE_TILE, rows_per_token=group)
        plan_builder.build_from_bits(bits, grid, (2, 2), (33, 35, 37))
        grid = grid._replace(documents=plan_builder.DocumentSizes(2, 8))
        documents = torch.empty(2, 3, length, dtype=torch.int32)
        plan_builder.build_from_bits(bits, grid, (2, 2), (33, 35, 37), documents)


def run_key_blocks(
    tensors: tuple[torch.Tensor, ...],
    keys: int,
    sides: tuple[int, int],
    rounds: int,
    scale: float,
    *,
    dlse: bool,
) -> None:
    """Attend to 16 selected key blocks for each query block, by a SelectedPlan.

    tensors  q, k, v and dout
    sides    rows and tokens of a query block; with as many query heads per KV head as rows, these are its rows
    """
    q, k, v, dout = tensors
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _), (rows, tokens) = q.shape, k.shape, sides
    subblocks = max(1, keys // TILE)
    n_query_blocks, n_tokens = q_len // rows, q_len * tokens // rows
    if heads == kv_heads * rows:
        # the rows of a query block are heads of one token
        heads, n_query_blocks, n_tokens = kv_heads, q_len, q_len
    documents = torch.empty(batch, 3, n_tokens, dtype=torch.int32) if rounds > 1 else None
    sizes = SelectedSizes(
        n_batch_heads=batch * heads, n_query_blocks=n_query_blocks, n_key_blocks=kv_len * subblocks // keys,
        query_rows=rows, rows_per_token=rows // tokens, keys=keys // subblocks,
        query_blocks_per_round=batch * heads * n_query_blocks // rounds, max_key_blocks=16 * subblocks,
        n_tokens=n_tokens, has_batches=documents is not None and batch > 1,
    )  # fmt: skip
    grid = selected_plan.PlanGrid(
        sizes, heads=heads, subblocks=subblocks, kv_len=kv_len, causal=documents is None,
        document_batches=0 if documents is None else batch,
    )  # fmt: skip
    indptr = torch.empty(batch, heads, n_query_blocks + 1, dtype=torch.int32)
    indices = torch.empty(sizes.capacity // subblocks, dtype=torch.int32)
    plan = [*selected_plan.build(indptr, indices, documents, grid, 32)]
    out, lse = selected_forward.forward(q, k, v, plan, None, None, scale, False, 0.0)
    inputs = BackwardInputs(dout, torch.empty_like(lse) if dlse else None, q, k, v, out, lse)
    selected_backward.backward(inputs, plan, None, None, scale, False, 0.0)


def run_paged(q: torch.Tensor, dims: tuple[int, int], mode: str, scale: float, scores: Scores | None) -> None:
    """Attend to keys in pages of two KV heads; pages of 64 keys lie head after head, smaller ones key after key."""
    words, page = mode.rstrip("0123456789"), int(mode.lstrip("abcdefghijklmnopqrstuvwxyz"))
    shapes = [(9, 2, page, dim) if page == 64 else (9, page, 2, dim) for dim in dims]
    k, v = (torch.empty(shape, dtype=q.dtype) for shape in shapes)
    if page != 64:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    selected = torch.empty(2, 2, 64, dtype=torch.int32) if words == "selected" else None
    table, lengths = torch.empty(2, 512, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    pages = Pages(table, lengths, selected, 64 * page - 960 if words == "window" else None)
    paged.forward(q, k, v, pages, scale, True, scores)
    if selected is not None:
        rows = torch.empty(2, 2, 1, dims[0], dtype=torch.float32)
        page_scores.page_scores(rows, torch.empty(9, 2, dims[0], dtype=q.dtype), table)
