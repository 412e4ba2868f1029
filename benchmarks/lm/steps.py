"""Tokens per second of a training step, by arm and implementation: JSON lines and a table.

A step is forward, loss, backward, clipping and AdamW, in bfloat16 autocast on a GPU. The variants of a length take
turns in one process. Before timing, loss and gradients are compared with those of the arm's first implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ..report.markdown import joined, listing
from ..run import measure
from ..run.correctness import relative_error
from ..run.small import take_turns
from .model import MAX_NORM, LanguageModel, Settings, implementations_of, layout_of, optimizer_of

KEYS = [
    *("bench", "model", "provider", "pattern", "density", "n", "batch", "direction", "ms", "ms_p20", "ms_p80"),
    *("tokens_per_s", "peak_bytes", "setup_ms", "device", "torch", "triton", "commit"),
]
# of the gradient of a weight, relative to its largest value; bfloat16 rounds in every layer
TOLERANCE = 0.1
PROVIDERS = {"ours": "blocksparse_flash", "sdpa": "sdpa", "cudnn": "cudnn", "flex": "flex"}


def variants(base: Settings, arms: Sequence[str], implementations: Sequence[str]) -> list[Settings]:
    """Each arm with each implementation that supports it."""
    return [
        replace(base, arm=arm, attention=attention)
        for arm in arms
        for attention in implementations
        if attention in implementations_of(arm)
    ]


def _step(model: LanguageModel, optimizer: torch.optim.Optimizer, window: Tensor) -> Callable[[], Tensor]:
    """A training step, which leaves the gradients and returns the loss."""

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(window.device.type, dtype=torch.bfloat16, enabled=window.device.type == "cuda"):
            loss = model(window).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return loss.detach()

    return step


def _is_right(name: str, found: list[Tensor], expected: list[Tensor]) -> bool:
    errors = [relative_error(*pair).item() for pair in zip(found, expected, strict=True)]
    if max(errors) <= TOLERANCE and all(error == error for error in errors):
        return True
    print(f"{name}: WRONG, loss and gradient differ from the first by {errors}; not timed", flush=True)
    return False


def lines(size: str, among: Sequence[Settings], device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """A line for each variant that fits into memory and is correct. among: variants of one length and batch size."""
    # functions compiled for other lengths count toward PyTorch's limit
    torch.compiler.reset()
    ready: list[tuple[Settings, Callable[[], Tensor], float, int | None]] = []
    expected: dict[str, list[Tensor]] = {}
    shape = among[0].batch_size, among[0].length + 1
    window = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)

    def add(settings: Settings) -> None:
        model = LanguageModel(settings).to(device)
        if device.type == "cuda":
            model.compiled()
        step = _step(model, optimizer_of(model, settings)[0], window)
        losses: list[Tensor] = []
        setup_ms = measure.first_call_milliseconds(lambda: losses.append(step()))
        # this gradient depends on the values and the mask; clipping scales those of all variants to the same norm
        gradient = model.blocks[0].get_parameter("attention.out.weight").grad
        assert gradient is not None
        found = [losses[0].float().cpu(), gradient.float().cpu()]
        if _is_right(settings.name, found, expected.setdefault(settings.arm, found)):
            # weights, gradients and the state of AdamW are in memory already
            peak = measure.peak_bytes(step) if device.type == "cuda" else None
            ready.append((settings, step, setup_ms, peak))

    for settings in among:
        measure.guarded(settings.name, settings.attention == "ours", lambda settings=settings: add(settings))  # type: ignore[misc]
    times = take_turns([step for _, step, *_ in ready], measure.first_call_milliseconds, rounds)
    for (settings, _, setup_ms, peak), ms in zip(ready, times, strict=True):
        known = settings.arm not in ("nsa", "moba", "dense-short")
        layouts = [layout_of(settings, layer) for layer in range(settings.n_layers if known else 0)]
        densities = [0.5 if layout is None else layout.density for layout in layouts]
        yield {
            "bench": "lm_steps", "model": size, "provider": PROVIDERS[settings.attention], "pattern": settings.arm,
            "density": sum(densities) / len(densities) if known else None,
            "n": settings.length, "batch": settings.batch_size, "direction": "step", **ms,
            "tokens_per_s": 1000 * settings.batch_size * settings.length / ms["ms"], "peak_bytes": peak,
            "setup_ms": setup_ms, **measure.environment(device),
        }  # fmt: skip


def measured(
    size: str, base: Settings, *, arms: Sequence[str], implementations: Sequence[str], lengths: Sequence[int],
    rounds: int, out: Path,
) -> str:  # fmt: skip
    """Appends the lines to `out`; returns their table."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for length in lengths:
        among = variants(replace(base, length=length), arms, implementations)
        print(f"{length:,} tokens: {len(among)} variants, {rounds} rounds, after a compilation of each", flush=True)
        found += measure.appended(out, lines(size, among, device, rounds), KEYS)
        measure.release()
    return section(pd.DataFrame(found))


def section(lines: pd.DataFrame) -> str:
    """Tokens per second of each variant, and their ratio to the fastest dense one; "" without lines."""
    if lines.empty:
        return ""
    shown = []
    for _, group in lines.groupby(["model", "n", "device", "commit"], sort=False):
        dense = group.loc[group["pattern"] == "dense", "tokens_per_s"].max()
        for line in group.to_dict("records"):
            peak, ratio = line["peak_bytes"], line["tokens_per_s"] / dense
            line["memory"] = "-" if pd.isna(peak) else f"{peak / 1e9:.1f}"
            shown.append({**line, "ratio": "-" if pd.isna(dense) else f"{ratio:.2f}"})
    columns = {
        "model": "{model}", "tokens": "{n:,}", "arm": "{pattern}", "attention": "{provider}", "ms": "{ms:.1f}",
        "tokens/s": "{tokens_per_s:,.0f}", "speed-up over the fastest dense": "{ratio}", "peak GB": "{memory}",
        "measured on": "{device}, {commit}",
    }  # fmt: skip
    return joined(
        "Tokens per second of a training step (`python -m benchmarks.lm steps`): medians of wall-clock times, "
        f"interleaved in one process, torch {' and '.join(sorted({*lines['torch']}))}. Peak memory is in addition to "
        "weights, gradients and the state of AdamW.",
        listing(pd.DataFrame(shown), columns),
    )
