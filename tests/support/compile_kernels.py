"""Compiles every kernel without a GPU: `python -m tests.support.compile_kernels 90` prints a JSON line per launch.

The argument is an architecture, or `hopper` for the Gluon kernels on sm90. `90-few` and `hopper-few` select the tuned
configurations, `90-rest` and `hopper-rest` all others. With `-` the program answers requests on standard input.

It runs the launchers on CPU tensors, intercepts each launch, and compiles it ahead of time for the architecture, with
the ptxas that ships with Triton. It needs a process of its own, because the test process runs kernels in the
interpreter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

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
from blocksparse_flash.plan_format import FINE_TILE, PIECES, TILE, Plan, SelectedSizes
from blocksparse_flash.score_mods import Scores
from tests.support.scoreboards import unwaited

# bytes of shared memory available to a program, by architecture
SHARED_MEMORY = {80: 166912, 86: 101376, 90: 232448, 100: 232448}
# the scales whose sign is compiled into the kernels
SIGNS: list[dict[str, Any]] = [{"scale": -0.125}, {"scale": 0.0}]
# every score mod, in the words of scores_of
EVERYTHING = "sinks softcap slopes learned bias16"


# keys in small pages
PAGED = {"mode": "paged16"}
# modes of the kernels for steps of 64 x 64
FINE = ("fine", "gathered", "neighbors")


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
        indices = indices.new_zeros(33, PIECES if mode == "gathered" else 1)
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
        bias, index = torch.zeros(1, heads, n_tiles), [table, table, torch.zeros(n_tiles, 1, dtype=torch.int64)]
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


def source_of(kernel: JITFunction, kwargs: dict[str, Any], arch: int) -> tuple[ASTSource, dict[str, Any]]:
    """The source and options that Triton would compile for a launch."""
    backend = make_backend(GPUTarget("cuda", arch, 32))
    kwargs = {"debug": False, **kwargs}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(**kwargs)
    options, signature, constexprs, attrs = kernel._pack_args(backend, kwargs, bound, specialization, options)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attrs)
    return source, options.__dict__


def early_arrivals(ptx: str) -> int:
    """Number of mbarrier arrivals that follow an access to shared memory without a thread barrier between them.

    One thread arrives for all warps of a partition. Without the barrier another warp could still read a buffer that the
    arrival releases, or write one that it commits.
    """
    n_early, is_ordered = 0, True
    barriers = r"\b(?:bar|barrier)\.(?:warp\.)?sync|mbarrier\.arrive\.shared"
    events = rf"\b(?:ld|st)\.shared|\b(?:ld|st)matrix|wgmma\.mma_async|{barriers}"
    for event in re.findall(events, ptx):
        if event.startswith("mbarrier"):
            n_early += not is_ordered
        else:
            is_ordered = event.startswith("bar")
    return n_early


def code_and_loops(sass: str) -> tuple[list[tuple[int, str]], list[tuple[int, int]]]:
    """(address, text) of the instructions and (first, last) address of the loops, from `cuobjdump -sass` output."""
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ +)?([^;/]+?) *;", sass)
    lines = [(int(address, 16), text) for address, text in code]
    branches = [(address, re.match(r"BRA (?:[^,]+, )?0x([0-9a-f]+)", text)) for address, text in lines]
    targets = [(int(branch[1], 16), address) for address, branch in branches if branch]
    return lines, [(target, address) for target, address in targets if target < address]


def spills_beside_products(sass: str) -> int:
    """Number of spill loads and stores in the innermost loops with matrix products."""
    lines, loops = code_and_loops(sass)
    with_products = {innermost(loops, address) for address, text in lines if "HGMMA" in text}
    spills = [address for address, text in lines if re.match("LDL|STL", text)]
    return sum(first <= address <= last for address in spills for first, last in filter(None, with_products))


def innermost(loops: list[tuple[int, int]], address: int) -> tuple[int, int] | None:
    """The innermost loop around an address, None outside loops."""
    around = [loop for loop in loops if loop[0] <= address <= loop[1]]
    return min(around, key=lambda loop: loop[1] - loop[0]) if around else None


def kept_operands(ptx: str) -> int:
    """Number of wgmma in PTX whose left operand is in registers that the innermost loop around them never writes."""
    statements, labels = list[str](), dict[str, int]()
    for statement in re.sub(r"//[^\n]*", "", ptx).split(";"):
        for label in re.findall(r"^\s*([$\w]+):", statement, re.MULTILINE):
            labels[label] = len(statements)
        # remove labels, directives and the opening brace of inline assembly
        text = re.sub(r"^\s*([$\w]+:|\.\w+[^\n]*$)", "", statement, flags=re.MULTILINE)
        statements.append(text.strip().lstrip("{").strip())
    loops = []
    for i, text in enumerate(statements):
        branch = re.search(r"\bbra(?:\.uni)?\s+([$\w]+)$", text)
        if branch and labels.get(branch[1], i + 1) <= i:
            loops.append((labels[branch[1]], i))
    result = re.compile(r"(?:@!?%p\d+\s+)?[\w.:]+\s+(\{[^}]*\}|%\w+(?:\|%\w+)?)\s*(?:,|$)")
    written = [set(re.findall(r"%\w+", found[1])) if (found := result.match(text)) else set() for text in statements]
    n_kept = 0
    for i, text in enumerate(statements):
        product = re.match(r"wgmma\.mma_async\S*\s+\{[^}]*\},\s*\{([^}]*)\}", text)
        loop = innermost(loops, i)
        if product and loop:
            n_kept += set(re.findall(r"%\w+", product[1])).isdisjoint(set().union(*written[loop[0] : loop[1] + 1]))
    return n_kept


def result_registers(text: str) -> range:
    """The registers that a SASS instruction writes."""
    found = re.match(r"(\S+) R(\d+)\b", text)
    if not found or re.match(r"ST|RED|ATOM|UTMA", found[1]):
        return range(0)
    name, width = found[1], 1
    product = re.match(r"HGMMA\.64x(\d+)x", name)
    if product:
        width = int(product[1]) // 2
    elif ".128" in name or (name.startswith("LDSM") and ".4" in name):
        width = 4
    elif ".64" in name or "WIDE" in name or (name.startswith("LDSM") and ".2" in name):
        width = 2
    return range(int(found[2]), int(found[2]) + width)


def lost_operands(ptx: str, sass: str) -> int:
    """Number of products in SASS whose left operand should stay in registers but is overwritten later in the loop.

    From the second iteration on, such a product multiplies values of the iteration before. The ptxas of Triton 3.6 and
    3.7 has this bug, those of 3.8 and 3.9 do not: values that are loaded (LDSM) or computed (LOP3) before the loop are
    kept in registers that the exponentials (F2FP) of each iteration overwrite. A loop that computes an operand for its
    next iteration looks the same in SASS, but in PTX it writes the registers. Hence the result is 0 unless a product in
    PTX has an operand that its loop never writes.
    """
    if not kept_operands(ptx):
        return 0
    lines, loops = code_and_loops(sass)
    written = [(address, result_registers(text)) for address, text in lines]
    n_lost = 0
    for address, text in lines:
        product = re.match(r"HGMMA\S* R\d+, R(\d+), gdesc", text)
        loop = innermost(loops, address)
        if not product or not loop:
            continue
        operand = range(int(product[1]), int(product[1]) + 4)
        writes = [
            at for at, registers in written if loop[0] <= at <= loop[1] and not set(operand).isdisjoint(registers)
        ]
        n_lost += bool(writes) and min(writes) >= address
    return n_lost


def unwritten_registers(sass: str) -> int:
    """Number of reads of uniform registers, which hold addresses, that no earlier instruction writes: a bug of ptxas.

    A copy is no read: ptxas may move a 64-bit address before it has computed the high half. But the copy of an
    unwritten register is unwritten too, also in a general register.
    Matrix descriptors (gdesc) do not count: a product with its left operand in registers reads the last two of four.
    """
    written, unwritten_copies = set[str](), set[str]()
    n_unwritten = 0
    for predicate, name, operands in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ +)?(\S+) *([^;]*);", sass):
        first, _, sources = operands.strip().partition(",")
        results = [f"R{i}" for i in result_registers(f"{name} {operands}")]
        if name.startswith(("U", "R2UR", "S2UR")) and not name.startswith("UTM") and first.startswith("UR"):
            # wide results are pairs of registers, or four
            results = _consecutive(first, 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1)
        reads = [] if "gdesc" in operands else _registers_read(name, sources if results else operands)
        missing = [
            each for each in reads if each in unwritten_copies or (each.startswith("UR") and each not in written)
        ]
        text = f"{name} {operands.strip()}"
        is_copy = re.fullmatch(r"(?:U?MOV|R2UR) U?R\d+, U?R\d+|IMAD\S* R\d+, RZ, RZ, U?R\d+", text)
        if missing and is_copy and not predicate:
            unwritten_copies.update(results)
            written.difference_update(results)
        else:
            n_unwritten += len(missing)
            unwritten_copies.difference_update(results)
            written.update(results)
    return n_unwritten


def _consecutive(first: str, count: int) -> list[str]:
    """Registers from the first one on."""
    kind = first.rstrip("0123456789")
    return [f"{kind}{int(first.removeprefix(kind)) + i}" for i in range(count)]


def _registers_read(name: str, sources: str) -> list[str]:
    """Registers that an instruction reads, with the high halves of 64-bit addresses and values."""
    if name.startswith("UTM"):
        # the buffer, which the mbarrier follows, and the address of the descriptor
        return [each for first in re.findall(r"\[(UR\d+)\]", sources) for each in _consecutive(first, 2)]
    found = []
    for memory, first, is_wide in re.findall(r"(\bdesc\[)?\b(U?R\d+)\b(\.64)?", sources):
        is_pair = memory or is_wide or (name.startswith("U") and ".64" in name)
        found += _consecutive(first, 2 if is_pair else 1)
    return found


def instructions_of(cubin: bytes) -> bytes:
    """The instructions of a cubin, which is an ELF file: the contents of its sections .text.<kernel>."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, i_names = struct.unpack_from("<HHH", cubin, 0x3A)
    # name, type, flags, address, offset, length
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + i * size) for i in range(count)]
    names = sections[i_names][4]
    return b"".join(
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in sections
        if cubin.startswith(b".text.", names + name)
    )


def disassembled(cubins: list[bytes]) -> list[str]:
    """SASS of kernels for sm90, from the nvdisasm that ships with Triton. Addresses count through all kernels.

    One run for all, since a run takes half a second to start.
    """
    codes = [instructions_of(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "--binary", "SM90a", file.name]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = re.findall(r"^ */\*[0-9a-f]{4,}\*/.*", output, re.MULTILINE)
    # an instruction has 16 bytes
    ends = [end // 16 for end in itertools.accumulate(map(len, codes))]
    assert len(lines) == (ends[-1] if ends else 0), output[:1000]
    return ["\n".join(lines[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel with the source and options to compile, and the calls that launch it."""

    kernel: JITFunction
    source: ASTSource
    options: dict[str, Any]
    calls: list[dict[str, Any]]
    # that should share an SM
    programs: int = 1


def programs_per_sm(kernel: JITFunction, kwargs: dict[str, Any]) -> int:
    """Programs of a launch that should share an SM."""
    if kernel is selected_forward.selected_forward_kernel:
        return selected_forward.PROGRAMS_PER_SM
    return kwargs["CONFIG"].programs_per_sm if kernel is selected_backward.selected_backward_kernel else 1


def compile_launches(launches: list[Launch], arch: int) -> list[dict[str, Any]]:
    """Compile launches; returns registers, spills, shared memory and products of each, and faults in PTX and SASS."""
    compiled = [compile_launch(launch, arch) for launch in launches]
    # disassembly takes time, and only kernels with wgmma need it
    with_wgmma = [i for i, (_, ptx, _) in enumerate(compiled) if "wgmma" in ptx]
    sass = dict(zip(with_wgmma, disassembled([compiled[i][2] for i in with_wgmma]), strict=True)) if with_wgmma else {}
    assert all("HGMMA" in text for text in sass.values())
    return [
        {
            **record,
            "lost_operands": lost_operands(ptx, sass.get(i, "")),
            "spills_beside_products": spills_beside_products(sass.get(i, "")),
            "unwritten_registers": unwritten_registers(sass.get(i, "")),
            "unwaited": unwaited(sass[i], instructions_of(cubin)) if i in sass else [],
        }
        for i, (record, ptx, cubin) in enumerate(compiled)
    ]


def compile_launch(launch: Launch, arch: int) -> tuple[dict[str, Any], str, bytes]:
    """Compile a launch; returns what is seen without its SASS, its PTX and its cubin."""
    with (
        triton.knobs.compilation.scope(),
        triton.knobs.nvidia.scope(),
        contextlib.redirect_stdout(io.StringIO()) as log,
    ):
        # the ptxas log exists only if Triton compiles, not if it finds the kernel in its cache; running ptxas here
        # would miss the options that Triton passes
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(launch.source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    ptx = compiled.asm["ptx"]

    def number(pattern: str) -> int:
        return int(re.findall(pattern, log.getvalue())[-1])

    record = {
        "kernel": launch.kernel.fn.__name__,
        "arch": arch,
        "triton": triton.__version__,
        "registers": number(r"Used (\d+) registers"),
        "spills": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "shared": compiled.metadata.shared,
        "shared_limit": SHARED_MEMORY[arch],
        "tensor_memory": getattr(compiled.metadata, "tmem_size", 0) or 0,
        "warps": compiled.metadata.num_warps,
        "programs": launch.programs,
        # matrix products in the source
        "products": len(
            re.findall(r"\btt\.dot\b|\bttng\.warp_group_dot\b", compiled.asm.get("ttir", compiled.asm["ttgir"]))
        ),
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "wgmma_waits": len(re.findall(r"wgmma\.wait_group", ptx)),
        "early_arrivals": early_arrivals(ptx),
        "async_copies": len(re.findall(r"cp\.async\.(?:ca|cg|bulk\.tensor)", ptx)),
        # warnings of ptxas that it has serialized wgmma
        "serialized": sorted(set(re.findall(r"C75\d\d", log.getvalue()))),
    }
    return record, ptx, compiled.asm["cubin"]


def table_calls(arch: int) -> list[dict[str, Any]]:
    """A call for every configuration in the launch tables of the Triton kernels, which depend on the architecture."""
    half = torch.bfloat16
    if SHARED_MEMORY[arch] < 160 * 1024:
        # the configurations for little shared memory; all others are those of sm80
        little = [{"head_dim": dim, "dtype": dtype} for dim in (64, 128, 256) for dtype in (half, torch.float32)]
        little += [{**call, "q_len": q_len, **mode} for call in little for q_len in (1, 64) for mode in ({}, PAGED)]
        little += [{"head_dim": 64, "dtype": half, **option} for option in SIGNS]
        return [*little, {"head_dim": 128, "dtype": half, "q_len": 16, "group": 4, "scores": EVERYTHING}]
    grid = [{"head_dim": head_dim, "dtype": half} for head_dim in (64, 128, 256)]
    grid += [{"head_dim": head_dim, "dtype": torch.float32} for head_dim in (64, 128, 256)]
    grid += [
        {"head_dim": head_dim, "dtype": half, **option}
        for head_dim in (64, 128)
        for option in ({"dropout_p": 0.1}, {"scores": "softcap"})
    ]
    # tiles of 64 x 64
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": "fine", **option}
        for head_dim in (64, 128)
        for option in ({}, {"dropout_p": 0.1}, {"scores": "softcap"}, {"q_len": 16, "group": 4})
    ]
    # split-KV: q_len * group is 4, 32, 64 and 256 rows per KV head
    grid += [
        {"head_dim": head_dim, "dtype": half, "q_len": q_len, "group": 4}
        for head_dim, q_len in itertools.product((64, 128), (1, 8, 16, 64))
    ]
    grid += [{"head_dim": 256, "dtype": half, "q_len": q_len, "group": 4} for q_len in (1, 64)]
    grid += [{"head_dim": 128, "dtype": torch.float32, "q_len": 1, "group": 4}]
    # the same configurations over pages
    grid += [{**call, **PAGED} for call in grid if "q_len" in call and "mode" not in call]
    if arch >= 90:
        # so short that the kernels use pointers instead of TMA descriptors
        grid += [{"head_dim": head_dim, "dtype": half, "length": 256} for head_dim in (64, 128)]
    if arch == 90:
        small = {"dtype": half, "small": True}
        grid += [
            {"head_dim": head_dim, "mode": mode, **small}
            for head_dim, mode in itertools.product((64, 128), ("layout", "causal"))
        ]
        grid += [{"head_dim": head_dim, "length": 256, **small} for head_dim in (64, 128)]
        # values narrower than keys beyond 128
        grid += [{"head_dim": 192, "v_dim": 128, "dtype": half, "mode": mode} for mode in ("layout", "causal")]
        # v with rows that neither TMA nor cp.async can copy
        grid += [
            {"head_dim": head_dim, "v_dim": v_dim, "length": 256, **option}
            for head_dim, v_dim in ((100, 3), (64, 3), (128, 17))
            for option in ({"dtype": half}, small)
        ]
        # the same with split-KV and grouped heads
        grid += [{"head_dim": 100, "v_dim": 3, "dtype": half, "q_len": q_len, "group": 4} for q_len in (16, 64)]
        # with grouped heads, as without TMA descriptors, dk and dv have a launch of their own
        grid += [{"head_dim": 128, "dtype": half, "group": 4, "mode": mode} for mode in ("layout", "causal")]
        grid += [{"head_dim": head_dim, "length": 256, "mode": "fine", **small} for head_dim in (64, 128)]
        # kernels with a running maximum are compiled separately for a negative scale, and for 0
        grid += [{**call, "scale": -0.125} for call in grid if call["dtype"] == half]
    grid += [{"head_dim": head_dim, "dtype": half, **option} for head_dim in (64, 128) for option in SIGNS]
    return [*grid, {"head_dim": 128, "dtype": half, "q_len": 1, "group": 4, "scale": 0.0}]


def calls(arch: int) -> list[dict[str, Any]]:
    """Calls of the Triton kernels to compile: every configuration of the launch tables, and every option once."""
    grid = table_calls(arch)
    if SHARED_MEMORY[arch] < 160 * 1024:
        return grid
    half = torch.bfloat16
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": mode}
        for head_dim, mode in itertools.product((64, 128), ("dense", "causal"))
    ]
    # 3 and 100: rows of 6 and 200 bytes, which TMA cannot load
    grid += [{"head_dim": head_dim, "dtype": half} for head_dim in (3, 16, 40, 96, 100)]
    grid += [{"head_dim": head_dim, "dtype": torch.float16} for head_dim in (64, 128)]
    grid += [{"head_dim": 64, "dtype": half, **option} for option in ({"group": 4}, {"limited": True}, {"dlse": True})]
    grid += [
        {"head_dim": head_dim, "dtype": dtype, "by_token": True, **option}
        for head_dim, dtype in itertools.product((64, 128, 256), (half, torch.float32))
        for option in ({}, {"group": 4, "dropout_p": 0.1})
    ]
    few = {"dtype": half, "q_len": 1, "group": 4}
    grid += [
        {"head_dim": 128, **few, **option} for option in ({"mode": "dense"}, {"mode": "causal"}, {"limited": True})
    ]
    grid += [{"head_dim": head_dim, **few} for head_dim in (3, 40)]
    grid += [{"head_dim": head_dim, "dtype": half, "mode": "rows"} for head_dim in (64, 128)]
    # selection of blocks of head_dim tokens; at 131,072 tokens a row has more blocks than a warp holds
    grid += [{"head_dim": 64, "dtype": half, "mode": "select"}]
    grid += [{"head_dim": 128, "dtype": torch.float32, "mode": "select", "length": 1 << 17}]
    grid += [{"head_dim": head_dim, "dtype": half, "scores": EVERYTHING} for head_dim in (64, 128)]
    grid += [{"head_dim": 64, "dtype": half, "scores": scores} for scores in ("sinks", "bias128")]
    grid += [{"head_dim": 64, "dtype": half, "mode": "causal", "scores": "slopes"}]
    # a pair bias of each type, with and without the loop over the batches and heads that share it
    grid += [{"head_dim": head_dim, "dtype": half, "scores": "pairs"} for head_dim in (64, 128)]
    grid += [{"head_dim": 128, "dtype": half, "mode": "causal", "scores": "halfpairs"}]
    everything = {"scores": f"{EVERYTHING} pairs", "dropout_p": 0.1, "limited": True}
    grid += [{"head_dim": 64, "dtype": half, **everything, "has_gpu_seed": has} for has in (False, True)]
    grid += [{"head_dim": 64, "dtype": half, "mode": "fine", "scores": "halfpairs", "group": 4}]
    grid += [
        {"head_dim": 256, "dtype": half, "scores": "pairs"},
        {"head_dim": 64, "dtype": torch.float32, "scores": "pairs"},
    ]
    # split-KV with score mods that differ between heads: 4 and 64 rows per KV head
    grid += [{**few, "head_dim": 128, "q_len": q_len, "scores": f"{EVERYTHING} pairs"} for q_len in (1, 16)]
    # pages as small and as large as a step, and every option over them
    grid += [
        {**few, "head_dim": 128, "q_len": q_len, "mode": mode, **option}
        for q_len, mode in itertools.product((1, 16), ("paged64", "selected16", "selected64", "window16", "window64"))
        for option in ({}, {"scores": "sinks softcap"})
    ]
    grid += [{**few, "head_dim": head_dim, "v_dim": v_dim, **PAGED} for head_dim, v_dim in ((100, 3), (80, 128))]
    return grid


def hopper_calls() -> list[dict[str, Any]]:
    """Calls of backend `hopper` to compile: every configuration, and every option once."""
    half = torch.bfloat16
    grid: list[dict[str, Any]] = [
        {"head_dim": head_dim, "dtype": half, "mode": mode}
        for head_dim, mode in itertools.product((64, 128, 256), ("layout", "dense", "causal"))
    ]
    # so long that tile rows of 192 queries are chosen
    grid += [{"head_dim": 64, "dtype": half, "mode": mode, "length": 24576} for mode in ("dense", "causal")]
    # so few tile rows that there is no tile counter
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": mode, "length": 1024}
        for head_dim, mode in itertools.product((64, 128), ("layout", "causal"))
    ]
    grid += [{"head_dim": head_dim, "dtype": half, "limited": True} for head_dim in (64, 128)]
    grid += [{"head_dim": head_dim, "dtype": half, "limited": True, "mode": "dense"} for head_dim in (64, 128)]
    grid += [{"head_dim": head_dim, "dtype": half, "deterministic": True} for head_dim in (64, 128)]
    # head_dim 100: rows of 200 bytes, which TMA cannot load, are copied
    grid += [{"head_dim": 128, "dtype": torch.float16, "group": 4}, {"head_dim": 100, "dtype": half, "dlse": True}]
    grid += [{"head_dim": head_dim, "dtype": half, "by_token": True} for head_dim in (64, 128)]
    # each kernel with splits
    grid += [{"head_dim": 64, "dtype": half, "mode": mode, "num_splits": 3} for mode in ("layout", "causal")]
    grid += [{"head_dim": 64, "dtype": half, "num_splits": 3, "limited": True}]
    options: list[dict[str, Any]] = [{}, {"group": 4}, {"limited": True}]
    grid += [{"head_dim": 128, "dtype": half, "num_splits": 3, **option} for option in options]
    grid += [{"head_dim": 256, "dtype": half, "num_splits": 3}]
    grid += [{"head_dim": head_dim, "dtype": half, **option} for head_dim in (64, 128, 256) for option in SIGNS]
    grid += [{"head_dim": 64, "dtype": half, "mode": mode, **SIGNS[0]} for mode in ("dense", "causal")]
    # steps of 64 x 64
    options += [{"num_splits": 3}]
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": mode, **option}
        for head_dim, mode in itertools.product((64, 128), FINE[:2])
        for option in options
    ]
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": "fine", **option} for head_dim in (64, 128) for option in SIGNS
    ]
    grid += [{"head_dim": 64, "dtype": half, "mode": "gathered", **SIGNS[0]}]
    grid += [{"head_dim": head_dim, "dtype": half, "mode": "neighbors"} for head_dim in (64, 128)]
    # score mods
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": mode, "scores": scores}
        for head_dim, (mode, scores) in itertools.product(
            (64, 128),
            (
                ("layout", "sinks"),
                ("fine", "sinks"),
                ("causal", "softcap"),
                ("gathered", "softcap"),
                ("layout", "slopes"),
                ("causal", "slopes causal"),
                ("layout", "slopes causal"),
                ("fine", "slopes causal"),
            ),
        )
    ]
    # a number for each tile, and the sums for its gradient
    grid += [
        {"head_dim": head_dim, "dtype": half, "scores": f"{mods}bias128"}
        for head_dim, mods in itertools.product(
            (64, 96, 128, 192, 256), ("", "softcap ", "slopes causal ", "sinks softcap slopes ")
        )
    ]
    grid += [
        {"head_dim": head_dim, "dtype": half, "scores": "bias128", **option}
        for head_dim in (64, 128)
        for option in ({"limited": True}, {"num_splits": 3}, {"group": 4}, *SIGNS)
    ]
    grid += [{"head_dim": head_dim, "dtype": half, "scores": "fixed bias128"} for head_dim in (64, 96, 128)]
    # dq of deterministic calls
    grid += [{"head_dim": 64, "dtype": half, "deterministic": True, **option} for option in SIGNS]
    # selected blocks by key block
    options = [{"rows": 8}, {"rows": 32}, {"rounds": 3}, {"tokens": 4, "dlse": True}, *SIGNS]
    options += [{"rows": 8, "group": 8}, {"rows": 16, "group": 16, "by_token": True}, {"rows": 32, "group": 32}]
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": mode, **option}
        for head_dim, mode in itertools.product((64, 128), ("keys64", "keys128"))
        for option in options
    ]
    grid += [
        {"head_dim": head_dim, "v_dim": v_dim, "dtype": torch.float16, "mode": "keys256"}
        for head_dim, v_dim in ((64, 128), (128, 64), (80, 24), (100, 3))
    ]
    # 96 columns in the backward, 192 in the forward
    options = [{"mode": "dense"}, {"mode": "causal"}, {"limited": True}, {"num_splits": 3}]
    options += [{"scores": "softcap"}, {"deterministic": True}, {"group": 4}, *SIGNS]
    grid += [
        {"head_dim": head_dim, "v_dim": v_dim, "dtype": half, **option}
        for head_dim, v_dim in ((96, 96), (192, 128), (192, 192), (96, 128), (64, 96))
        for option in (({}, *options) if head_dim == 192 or v_dim == head_dim else options[1:2])
    ]
    return [{**call, "backend": "hopper"} for call in grid]


def few_hopper_calls() -> list[dict[str, Any]]:
    """Calls of backend `hopper` in tuned configurations, each with kv_lengths, splits and deterministic once."""
    half = torch.bfloat16
    options: list[dict[str, Any]] = [{"mode": mode} for mode in ("layout", "fine", "gathered", "dense", "causal")]
    options += [{"limited": True}, {"num_splits": 3}, {"deterministic": True}]
    options += [{"mode": mode, "limited": True} for mode in FINE[:2]]
    grid = [{"head_dim": head_dim, "dtype": half, **option} for head_dim in (64, 128) for option in options]
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": mode, "scores": "sinks softcap slopes"}
        for head_dim, mode in itertools.product((64, 128), ("layout", "fine"))
    ]
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": mode, "rows": rows}
        for head_dim, mode, rows in itertools.product((64, 128), ("keys64", "keys128"), (8, 16, 32))
    ]
    # so long that dq has a launch of its own
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": "columns", "group": 4, **option}
        for head_dim, option in itertools.product((64, 128), ({}, {"length": 1 << 15}))
    ]
    grid += [{"head_dim": 64, "dtype": half, "mode": "dense", "length": 24576}]
    grid += [{"head_dim": 256, "dtype": half, "mode": "layout"}]
    grid += [{"head_dim": dim, "v_dim": v_dim, "dtype": half} for dim, v_dim in ((96, 96), (192, 128), (192, 192))]
    grid += [{"head_dim": 64, "dtype": half, **option} for option in SIGNS]
    grid += [{"head_dim": 128, "dtype": half, **SIGNS[0]}]
    return [{**call, "backend": "hopper"} for call in grid]


def each_option_once(chosen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls with a new configuration or pair of options, and all with a scale, because of a bug of ptxas in 3.6."""
    kept, covered = list[dict[str, Any]](), set[Any]()
    for call in chosen:
        options = sorted((name, value) for name, value in call.items() if name not in ("head_dim", "dtype", "backend"))
        covers = {(call["head_dim"], call["dtype"], call.get("mode"), call.get("limited"))}
        covers |= set(itertools.combinations_with_replacement(options, 2))
        if "scale" in call or not covers <= covered:
            kept.append(call)
        covered |= covers
    return kept


def launches_of_calls(arch: int, chosen: list[dict[str, Any]], *, is_hopper: bool) -> dict[str, Launch]:
    """The distinct launches of some calls, which share many kernels, such as the preprocess."""
    distinct: dict[str, Launch] = {}
    portable: set[str] = set()
    for call in chosen:
        named = {**call, "dtype": str(call["dtype"]).removeprefix("torch.")}
        for kernel, kwargs in launches(arch, **call):
            # once per Triton kernel that backend `hopper` launches: other targets compile their configurations
            if is_hopper and not kernel.is_gluon():
                if kernel.fn.__name__ in portable:
                    continue
                portable.add(kernel.fn.__name__)
            source, options = source_of(kernel, kwargs, arch)
            key = f"{source.hash()} {sorted(options.items(), key=str)}"
            launch = Launch(kernel, source, options, [], programs_per_sm(kernel, kwargs))
            distinct.setdefault(key, launch).calls.append(named)
    return distinct


@functools.cache
def launches_of(target: str) -> list[Launch]:
    """The distinct launches of a target: "80", "86", "90", "100" or "hopper".

    A suffix selects: "-few" the tuned configurations, "-rest" all others, "-once" (hopper) what each_option_once keeps.
    """
    name, _, which = target.partition("-")
    is_hopper = name == "hopper"
    arch = 90 if is_hopper else int(name)
    all_calls = hopper_calls() if is_hopper else calls(arch)
    if which == "once":
        return [*launches_of_calls(arch, each_option_once(all_calls), is_hopper=is_hopper).values()]
    few = launches_of_calls(arch, few_hopper_calls() if is_hopper else table_calls(arch), is_hopper=is_hopper)
    every = few | launches_of_calls(arch, all_calls, is_hopper=is_hopper)
    return [launch for key, launch in every.items() if not which or (key in few) == (which == "few")]


def listed(target: str) -> list[dict[str, Any]]:
    """Name and calls of each launch of a target, without compiling."""
    return [{"kernel": launch.kernel.fn.__name__, "calls": launch.calls} for launch in launches_of(target)]


def records(target: str, kernel: str | None = None, shard: int = 0, n_shards: int = 1) -> Iterator[dict[str, Any]]:
    """The results of compile_launches for a target: for each launch, once for each call that launches it.

    kernel           compile the launches of this kernel only
    shard, n_shards  compile every n_shards-th of them, from number `shard` on
    """
    arch = 90 if target.startswith("hopper") else int(target.partition("-")[0])
    chosen = [launch for launch in launches_of(target) if kernel in (None, launch.kernel.fn.__name__)]
    chosen = chosen[shard::n_shards]
    for launch, record in zip(chosen, compile_launches(chosen, arch), strict=True):
        for call in launch.calls:
            yield {**record, "call": call}


def answer_requests() -> None:
    """Answer each line of standard input with a line of JSON.

    list TARGET                            `listed`
    compile TARGET KERNEL SHARD N_SHARDS   `records`
    """
    for line in sys.stdin:
        verb, target, *arguments = line.split()
        if verb == "list":
            answer = listed(target)
        else:
            kernel, shard, n_shards = arguments
            answer = list(records(target, kernel, int(shard), int(n_shards)))
        print(json.dumps(answer), flush=True)


def main(targets: list[str]) -> None:
    if triton.knobs.runtime.interpret:
        raise SystemExit("TRITON_INTERPRET=1 interprets the kernels; unset it to compile them")
    if targets == ["-"]:
        answer_requests()
        return
    for target in targets:
        for record in records(target):
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or [*map(str, sorted(SHARED_MEMORY)), "hopper"])
