"""Times of Long Range Arena training steps, and of attention alone over length, with each attention implementation.

A step is forward, loss, backward and AdamW, in bfloat16 autocast, of the model that FlashAttention used:
Nystromformer's configurations with documents of a power of two tokens, without padding. Outputs and gradients of each
implementation are compared with a float32 model with a score matrix before timing. Samples are random tokens.
Each is timed with attention dropout and without. FlexAttention has none; its scores are dropped before the softmax.
On a GPU, steps are timed again as CUDA graphs ("captured step"): these models are so small that otherwise the host,
which launches their kernels, often takes longer than the GPU.

Attention alone has the sizes of FlashAttention's runtime benchmark: batch 16, 8 heads, head_dim 64, 128 to 65,536
tokens, dense, and block-sparse with min(length / 8, 256) keys per query, as for the sparse methods there. Blocks are
half as wide: a query attends to its own block and to one half the sequence away (the longest stride of a butterfly).
With blocks of 16 tokens there is only its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from blocksparse_flash import BlockLayout, explain

from ..run import measure
from ..run.correctness import mask_of, relative_error, worst_errors
from .model import Architecture, Classifier, layout_of
from .peers import MATERIALIZED, OURS, PROVIDERS, Attend, attend_with, supported
from .published import BATCH, HEAD_DIM, HEADS
from .tasks import Task, find

CONFIGS = Path(__file__).parent / "configs" / "nystromformer"
RESULTS = Path("benchmarks/results/lra_speed.jsonl")
# keys of `speed`. status: "ok", "out of memory" or another reason for missing times and memory, which are then None.
# task: None for attention alone. n: tokens of a document.
KEYS = [
    *("bench", "task", "provider", "backend", "pattern", "density", "n", "documents", "batch", "heads", "head_dim"),
    *("dtype", "dropout_p", "direction", "status", "ms", "ms_p20", "ms_p80", "tflops", "peak_bytes", "setup_ms"),
    *("device", "torch", "triton", "commit"),
]
# of training steps: launched by the host, and as CUDA graphs
DIRECTIONS = ("step", "captured step")
# samples that are compared, and the largest relative error
COMPARED, TOLERANCE = 2, 0.05
# of attention alone: the error of a bfloat16 probability matrix is 0.015 (2048 tokens), ours 0.003
TOLERANCE_ALONE = 0.04
# two products forward, five backward
FACTORS = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}


def untimed(status: str) -> dict[str, Any]:
    """The keys of a line without times, with the reason."""
    return {"status": status, **dict.fromkeys(("ms", "ms_p20", "ms_p80", "peak_bytes", "setup_ms"))}


class Case(NamedTuple):
    """A padded task, its batch size, a model and settings of AdamW."""

    task: Task
    batch: int
    architecture: Architecture
    optimizer: dict[str, Any]

    @property
    def layout(self) -> BlockLayout | None:
        layout = layout_of(self.architecture, self.task.length)
        assert layout is None or isinstance(layout, BlockLayout)
        return layout


def case_of(
    name: str, *, mask: str | None, block_size: int = 128, length: int = 0, batch: int = 0, has_dropout: bool = True
) -> Case:
    """A task with Nystromformer's configuration.

    mask    as in Architecture
    length  tokens of a document; 0 is the power of two above the task's. Images are square
    batch   samples; 0 is the configuration's
    has_dropout  of attention, with the configuration's probability; other layers keep theirs
    """
    settings = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    task = find(name)
    length = length or 1 << (task.length - 1).bit_length()
    side = math.isqrt(length)
    if task.grid is not None and side * side != length:
        raise ValueError(f"length must be a square for {name!r}, which is an image, got {length}")
    task = dataclasses.replace(task, length=length, grid=None if task.grid is None else (side, side))
    architecture = Architecture(**settings["model"]["architecture"], mask=mask, block_size=block_size)
    if not has_dropout:
        architecture = dataclasses.replace(architecture, attention_dropout_p=0.0)
    recipe = settings["model"]["recipe"]
    optimizer = {"lr": recipe["learning_rate"], **{name: recipe[name] for name in ("betas", "eps", "weight_decay")}}
    return Case(task, batch or settings["data"]["batch_size"], architecture, optimizer)


def model_of(case: Case, provider: str, device: torch.device) -> Classifier:
    """The model, the same weights for every provider."""
    torch.manual_seed(0)
    model = Classifier(case.task, dataclasses.replace(case.architecture, mask=None))
    model.guess.requires_grad_(False)
    attend = attend_with(provider, case.layout, device)
    dropout_p = case.architecture.attention_dropout_p

    # for inputs without padding: no provider gets lengths
    def swapped(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        return attend(q, k, v, dropout_p=dropout_p if model.training else 0.0)

    for block in model.encoder.blocks:
        block.attention.attend = swapped  # type: ignore[union-attr]
    return model.to(device)


def samples(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens (batch, documents, length), lengths (batch, documents) and labels (batch,)."""
    generator = torch.Generator().manual_seed(1)
    shape = (case.batch, case.task.n_documents, case.task.length)
    tokens = torch.randint(case.task.n_tokens, shape, generator=generator).short()
    labels = torch.randint(case.task.n_classes, shape[:1], generator=generator)
    lengths = torch.full(shape[:2], case.task.length, dtype=torch.int32)
    return tokens.to(device), lengths.to(device), labels.to(device)


def given(model: Classifier, tokens: Tensor, lengths: Tensor, *, is_mixed: bool) -> tuple[Tensor, Tensor]:
    """Output of the encoder, (samples, length, embed_dim), and the flat gradient of its weights, without dropout."""
    model.eval()
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=is_mixed):
        out = model.encode(tokens.flatten(0, 1), lengths.flatten()).float()
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.device)
    gradients = torch.autograd.grad((out * probe).sum(), list(model.encoder.parameters()))
    model.train()
    return out.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error; NaN if there is one."""
    return torch.stack([*map(relative_error, found, expected)]).max().item()


def train(model: Classifier, optimizer: torch.optim.Optimizer, tokens: Tensor, lengths: Tensor, labels: Tensor) -> None:
    """One step."""
    optimizer.zero_grad()
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        logits = model(tokens, lengths)
    F.cross_entropy(logits.float(), labels).backward()
    optimizer.step()


def prepared(
    case: Case, provider: str, expected: Sequence[Tensor], device: torch.device, *, warmup: int
) -> tuple[Callable[[], None] | None, dict[str, Any]]:
    """A provider's step, warmed up, or None if its results are wrong; its status, set-up time and memory."""
    # of the providers that are prepared already
    others = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    tokens, lengths, labels = samples(case, device)
    model = model_of(case, provider, device)
    wrong = error(given(model, tokens[:COMPARED], lengths[:COMPARED], is_mixed=True), expected)
    if not wrong < TOLERANCE:
        return None, untimed(f"wrong, relative error {wrong:.3g}")
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    is_cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(weights, **case.optimizer, fused=is_cuda, capturable=is_cuda)
    step = functools.partial(train, model, optimizer, tokens, lengths, labels)
    setup_ms = measure.timed(step, device, 1)["ms"]
    peak = measure.timed(step, device, warmup)["peak_bytes"]
    return step, {"status": "ok", "peak_bytes": None if peak is None else peak - others, "setup_ms": setup_ms}


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """A call that replays a warm step as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    # the graph reads the tensors of the step, which it does not keep
    return functools.partial(_replay, graph, step)


def _replay(graph: torch.cuda.CUDAGraph, _step: Callable[[], None]) -> None:
    graph.replay()


def backend_of(case: Case, provider: str, device: torch.device) -> str | None:
    """The backend that a step of ours uses, None for others."""
    if provider != OURS:
        return None
    heads, head_dim = case.architecture.num_heads, case.architecture.embed_dim // case.architecture.num_heads
    q = torch.zeros(1, heads, case.task.length, head_dim, dtype=torch.bfloat16, device=device)
    layout, dropout_p = case.layout, case.architecture.attention_dropout_p
    return explain(q, q, q, None if layout is None else layout.to(device), dropout_p=dropout_p).backend


def run(
    case: Case, device: torch.device, *, providers: Sequence[str] = PROVIDERS, warmup: int = 5, n_steps: int = 20
) -> Iterator[dict[str, Any]]:
    """A line for each provider that supports the case, and direction; they are timed in turns."""
    tokens, lengths, _ = (each[:COMPARED] for each in samples(case, device))
    expected = given(model_of(case, MATERIALIZED, device), tokens, lengths, is_mixed=False)
    layout, architecture, where = case.layout, case.architecture, measure.environment(device)
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}
    for provider in supported(providers, layout, device):
        try:
            step, found[provider] = prepared(case, provider, expected, device, warmup=warmup)
            if step is not None:
                steps[provider] = step
        except torch.OutOfMemoryError:
            found[provider] = untimed("out of memory")
        finally:
            measure.release()
    for direction in DIRECTIONS if device.type == "cuda" else DIRECTIONS[:1]:
        if direction != DIRECTIONS[0]:
            # measured of the launched steps
            found = {provider: {**facts, "peak_bytes": None, "setup_ms": None} for provider, facts in found.items()}
            for provider in [*steps]:
                try:
                    steps[provider] = captured(steps[provider])
                except torch.OutOfMemoryError:
                    del steps[provider]
                    found[provider] = untimed("out of memory")
        times = measure.wall_milliseconds_in_turns([*steps.values()], runs=n_steps)
        timed = dict(zip(steps, times, strict=True))
        for provider, facts in found.items():
            yield {
                "bench": "lra_speed", "task": case.task.name, "provider": provider,
                "backend": backend_of(case, provider, device), "pattern": architecture.mask or "dense",
                "density": 1.0 if layout is None else layout.density, "n": case.task.length,
                "documents": case.task.n_documents, "batch": case.batch, "heads": architecture.num_heads,
                "head_dim": architecture.embed_dim // architecture.num_heads, "dtype": "bf16",
                "dropout_p": architecture.attention_dropout_p, "direction": direction,
                **facts, **timed.get(provider, {}), "tflops": None, **where,
            }  # fmt: skip


# ---- attention alone ----


class Shape(NamedTuple):
    """Shape of q, k and v."""

    length: int
    batch: int = BATCH
    heads: int = HEADS
    head_dim: int = HEAD_DIM


def check_length(length: int) -> None:
    if length < 128 or length & (length - 1):
        raise ValueError(f"lengths must be powers of two, at least 128, got {length}")


def sparse_layout(length: int) -> BlockLayout:
    """min(length / 8, 256) keys for every query. length: a power of two, at least 128."""
    check_length(length)
    keys = min(length // 8, 256)
    side = max(16, keys // 2)
    rows = np.arange(length // side)
    cols = rows if keys == side else np.concatenate([rows, rows ^ (len(rows) // 2)])
    return BlockLayout.from_blocks(np.resize(rows, len(cols)), cols, length, length, block_size=side)


def _calls(attend: Attend, inputs: Sequence[Tensor]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The calls of each direction, lazily, so that only one result is alive at a time."""
    dout = torch.randn_like(inputs[0])
    yield "fwd+bwd", lambda: torch.autograd.grad(attend(*inputs), inputs, dout)
    yield "fwd", lambda: attend(*inputs)
    result = attend(*inputs)
    yield "bwd", lambda: torch.autograd.grad(result, inputs, dout, retain_graph=True)


def _timed(call: Callable[[], Any], device: torch.device, n_calls: int) -> dict[str, Any]:
    """Times of warm calls; peak_bytes includes q, k and v, as in the published table."""
    if device.type != "cuda":
        return {"status": "ok", **measure.timed(call, device, n_calls)}
    once = measure.timed(call, device, 1)
    return {"status": "ok", **measure.milliseconds(call), "peak_bytes": once["peak_bytes"]}


def measured_alone(
    shape: Shape, provider: str, layout: BlockLayout | None, backend: str, device: torch.device, n_calls: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(direction, line) of a provider; directions that ran out of memory come last."""
    left, status = list(FACTORS), "out of memory"
    try:
        generator = torch.Generator(device).manual_seed(0)
        size = (3, shape.batch, shape.heads, shape.length, shape.head_dim)
        drawn = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        inputs = [tensor.requires_grad_() for tensor in drawn.unbind()]
        attend = attend_with(provider, layout, device, backend=backend)
        setup_ms = measure.timed(lambda: attend(*inputs), device, 1)["ms"]
        error = np.max([*worst_errors(attend, inputs, mask_of(layout)).values()])
        status = status if error < TOLERANCE_ALONE else f"wrong, relative error {error:.3g}"
        measure.release()
        for direction, call in _calls(attend, inputs) if error < TOLERANCE_ALONE else ():
            figures = _timed(call, device, n_calls)
            left.remove(direction)
            yield direction, {**figures, "setup_ms": setup_ms}
    except torch.OutOfMemoryError:
        # reported below, after its tensors are freed
        pass
    yield from ((direction, untimed(status)) for direction in left)


def backends(provider: str, device: torch.device) -> list[str]:
    """Our backends: the choice of "auto" for short calls and, on Hopper, `hopper`."""
    if provider != OURS:
        return ["auto"]
    q = torch.zeros(1, 1, 128, HEAD_DIM, dtype=torch.bfloat16, device=device)
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return list(dict.fromkeys([explain(q, q, q).backend, *(["hopper"] if is_hopper else [])]))


def run_alone(
    shape: Shape, device: torch.device, *, providers: Sequence[str] = PROVIDERS, n_calls: int = 20
) -> Iterator[dict[str, Any]]:
    """A line for each provider, backend, pattern and direction."""
    where = measure.environment(device)
    for pattern, layout in (("dense", None), ("butterfly", sparse_layout(shape.length))):
        density = 1.0 if layout is None else layout.density
        flops = 4 * shape.batch * shape.heads * shape.length**2 * density * shape.head_dim
        for provider in supported(providers, layout, device):
            for backend in backends(provider, device):
                for direction, found in measured_alone(shape, provider, layout, backend, device, n_calls):
                    ms = found["ms"]
                    yield {
                        "bench": "lra_runtime", "task": None, "provider": provider,
                        "backend": backend if provider == OURS else None, "pattern": pattern, "density": density,
                        "n": shape.length, "documents": 1, "batch": shape.batch, "heads": shape.heads,
                        "head_dim": shape.head_dim, "dtype": "bf16", "dropout_p": 0.0, "direction": direction, **found,
                        "tflops": None if ms is None else FACTORS[direction] * flops / ms * 1e-9,
                        **where,
                    }  # fmt: skip
                measure.release()
