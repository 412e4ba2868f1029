"""Speed in the shapes and with the options of models: `python -m benchmarks.run.shapes` on a CUDA GPU.

Grouped-query attention, sliding windows, packed documents, head dimensions of 64 to 256, and options, at the sizes at
which models are trained. Calls are those that a user writes: backend "auto", the layouts of `masks`. Peers:
FlashAttention-4 where it is installed, FlexAttention, and for dense and causal calls without options
scaled_dot_product_attention with its kernels cuDNN and FlashAttention-2. Outputs and gradients are compared with
float32 on sampled rows before timing; the peers of a case take turns within one process.

Lines: `pattern` is the name of the case. TFLOP/s count the pairs that attend: 2 * (head_dim + v_dim) each forward and
2 * (3 * head_dim + 2 * v_dim) backward. Joules are those of the whole GPU in a loop of calls, where NVML has a counter
and pynvml is installed (pip install nvidia-ml-py). The direction "plan" is the layout and plan of packed documents,
made on the GPU from their boundaries, which a training step does once. `python -m benchmarks.report` makes a table of
them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blocksparse_flash import BlockLayout, attention, explain, masks, nn

from . import measure
from .attention import Run, matmul
from .correctness import TOLERANCE, relative_error
from .peers import Call, compiled_flex, is_installed, sdpa_call, tokens_first_call

KEYS = [*measure.KEYS_WITH_ENERGY, "kv_heads", "v_dim"]
SOFTCAP = 30.0
# of block_bias
BLOCK = 128
# the option of a call that differs from one with a block_bias in the bias alone
STORED = "layout of all blocks"
# create_block_mask evaluates every pair
MAX_FLEX_TOKENS = 1 << 17
# sampled queries of each head
ROWS = 32


class Case(NamedTuple):
    """One call. The heads are those of a model of width heads * head_dim.

    window     tokens that a query attends to, itself included; None for all
    documents  packed documents of equal length; None for one sequence
    option     "softcap", "sinks", "alibi_slopes", "deterministic", "block_bias" (a number for each head and block of
               128 x 128 pairs), "trained block_bias" (with its gradient in the backward), STORED (the layout of the
               calls with a bias), or "" for none
    """

    name: str
    length: int
    batch: int = 1
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    v_dim: int = 128
    causal: bool = True
    window: int | None = None
    documents: int | None = None
    option: str = ""

    @property
    def pairs(self) -> int:
        """Query-key pairs that attend, of one head."""
        length = self.length // (self.documents or 1)
        window = min(length, self.window or length)
        of_document = window * (window + 1) // 2 + (length - window) * window if self.causal else length**2
        return of_document * (self.documents or 1)

    def flops(self, direction: str) -> int:
        """Operations of the products of a direction, "fwd" or "bwd"."""
        dims = self.head_dim + self.v_dim if direction == "fwd" else 3 * self.head_dim + 2 * self.v_dim
        return 2 * self.batch * self.heads * self.pairs * dims

    def attends(self, rows: Tensor) -> Tensor:
        """Queries, int64 (rows,), to the keys they attend to, bool (rows, length)."""
        keys = torch.arange(self.length, device=rows.device)
        mask = torch.ones(len(rows), self.length, dtype=torch.bool, device=rows.device)
        if self.causal:
            mask &= keys <= rows[:, None]
        if self.window is not None:
            mask &= keys > rows[:, None] - self.window
        if self.documents is not None:
            mask &= keys // (self.length // self.documents) == rows[:, None] // (self.length // self.documents)
        return mask

    def cu_seqlens(self, device: str) -> Tensor:
        """Where the documents begin and end, int32."""
        assert self.documents is not None
        return torch.arange(self.documents + 1, dtype=torch.int32, device=device) * (self.length // self.documents)


def _cases() -> Iterator[Case]:
    gqa: dict[str, Any] = {"heads": 32, "kv_heads": 8}
    yield Case("causal", 16384)
    for length in (8192, 32768):
        yield Case(f"causal, 32 heads on 8, {length}", length, **gqa)
    yield Case("causal, 64 heads on 8, 8192", 8192, heads=64, kv_heads=8)
    yield Case("dense, 32 heads on 8, 8192", 8192, **gqa, causal=False)
    yield Case("causal, 8 x 2048", 2048, batch=8)
    for window in (512, 4096):
        yield Case(f"causal window of {window}", 16384, window=window)
    for documents in (8, 64):
        yield Case(f"{documents} packed documents, causal", 16384, documents=documents)
    # no document is a multiple of a tile
    yield Case("10000 packed documents of 105 tokens, causal", 1_050_000, heads=4, kv_heads=4, documents=10_000)
    for head_dim, v_dim in ((64, 64), (80, 80), (96, 96), (192, 128), (192, 192), (256, 256)):
        heads = 2048 // head_dim // 2 * 2
        yield Case(f"causal, head_dim {head_dim}, values {v_dim}", 8192, 1, heads, heads, head_dim, v_dim)
    for option in ("", "sinks", "softcap", "alibi_slopes", "deterministic", STORED, "block_bias", "trained block_bias"):
        yield Case(f"causal, {option or 'no option'}", 8192, option=option)


CASES = tuple(_cases())


class Peer(NamedTuple):
    """One implementation.

    prepare  makes the masks of a case on a device and returns the call, or says why it cannot; its last argument is
             values_of the case. The call takes q, k, v (batch, heads, length, head_dim)
    """

    provider: str
    backend: str
    prepare: Callable[[Case, str, dict[str, Tensor]], Call | str]
    package: str | None = None


def values_of(case: Case, device: str) -> dict[str, Tensor]:
    """The tensor of the option, by the name of the argument; {} if it has none."""
    if case.option == "sinks":
        # so large that ds of the first query is not a difference of nearly equal numbers
        return {"sinks": torch.linspace(2.0, 6.0, case.heads, device=device)}
    if case.option == "alibi_slopes":
        return {"alibi_slopes": nn.alibi_slopes(case.heads).to(device)}
    if case.option.endswith("block_bias"):
        generator = torch.Generator(device=device).manual_seed(1)
        shape = case.heads, full_layout(case).nnz
        bias = torch.randn(shape, device=device, generator=generator)
        return {"block_bias": bias.requires_grad_(case.option != "block_bias")}
    return {}


def full_layout(case: Case) -> BlockLayout:
    """All blocks: those of a row are stored in order."""
    side = -(-case.length // BLOCK)
    blocks = torch.ones(side, side, dtype=torch.bool)
    return BlockLayout.from_block_mask(blocks, case.length, case.length, block_size=BLOCK)


def grid_of(bias: Tensor) -> Tensor:
    """The bias of each block, (heads, rows, columns)."""
    side = math.isqrt(bias.shape[1])
    return bias.view(len(bias), side, side)


# ---- implementations ----


def documents_of(case: Case, cu_seqlens: Tensor) -> BlockLayout:
    """The layout of the case's documents, made on the device of their boundaries."""
    assert case.documents is not None
    longest = case.length // case.documents
    return masks.documents(cu_seqlens, causal=case.causal, length=case.length, max_seqlen=longest)


def _ours(case: Case, device: str, values: dict[str, Tensor], *, backend: str = "auto") -> Call:
    layout, causal = None, case.causal
    if case.documents is not None:
        layout, causal = documents_of(case, case.cu_seqlens(device)), False
    elif case.window is not None:
        layout, causal = masks.local(case.length, window=(case.window - 1, 0)), False
    elif case.option == STORED or "block_bias" in values:
        layout = full_layout(case)
    options: dict[str, Any] = {"softcap": SOFTCAP} if case.option == "softcap" else dict(values)
    options["deterministic"] = case.option == "deterministic"
    return functools.partial(attention, layout=layout, causal=causal, backend=backend, **options)


def _flash_attention_4(case: Case, device: str, values: dict[str, Tensor]) -> Call | str:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if case.option in ("alibi_slopes", STORED) or "block_bias" in values:
        return f"has no option {case.option}"
    options: dict[str, Any] = {"causal": case.causal}
    if case.window is not None:
        options = {"window_size": (case.window - 1, 0)}
    if case.option == "softcap":
        options["softcap"] = SOFTCAP
    if case.option == "sinks":
        options["learnable_sink"] = values["sinks"].bfloat16()
    if case.option == "deterministic":
        options["deterministic"] = True
    if case.documents is None:
        return tokens_first_call(flash_attn_func, **options)
    cu_seqlens, longest = case.cu_seqlens(device), case.length // case.documents
    for name in "qk":
        options |= {f"cu_seqlens_{name}": cu_seqlens, f"max_seqlen_{name}": longest}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_varlen_func(*(x[0].transpose(0, 1) for x in (q, k, v)), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)[None]

    return call


def _flex(case: Case, device: str, values: dict[str, Tensor]) -> Call | str:
    from torch.nn.attention.flex_attention import create_block_mask

    if case.option in ("sinks", "deterministic", STORED):
        return f"has no option {case.option}"
    if case.length > MAX_FLEX_TOKENS:
        return "needs minutes to make a mask this large"
    length = case.length // (case.documents or 1)

    def attends(_b: Tensor, _h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        found = q >= kv
        if case.window is not None:
            found = found & (q - kv < case.window)
        return found & (q // length == kv // length) if case.documents is not None else found

    def capped(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _kv: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def with_slopes(score: Tensor, _b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score - values["alibi_slopes"][h] * (q - kv).abs()

    def with_bias(score: Tensor, _b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + grid[h, q // BLOCK, kv // BLOCK]

    grid = grid_of(values["block_bias"]) if "block_bias" in values else torch.empty(0)
    options: dict[str, Any] = {"enable_gqa": case.heads != case.kv_heads}
    if case.causal:
        create = torch.compile(create_block_mask, dynamic=False, fullgraph=True)
        options["block_mask"] = create(attends, None, None, case.length, case.length, device=device)
    if case.option:
        mods = {"softcap": capped, "alibi_slopes": with_slopes, "block_bias": with_bias}
        options["score_mod"] = mods[case.option.removeprefix("trained ")]
    return functools.partial(compiled_flex(), **options)


def _sdpa(kernel: str) -> Callable[[Case, str, dict[str, Tensor]], Call | str]:
    def prepare(case: Case, _device: str, _values: dict[str, Tensor]) -> Call | str:
        if case.window is not None or case.documents is not None:
            return "has neither windows nor documents"
        if case.option:
            return f"has no option {case.option}"
        return sdpa_call(kernel, is_causal=case.causal, enable_gqa=case.heads != case.kv_heads)

    return prepare


PEERS = (
    Peer("blocksparse_flash", "auto", _ours),
    Peer("flash_attention_4", "cute", _flash_attention_4, "flash_attn.cute"),
    Peer("flex", "triton", _flex),
    Peer("cudnn", "cudnn", _sdpa("CUDNN_ATTENTION")),
    Peer("flash_attention_2", "sdpa", _sdpa("FLASH_ATTENTION")),
)


# ---- correctness ----


def _expected(
    case: Case, values: dict[str, Tensor], tensors: list[Tensor], rows: Tensor, dout: Tensor, kv_head: int
) -> dict[str, Tensor]:
    """Output of the rows and all gradients of the heads that share a KV head, in float32.

    tensors  of one sequence: q (heads, length, head_dim), k and v (kv_heads, ...); dout (heads, rows, v_dim)
    """
    group = case.heads // case.kv_heads
    heads = slice(kv_head * group, kv_head * group + group)
    with torch.enable_grad():
        q, k, v = (
            x.detach().float().requires_grad_() for x in (tensors[0][heads], tensors[1][kv_head], tensors[2][kv_head])
        )
        scores = q[:, rows] @ k.T / math.sqrt(case.head_dim)
        if case.option == "softcap":
            scores = SOFTCAP * torch.tanh(scores / SOFTCAP)
        if case.option == "alibi_slopes":
            distance = (rows[:, None] - torch.arange(case.length, device=rows.device)).abs()
            scores = scores - values["alibi_slopes"][heads, None, None] * distance
        if "block_bias" in values:
            keys = torch.arange(case.length, device=rows.device)
            scores = scores + grid_of(values["block_bias"].detach())[heads][:, rows[:, None] // BLOCK, keys // BLOCK]
        scores = scores.masked_fill(~case.attends(rows), -math.inf)
        if case.option == "sinks":
            sinks = values["sinks"][heads, None, None].expand(-1, len(rows), 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out = weights @ v
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout[heads].float())
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def worst_errors(call: Call, case: Case, values: dict[str, Tensor], inputs: list[Tensor]) -> dict[str, float]:
    """Relative error of out, dq, dk and dv in the first sequence, over the first, the last and other rows."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.cat([torch.tensor([0, case.length - 1]), torch.randperm(case.length, generator=generator)])
    rows = torch.unique(rows[:ROWS]).to(inputs[0].device)
    out = call(*inputs)
    dout = torch.zeros_like(out)
    dout[0, :, rows] = torch.randn(out[0, :, rows].shape, generator=generator).to(out)
    gradients = torch.autograd.grad(out, inputs, dout)
    errors: dict[str, list[Tensor]] = {name: [] for name in ("out", "dq", "dk", "dv")}
    group = case.heads // case.kv_heads
    for kv_head in range(case.kv_heads):
        heads = slice(kv_head * group, kv_head * group + group)
        expected = _expected(case, values, [x[0] for x in inputs], rows, dout[0][:, rows], kv_head)
        found = {
            "out": out.detach()[0, heads][:, rows], "dq": gradients[0][0, heads], "dk": gradients[1][0, kv_head],
            "dv": gradients[2][0, kv_head],
        }  # fmt: skip
        for name, each in found.items():
            errors[name].append(relative_error(each, expected[name]))
    return {name: torch.stack(each).max().item() for name, each in errors.items()}


# ---- measuring ----


def inputs_of(case: Case, device: str) -> tuple[list[Tensor], Tensor]:
    """([q, k, v], dout), bf16 (batch, heads, length, head_dim), the same values for every peer."""
    generator = torch.Generator(device=device).manual_seed(0)

    def drawn(heads: int, dim: int) -> Tensor:
        size = (case.batch, case.length, heads, dim)
        return torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator).transpose(1, 2)

    tensors = [drawn(case.heads, case.head_dim), drawn(case.kv_heads, case.head_dim), drawn(case.kv_heads, case.v_dim)]
    if case.option == "softcap":
        # scores so large that the comparison notices a missing cap
        tensors[0] *= 6.0
    return [each.requires_grad_() for each in tensors], drawn(case.heads, case.v_dim)


def compare(case: Case, among: list[Peer], out: Any, device: str = "cuda") -> None:
    """Times every peer that can compute the case, in turns: a line for each direction, all of them at the end."""
    torch.compiler.reset()
    tensors, dout = inputs_of(case, device)
    values = values_of(case, device)
    ready: list[tuple[dict[str, Any], dict[str, Callable[[], Any]]]] = []

    def make_ready(peer: Peer, label: str) -> None:
        call = peer.prepare(case, device, values)
        if isinstance(call, str):
            print(f"{label}: {call}; not timed", flush=True)
            return
        setup_ms = measure.first_call_milliseconds(functools.partial(call, *tensors))
        errors = worst_errors(call, case, values, tensors)
        if not all(error <= TOLERANCE for error in errors.values()):
            print(f"{label}: WRONG, relative errors {errors}; not timed", flush=True)
            return
        backend, report = peer.backend, None
        if backend == "auto":
            assert isinstance(call, functools.partial)
            given = {name: value for name, value in call.keywords.items() if name != "deterministic"}
            q, k, v = tensors
            report = explain(q, k, v, **given)
            backend = report.backend
        line = {
            "bench": "shapes", "provider": peer.provider, "backend": backend, "pattern": case.name,
            "density": case.pairs / case.length**2, "n": case.length, "batch": case.batch, "heads": case.heads,
            "kv_heads": case.kv_heads, "head_dim": case.head_dim, "v_dim": case.v_dim, "dtype": "bf16",
            "setup_ms": setup_ms, **measure.environment(),
        }  # fmt: skip
        calls = measure.directions(call, tensors, dout)
        if case.documents is not None and report is not None and report.tile is not None:
            cu_seqlens, tile = case.cu_seqlens(device), min(report.tile)
            calls["plan"] = lambda: documents_of(case, cu_seqlens).plan(device, tile=tile)
        ready.append((line, calls))

    for peer in among:
        label = f"{peer.provider:22} {case.name:36}"
        measure.guarded(label, peer.provider == "blocksparse_flash", functools.partial(make_ready, peer, label))
    lines = []
    for direction in ("fwd", "bwd", "plan"):
        there = [(line, calls[direction]) for line, calls in ready if direction in calls]
        peaks = [measure.peak_bytes(call) for _, call in there]
        timings = measure.milliseconds_in_turns([call for _, call in there])
        for (line, call), peak, times in zip(there, peaks, timings, strict=True):
            tflops = None if direction == "plan" else case.flops(direction) / times["ms"] * 1e-9
            energy = None if direction == "plan" else measure.joules(call, times["ms"])
            found = {
                **line, "direction": direction, **times, "tflops": tflops, "peak_bytes": peak, "joules": energy,
            }  # fmt: skip
            lines.append(found)
    # not before, so that --resume finds whole cases only
    for line in lines:
        measure.append(out, line, KEYS)
    measure.release()


def main(arguments: list[str] | None = None) -> None:
    parser = measure.parser(__doc__, "shapes.jsonl")
    parser.add_argument("--cases", nargs="+", help="parts of the names of cases; default: all")
    parser.add_argument("--providers", nargs="+", help="names; default: all that are installed")
    measure.add_resume(parser)
    options = parser.parse_args(arguments)
    for part in options.cases or ():
        if not any(part in case.name for case in CASES):
            parser.error(f"--cases must be parts of {'; '.join(case.name for case in CASES)}, got {part}")
    measure.require_gpu()
    there = [peer for peer in PEERS if peer.package is None or is_installed(peer.package)]
    for name in options.providers or ():
        if name not in {peer.provider for peer in there}:
            raise SystemExit(
                f"--providers: {name} is not known or not installed; there are {[p.provider for p in there]}"
            )
    among = [peer for peer in there if options.providers is None or peer.provider in options.providers]
    matmul(Run(1, 2048, 128, options.out))
    for case in CASES:
        if options.cases is not None and not any(part in case.name for part in options.cases):
            continue
        if options.resume and measure.is_measured(options.out, {"bench": "shapes", "pattern": case.name}):
            continue
        compare(case, among, options.out)


if __name__ == "__main__":
    main()
