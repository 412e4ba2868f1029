"""Figures of the FlashAttention paper and the best published accuracies, from published.yaml, which names sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_PAPER: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))

DEVICE = "A100"
# of the runtime benchmark
BATCH, HEADS, HEAD_DIM = _PAPER["batch"], _PAPER["heads"], _PAPER["head_dim"]
LENGTHS: list[int] = _PAPER["lengths"]
# direction -> implementation -> milliseconds at the first of LENGTHS; implementation -> megabytes
RUNTIME_MS: dict[str, dict[str, list[float]]] = _PAPER["runtime_ms"]
MEMORY_MB: dict[str, list[float]] = _PAPER["memory_mb"]
SPEEDUP: dict[str, float] = _PAPER["speedup"]
# task -> (samples, documents, tokens) of a training step
STEPS: dict[str, tuple[int, int, int]] = {task: tuple(sizes) for task, sizes in _PAPER["steps"].items()}
# model -> task -> per cent
ACCURACY: dict[str, dict[str, float]] = _PAPER["accuracy"]
# model -> {"paper": reference, "accuracy": as above}
BEST: dict[str, dict[str, Any]] = _PAPER["best"]
# model -> speedup, n and over
TRAINING: dict[str, dict[str, Any]] = _PAPER["training"]
