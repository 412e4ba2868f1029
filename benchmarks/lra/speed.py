"""Times of Long Range Arena training steps with each attention implementation.

A step is forward, loss, backward and AdamW, in bfloat16 autocast, of the model that FlashAttention used:
Nystromformer's configurations with documents of a power of two tokens, without padding. Outputs and gradients of each
implementation are compared with a float32 model with a score matrix before timing. Samples are random tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from blocksparse_flash import BlockLayout, explain

from ..run import measure
from ..run.correctness import relative_error
from .model import Architecture, Classifier, layout_of
from .peers import MATERIALISED, OURS, PROVIDERS, WITH_DROPOUT, attend_with, supported
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
# samples that are compared, and the largest relative error
COMPARED, TOLERANCE = 2, 0.05


def untimed(status: str) -> dict[str, Any]:
    """The keys of a line without times, with the reason."""
    return {"status": status, **dict.fromkeys(("ms", "ms_p20", "ms_p80", "peak_bytes", "setup_ms"))}


class Case(NamedTuple):
    """A padded task, its batch size, a model and settings of AdamW."""

    task: Task
    batch: int
    architecture: Architecture
    optimiser: dict[str, Any]

    @property
    def layout(self) -> BlockLayout | None:
        layout = layout_of(self.architecture, self.task.length)
        assert layout is None or isinstance(layout, BlockLayout)
        return layout


def case_of(name: str, *, mask: str | None, block_size: int = 128, length: int = 0, batch: int = 0) -> Case:
    """A task with Nystromformer's configuration.

    mask    as in Architecture
    length  tokens of a document; 0 is the power of two above the task's. Images are square
    batch   samples; 0 is the configuration's
    """
    settings = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    task = find(name)
    length = length or 1 << (task.length - 1).bit_length()
    side = math.isqrt(length)
    if task.grid is not None and side * side != length:
        raise ValueError(f"length must be a square for {name!r}, which is an image, got {length}")
    task = dataclasses.replace(task, length=length, grid=None if task.grid is None else (side, side))
    architecture = Architecture(**settings["model"]["architecture"], mask=mask, block_size=block_size)
    recipe = settings["model"]["recipe"]
    optimiser = {"lr": recipe["learning_rate"], **{name: recipe[name] for name in ("betas", "eps", "weight_decay")}}
    return Case(task, batch or settings["data"]["batch_size"], architecture, optimiser)


def model_of(case: Case, provider: str, device: torch.device) -> Classifier:
    """The model, the same weights for every provider."""
    torch.manual_seed(0)
    is_ours = provider == OURS
    architecture = case.architecture if is_ours else dataclasses.replace(case.architecture, mask=None)
    model = Classifier(case.task, architecture)
    model.guess.requires_grad_(False)
    if not is_ours:
        attend = attend_with(provider, case.layout, device)
        dropout_p = architecture.attention_dropout_p if provider in WITH_DROPOUT else 0.0

        # for inputs without padding
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


def train(model: Classifier, optimiser: torch.optim.Optimizer, tokens: Tensor, lengths: Tensor, labels: Tensor) -> None:
    """One step."""
    optimiser.zero_grad()
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        logits = model(tokens, lengths)
    F.cross_entropy(logits.float(), labels).backward()
    optimiser.step()


def measured(
    case: Case, provider: str, expected: Sequence[Tensor], device: torch.device, *, warmup: int, n_steps: int
) -> dict[str, Any]:
    """Status, times and memory of a provider."""
    tokens, lengths, labels = samples(case, device)
    model = model_of(case, provider, device)
    wrong = error(given(model, tokens[:COMPARED], lengths[:COMPARED], is_mixed=True), expected)
    if not wrong < TOLERANCE:
        return untimed(f"wrong, relative error {wrong:.3g}")
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(weights, **case.optimiser, fused=device.type == "cuda")
    step = functools.partial(train, model, optimiser, tokens, lengths, labels)
    setup_ms = measure.timed(step, device, 1)["ms"]
    for _ in range(warmup):
        step()
    return {"status": "ok", **measure.timed(step, device, n_steps), "setup_ms": setup_ms}


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
    """A line for each provider that supports the case."""
    tokens, lengths, _ = (each[:COMPARED] for each in samples(case, device))
    expected = given(model_of(case, MATERIALISED, device), tokens, lengths, is_mixed=False)
    layout, architecture, where = case.layout, case.architecture, measure.environment(device)
    for provider in supported(providers, layout, device):
        try:
            found = measured(case, provider, expected, device, warmup=warmup, n_steps=n_steps)
        except torch.OutOfMemoryError:
            found = untimed("out of memory")
        finally:
            measure.release()
        yield {
            "bench": "lra_speed", "task": case.task.name, "provider": provider,
            "backend": backend_of(case, provider, device), "pattern": architecture.mask or "dense",
            "density": 1.0 if layout is None else layout.density, "n": case.task.length,
            "documents": case.task.n_documents, "batch": case.batch, "heads": architecture.num_heads,
            "head_dim": architecture.embed_dim // architecture.num_heads, "dtype": "bf16",
            "dropout_p": architecture.attention_dropout_p if provider in WITH_DROPOUT else 0.0, "direction": "step",
            **found, "tflops": None, **where,
        }  # fmt: skip
