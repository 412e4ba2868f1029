"""Compiles every kernel without a GPU: `python -m tests.support.compile_kernels 90` prints a JSON line per launch.

`hopper` instead of an architecture selects the Gluon kernels, on sm90. `90-few` and `hopper-few` select the tuned
configurations, `90-rest` and `hopper-rest` all others. With `-` it answers requests on standard input.

Runs the launchers on CPU tensors, catches each launch and compiles it ahead of time for that architecture with the
ptxas that ships inside Triton. Must run in a process of its own: the test process interprets the kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import re
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
from blocksparse_flash.kernels.hopper import forward as hopper_forward
from blocksparse_flash.kernels.inputs import BackwardInputs
from blocksparse_flash.kernels.schedule import Split
from blocksparse_flash.kernels.triton import backward, block_selection, forward, gather_scatter, plan_builder, split_kv
from blocksparse_flash.plan_format import TILE, Plan
from blocksparse_flash.score_mods import Scores

# bytes of shared memory that a program may take
SHARED_MEMORY = {80: 166912, 86: 101376, 90: 232448, 100: 232448}
# a negative scale, and 0
SIGNS: list[dict[str, Any]] = [{"scale": -0.125}, {"scale": 0.0}]
# options of the scores, as scores_of reads them
EVERYTHING = "sinks softcap slopes learned bias16"


def launches(
    arch: int, *, parts: int = 1, small: bool = False, **call: Any
) -> list[tuple[JITFunction, dict[str, Any]]]:
    """(kernel, keyword arguments) of every launch of one forward and backward, or of one decoding step.

    parts  into which `hopper` splits two lines of each head
    small  whether SMs are idle: blocks of queries are halved, and dk, dv and dq share a launch
    """
    caught: list[tuple[JITFunction, dict[str, Any]]] = []

    def catch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        caught.append((kernel, {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}))

    # launches prepared for another device or number of SMs must not be reused
    for launches_of in (
        forward.forward_launch,
        backward.backward_launches,
        split_kv.split_kv_launches,
        hopper_forward.forward_launches,
        hopper_backward.backward_launches,
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
        mock.patch.object(hopper_forward, "split_of", lambda *_: Split(2, parts)),
        mock.patch.object(hopper_backward, "split_of", lambda *_: Split(2, parts)),
        mock.patch.object(split_kv, "num_sms", lambda _: 132),
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
    dlse: bool = False,
    backend: str = "triton",
    deterministic: bool = False,
    scores: str = "",
    scale: float = 0.125,
) -> None:
    """Call the launchers of a backend; mode is "layout", "quarters" for one with tiles made of whole quarters,
    "dense" or "causal",
    "rows" for those that move rows, or "select" for those that select blocks.

    scores is what `scores_of` reads. With a few queries, q_len, the forward's.
    """
    if mode == "rows":
        run_rows(head_dim, dtype, length)
        return
    if mode == "select":
        run_selection(head_dim, dtype, length)
        return
    heads = 2 * group
    dims = (head_dim, head_dim if v_dim is None else v_dim)
    q, dout = (torch.empty(2, heads, length if q_len is None else q_len, dim, dtype=dtype) for dim in dims)
    k, v = (torch.empty(2, 2, length, dim, dtype=dtype) for dim in dims)
    items = torch.zeros(1, 1, 8 if q_len is None else 1, 8, dtype=torch.int32)
    # more tiles a row than those whose dq has a launch of its own
    indices = torch.zeros(33, dtype=torch.int32)
    ids = torch.zeros(33 + (mode == "quarters"), dtype=torch.int32)
    plan = Plan(items, indices, ids, items, indices, ids, torch.zeros(3, 128, 4, dtype=torch.int32))
    lengths = torch.zeros(2, dtype=torch.int64) if limited else None
    seed = torch.zeros(1, dtype=torch.int64)
    options = (list(plan) if mode in ("layout", "quarters") else [], lengths, seed, scale, mode == "causal", dropout_p)
    if backend == "hopper":
        options = (*options[:2], None, *options[3:])
        out, lse = hopper_forward.forward(q, k, v, *options)
        dlse = torch.empty_like(lse) if dlse else None
        hopper_backward.backward(BackwardInputs(dout, dlse, q, k, v, out, lse), *options, deterministic=deterministic)
        return
    given: tuple[Any, ...] = ()
    if scores:
        options = (*options, scores_of(scores, heads, len(indices)))
        # of slopes nobody learns
        given = (["sinks" in scores, "learned" in scores, "bias" in scores],)
    out, lse = forward.forward(q, k, v, *options)
    if q_len is not None:
        return
    inputs = BackwardInputs(dout, torch.empty_like(lse) if dlse else None, q, k, v, out, lse)
    backward.backward(inputs, *options, *given)


def scores_of(words: str, heads: int, n_tiles: int) -> Scores:
    """Options of the scores by words: sinks, softcap, slopes (learned), bias of blocks of so many tokens."""
    bias, index = None, list[torch.Tensor]()
    if "bias" in words:
        pieces = TILE // int(words.split("bias")[1])
        of_tiles = torch.zeros(n_tiles, pieces, pieces, dtype=torch.int32)
        bias, index = torch.zeros(1, heads, n_tiles), [of_tiles, of_tiles, torch.zeros(n_tiles, 1, dtype=torch.int64)]
    sinks, slopes = (torch.zeros(heads) if word in words else None for word in ("sinks", "slopes"))
    return Scores(sinks, slopes, bias, index, 30.0 if "softcap" in words else 0.0)


def run_rows(head_dim: int, dtype: torch.dtype, length: int) -> None:
    """Rows of up to four tensors to a message and back, sums of what comes back, in place, and outputs merged."""
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


def run_selection(side: int, dtype: torch.dtype, length: int) -> None:
    """Blocks of a side from scores and from indices, and both directions of their plan, causal for blocks within a
    tile."""
    n = length // side
    selected = block_selection.Rows(2, n, n, length, length, (side, side))
    block_selection.of_scores(torch.empty(2, n, n, dtype=dtype), selected, 16, causal=side < 128)
    bits, *_ = block_selection.of_indices(torch.empty(2, n, 16, dtype=torch.int64), selected)
    block_selection.of_rows(torch.empty(2 * (n + 1 + n * n), dtype=torch.int32), selected)
    plan_builder.build_from_bits(bits, plan_builder.Grid(selected, causal=side < 128), (1, 2), (33, 35, 37))


def source_of(kernel: JITFunction, kwargs: dict[str, Any], arch: int) -> tuple[ASTSource, dict[str, Any]]:
    """What the just-in-time compiler would compile, and with which options."""
    backend = make_backend(GPUTarget("cuda", arch, 32))
    kwargs = {"debug": False, **kwargs}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(**kwargs)
    options, signature, constexprs, attrs = kernel._pack_args(backend, kwargs, bound, specialization, options)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attrs)
    return source, options.__dict__


def early_arrivals(ptx: str) -> int:
    """Arrivals at mbarriers with an access to shared memory before them and no barrier of its threads between.

    One thread arrives for all of its warps: without the barrier another warp could still read what the arrival gives
    back,
    or write what it gives away.
    """
    found, is_ordered = 0, True
    barriers = r"\b(?:bar|barrier)\.(?:warp\.)?sync|mbarrier\.arrive\.shared"
    events = rf"\b(?:ld|st)\.shared|\b(?:ld|st)matrix|wgmma\.mma_async|{barriers}"
    for event in re.findall(events, ptx):
        if event.startswith("mbarrier"):
            found += not is_ordered
        else:
            is_ordered = event.startswith("bar")
    return found


def code_and_loops(sass: str) -> tuple[list[tuple[int, str]], list[tuple[int, int]]]:
    """Of what `cuobjdump -sass` prints, (place, text) of each instruction, and first and last place of what is
    jumped back over."""
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ +)?([^;/]+?) *;", sass)
    lines = [(int(place, 16), text) for place, text in code]
    jumps = [(place, re.match(r"BRA (?:[^,]+, )?0x([0-9a-f]+)", text)) for place, text in lines]
    return lines, [(int(found[1], 16), place) for place, found in jumps if found and int(found[1], 16) < place]


def spills_beside_products(sass: str) -> int:
    """Loads and stores of spilled registers in the innermost loops around products."""
    lines, loops = code_and_loops(sass)
    around = [[loop for loop in loops if loop[0] <= place <= loop[1]] for place, text in lines if "HGMMA" in text]
    shortest = {min(each, key=lambda loop: loop[1] - loop[0]) for each in around if each}
    spilled = [place for place, text in lines if re.match("LDL|STL", text)]
    return sum(first <= place <= last for place in spilled for first, last in shortest)


def innermost(loops: list[tuple[int, int]], place: int) -> tuple[int, int] | None:
    """The shortest of the loops around a place."""
    around = [loop for loop in loops if loop[0] <= place <= loop[1]]
    return min(around, key=lambda loop: loop[1] - loop[0]) if around else None


def kept_operands(ptx: str) -> int:
    """Products of warpgroups in loops whose left operand is in registers that the innermost loop never writes, in
    PTX."""
    statements, labels = list[str](), dict[str, int]()
    for part in re.sub(r"//[^\n]*", "", ptx).split(";"):
        for label in re.findall(r"^\s*([$\w]+):", part, re.MULTILINE):
            labels[label] = len(statements)
        # without labels, directives and the brace that inline assembly may open
        text = re.sub(r"^\s*([$\w]+:|\.\w+[^\n]*$)", "", part, flags=re.MULTILINE)
        statements.append(text.strip().lstrip("{").strip())
    loops = []
    for place, text in enumerate(statements):
        jump = re.search(r"\bbra(?:\.uni)?\s+([$\w]+)$", text)
        if jump and labels.get(jump[1], place + 1) <= place:
            loops.append((labels[jump[1]], place))
    result = re.compile(r"(?:@!?%p\d+\s+)?[\w.:]+\s+(\{[^}]*\}|%\w+(?:\|%\w+)?)\s*(?:,|$)")
    written = [set(re.findall(r"%\w+", found[1])) if (found := result.match(text)) else set() for text in statements]
    n_kept = 0
    for place, text in enumerate(statements):
        product = re.match(r"wgmma\.mma_async\S*\s+\{[^}]*\},\s*\{([^}]*)\}", text)
        loop = innermost(loops, place)
        if product and loop:
            n_kept += set(re.findall(r"%\w+", product[1])).isdisjoint(set().union(*written[loop[0] : loop[1] + 1]))
    return n_kept


def result_registers(text: str) -> range:
    """The registers that an instruction of `cuobjdump -sass` writes."""
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
    """Products whose left operand a loop should keep in registers, and overwrites behind the product, in what
    `cuobjdump -sass` prints.

    From the second round on such a product multiplies what the round before has written there. The ptxas of Triton 3.6
    and 3.7 compiles correct PTX this way, those of 3.8 and 3.9 do not: values loaded (LDSM) or computed (LOP3) before
    the loop are kept in registers that the exponentials (F2FP) of each round overwrite. A loop that passes an operand
    to its next round looks the same in SASS; in PTX it writes the registers. So nothing is counted unless a product in
    PTX has an operand that its loop never writes.
    """
    if not kept_operands(ptx):
        return 0
    lines, loops = code_and_loops(sass)
    written = [(place, result_registers(text)) for place, text in lines]
    n_lost = 0
    for place, text in lines:
        product = re.match(r"HGMMA\S* R\d+, R(\d+), gdesc", text)
        loop = innermost(loops, place)
        if not product or not loop:
            continue
        operand = range(int(product[1]), int(product[1]) + 4)
        inside = [
            at for at, registers in written if loop[0] <= at <= loop[1] and not set(operand).isdisjoint(registers)
        ]
        n_lost += bool(inside) and min(inside) >= place
    return n_lost


def unwritten_registers(sass: str) -> int:
    """Reads of uniform registers, which hold addresses, that no instruction above has written: ptxas lost one.

    Descriptors of matrices are left out: of four registers a product of registers with shared memory reads the last
    two.
    """
    written: set[int] = set()
    n_lost = 0
    for name, operands in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?(\S+) *([^;]*);", sass):
        registers = [int(each) for each in re.findall(r"\bUR(\d+)\b", operands)]
        is_result = name.startswith(("U", "R2UR", "S2UR")) and not name.startswith("UTM") and operands.startswith("UR")
        if "gdesc" not in operands:
            n_lost += sum(each not in written for each in registers[is_result:])
        if is_result:
            # wide ones are pairs, or four
            width = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
            written |= {registers[0] + i for i in range(width)}
    return n_lost


def disassembled(cubin: bytes) -> str:
    """What ptxas made of a kernel, by the tool that ships inside Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def compile_launch(kernel: JITFunction, source: ASTSource, options: dict[str, Any], arch: int) -> dict[str, Any]:
    """Compile and read registers, spills, shared memory and wgmma waits."""
    with (
        triton.knobs.compilation.scope(),
        triton.knobs.nvidia.scope(),
        contextlib.redirect_stdout(io.StringIO()) as log,
    ):
        # a kernel from the cache would bring no log; Triton passes ptxas options of its own, so the log must be
        # Triton's
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = compiled.asm["ptx"]
    # the many kernels without products of warpgroups need none
    sass = disassembled(compiled.asm["cubin"]) if "wgmma" in ptx else ""

    def number(pattern: str) -> int:
        return int(re.findall(pattern, log.getvalue())[-1])

    return {
        "kernel": kernel.fn.__name__,
        "arch": arch,
        "triton": triton.__version__,
        "registers": number(r"Used (\d+) registers"),
        "spills": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "shared": compiled.metadata.shared,
        "shared_limit": SHARED_MEMORY[arch],
        "tensor_memory": getattr(compiled.metadata, "tmem_size", 0) or 0,
        "warps": compiled.metadata.num_warps,
        # matrix products in the source; none: a kernel of sums
        "products": len(
            re.findall(r"\btt\.dot\b|\bttng\.warp_group_dot\b", compiled.asm.get("ttir", compiled.asm["ttgir"]))
        ),
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "wgmma_waits": len(re.findall(r"wgmma\.wait_group", ptx)),
        "early_arrivals": early_arrivals(ptx),
        "lost_operands": lost_operands(ptx, sass),
        "spills_beside_products": spills_beside_products(sass),
        "unwritten_registers": unwritten_registers(sass),
        "async_copies": len(re.findall(r"cp\.async\.(?:ca|cg|bulk\.tensor)", ptx)),
        # what ptxas says when it gives up the overlap of wgmma with other instructions
        "serialised": sorted(set(re.findall(r"C75\d\d", log.getvalue()))),
    }


def table_calls(arch: int) -> list[dict[str, Any]]:
    """A call for every row of the launch tables, which differ by architecture."""
    half = torch.bfloat16
    if SHARED_MEMORY[arch] < 160 * 1024:
        # the rows for little shared memory; all else is as on sm80
        little = [{"head_dim": dim, "dtype": dtype} for dim in (64, 128, 256) for dtype in (half, torch.float32)]
        little += [{**call, "q_len": q_len} for call in little for q_len in (1, 64)]
        little += [{"head_dim": 64, "dtype": half, **option} for option in SIGNS]
        return [*little, {"head_dim": 128, "dtype": half, "q_len": 16, "group": 4, "scores": EVERYTHING}]
    grid = [{"head_dim": head_dim, "dtype": half} for head_dim in (64, 128, 256)]
    grid += [{"head_dim": head_dim, "dtype": torch.float32} for head_dim in (64, 128, 256)]
    grid += [
        {"head_dim": head_dim, "dtype": half, **option}
        for head_dim in (64, 128)
        for option in ({"dropout_p": 0.1}, {"scores": "softcap"})
    ]
    # of a few queries: 4, 32, 64 and 256 rows that share their keys
    grid += [
        {"head_dim": head_dim, "dtype": half, "q_len": q_len, "group": 4}
        for head_dim, q_len in itertools.product((64, 128), (1, 8, 16, 64))
    ]
    grid += [{"head_dim": 256, "dtype": half, "q_len": q_len, "group": 4} for q_len in (1, 64)]
    grid += [{"head_dim": 128, "dtype": torch.float32, "q_len": 1, "group": 4}]
    if arch >= 90:
        # too small for descriptors: pointers
        grid += [{"head_dim": head_dim, "dtype": half, "length": 256} for head_dim in (64, 128)]
    if arch == 90:
        small = {"dtype": half, "small": True}
        grid += [
            {"head_dim": head_dim, "mode": mode, **small}
            for head_dim, mode in itertools.product((64, 128), ("layout", "causal"))
        ]
        grid += [{"head_dim": head_dim, "length": 256, **small} for head_dim in (64, 128)]
        # values whose rows nothing copies
        grid += [
            {"head_dim": head_dim, "v_dim": v_dim, "length": 256, **option}
            for head_dim, v_dim in ((100, 3), (64, 3), (128, 17))
            for option in ({"dtype": half}, small)
        ]
        # and few queries, of heads that share their keys
        grid += [{"head_dim": 100, "v_dim": 3, "dtype": half, "q_len": q_len, "group": 4} for q_len in (16, 64)]
        # with grouped heads, as without descriptors, dk and dv have a launch of their own
        grid += [{"head_dim": 128, "dtype": half, "group": 4, "mode": mode} for mode in ("layout", "causal")]
        # kernels that find a maximum have another code for a negative scale, and for 0
        grid += [{**call, "scale": -0.125} for call in grid if call["dtype"] == half]
    grid += [{"head_dim": head_dim, "dtype": half, **option} for head_dim in (64, 128) for option in SIGNS]
    return [*grid, {"head_dim": 128, "dtype": half, "q_len": 1, "group": 4, "scale": 0.0}]


def calls(arch: int) -> list[dict[str, Any]]:
    """The calls whose launches are compiled: every row of the launch tables, and every option once."""
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
    few = {"dtype": half, "q_len": 1, "group": 4}
    grid += [
        {"head_dim": 128, **few, **option} for option in ({"mode": "dense"}, {"mode": "causal"}, {"limited": True})
    ]
    grid += [{"head_dim": head_dim, **few} for head_dim in (3, 40)]
    grid += [{"head_dim": head_dim, "dtype": half, "mode": "rows"} for head_dim in (64, 128)]
    # sides of blocks that are selected; of the largest, more cols than a warp holds
    grid += [{"head_dim": 64, "dtype": half, "mode": "select"}]
    grid += [{"head_dim": 128, "dtype": torch.float32, "mode": "select", "length": 1 << 17}]
    grid += [{"head_dim": head_dim, "dtype": half, "scores": EVERYTHING} for head_dim in (64, 128)]
    grid += [{"head_dim": 64, "dtype": half, "scores": scores} for scores in ("sinks", "bias128")]
    grid += [{"head_dim": 64, "dtype": half, "mode": "causal", "scores": "slopes"}]
    # 4 and 64 rows of heads with options of their own
    grid += [{**few, "head_dim": 128, "q_len": q_len, "scores": EVERYTHING} for q_len in (1, 16)]
    return grid


def hopper_calls() -> list[dict[str, Any]]:
    """The calls on backend `hopper` whose launches are compiled: every configuration, and every option once."""
    half = torch.bfloat16
    grid: list[dict[str, Any]] = [
        {"head_dim": head_dim, "dtype": half, "mode": mode}
        for head_dim, mode in itertools.product((64, 128, 256), ("layout", "quarters", "dense", "causal"))
    ]
    # so many that rows of 192 queries pay
    grid += [{"head_dim": 64, "dtype": half, "mode": mode, "length": 24576} for mode in ("dense", "causal")]
    # so few rows that none waits in a queue
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": mode, "length": 1024}
        for head_dim, mode in itertools.product((64, 128), ("layout", "causal"))
    ]
    grid += [{"head_dim": head_dim, "dtype": half, "limited": True} for head_dim in (64, 128)]
    grid += [{"head_dim": head_dim, "dtype": half, "limited": True, "mode": "dense"} for head_dim in (64, 128)]
    grid += [{"head_dim": head_dim, "dtype": half, "deterministic": True} for head_dim in (64, 128)]
    # rows of 200 bytes, of which a copy is made
    grid += [{"head_dim": 128, "dtype": torch.float16, "group": 4}, {"head_dim": 100, "dtype": half, "dlse": True}]
    # and of each kernel what it becomes where lines are split
    grid += [{"head_dim": 64, "dtype": half, "mode": mode, "parts": 3} for mode in ("layout", "causal")]
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": "quarters", "parts": 3, "limited": True} for head_dim in (64, 128)
    ]
    options: list[dict[str, Any]] = [{}, {"group": 4}, {"limited": True}]
    grid += [{"head_dim": 128, "dtype": half, "parts": 3, **option} for option in options]
    grid += [{"head_dim": 256, "dtype": half, "parts": 3}]
    grid += [{"head_dim": head_dim, "dtype": half, **option} for head_dim in (64, 128, 256) for option in SIGNS]
    grid += [{"head_dim": 64, "dtype": half, "mode": mode, **SIGNS[0]} for mode in ("quarters", "dense", "causal")]
    # of its dq, which a kernel of the portable backend computes
    grid += [{"head_dim": 64, "dtype": half, "deterministic": True, **option} for option in SIGNS]
    return [{**call, "backend": "hopper"} for call in grid]


def few_hopper_calls() -> list[dict[str, Any]]:
    """Those of `hopper_calls` that are rows of the launch tables, and each row's lengths, splits and equal bits
    once."""
    half = torch.bfloat16
    options: list[dict[str, Any]] = [{"mode": mode} for mode in ("layout", "quarters", "dense", "causal")]
    options += [{"limited": True}, {"parts": 3}, {"deterministic": True}]
    grid = [{"head_dim": head_dim, "dtype": half, **option} for head_dim in (64, 128) for option in options]
    grid += [{"head_dim": 64, "dtype": half, "mode": "dense", "length": 24576}]
    grid += [{"head_dim": 256, "dtype": half, "mode": "layout"}]
    grid += [{"head_dim": 64, "dtype": half, **option} for option in SIGNS]
    grid += [{"head_dim": 128, "dtype": half, **SIGNS[0]}]
    return [{**call, "backend": "hopper"} for call in grid]


def each_option_once(chosen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls with a new row of the launch tables or a new pair of options, and every scale (where ptxas 3.6 had a
    bug)."""
    kept, met = list[dict[str, Any]](), set[Any]()
    for call in chosen:
        options = sorted((name, value) for name, value in call.items() if name not in ("head_dim", "dtype", "backend"))
        found = {(call["head_dim"], call["dtype"], call.get("mode"), call.get("limited"))}
        found |= set(itertools.combinations_with_replacement(options, 2))
        if "scale" in call or not found <= met:
            kept.append(call)
        met |= found
    return kept


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel to compile, and the calls that launch it."""

    kernel: JITFunction
    source: ASTSource
    options: dict[str, Any]
    calls: list[dict[str, Any]]


def launches_of_calls(arch: int, chosen: list[dict[str, Any]], *, is_hopper: bool) -> dict[str, Launch]:
    """The distinct launches of some calls. Calls share kernels, above all the small ones before and after the loops."""
    found: dict[str, Launch] = {}
    portable: set[str] = set()
    for call in chosen:
        named = {**call, "dtype": str(call["dtype"]).removeprefix("torch.")}
        for kernel, kwargs in launches(arch, **call):
            # the portable kernels that backend hopper launches are compiled for every architecture: here one of each
            if is_hopper and not kernel.is_gluon():
                if kernel.fn.__name__ in portable:
                    continue
                portable.add(kernel.fn.__name__)
            source, options = source_of(kernel, kwargs, arch)
            key = f"{source.hash()} {sorted(options.items(), key=str)}"
            found.setdefault(key, Launch(kernel, source, options, [])).calls.append(named)
    return found


@functools.cache
def launches_of(target: str) -> list[Launch]:
    """The distinct launches of a target: "80", "86", "90", "100" or "hopper".

    A suffix selects: "-few" the tuned configurations, "-rest" all others, "-once" (hopper) what each_option_once keeps.
    """
    name, _, which = target.partition("-")
    is_hopper = name == "hopper"
    arch = 90 if is_hopper else int(name)
    whole = hopper_calls() if is_hopper else calls(arch)
    if which == "once":
        return [*launches_of_calls(arch, each_option_once(whole), is_hopper=is_hopper).values()]
    few = launches_of_calls(arch, few_hopper_calls() if is_hopper else table_calls(arch), is_hopper=is_hopper)
    every = few | launches_of_calls(arch, whole, is_hopper=is_hopper)
    return [launch for key, launch in every.items() if not which or (key in few) == (which == "few")]


def listed(target: str) -> list[dict[str, Any]]:
    """Name and calls of each launch of a target, without compiling."""
    return [{"kernel": launch.kernel.fn.__name__, "calls": launch.calls} for launch in launches_of(target)]


def records(target: str, kernel: str | None = None, part: int = 0, parts: int = 1) -> Iterator[dict[str, Any]]:
    """What compiling finds, for each launch of a target and each of its calls.

    kernel       compile the launches of this kernel only
    part, parts  compile every `parts`-th of them, from number `part` on
    """
    chosen = [launch for launch in launches_of(target) if kernel in (None, launch.kernel.fn.__name__)]
    for launch in chosen[part::parts]:
        arch = 90 if target.startswith("hopper") else int(target.partition("-")[0])
        record = compile_launch(launch.kernel, launch.source, launch.options, arch)
        for call in launch.calls:
            yield {**record, "call": call}


def answer_requests() -> None:
    """Answer each line of standard input, `list TARGET` or `compile TARGET KERNEL PART PARTS`, with a line of JSON."""
    for line in sys.stdin:
        verb, target, *arguments = line.split()
        if verb == "list":
            answer = listed(target)
        else:
            kernel, part, parts = arguments
            answer = list(records(target, kernel, int(part), int(parts)))
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
