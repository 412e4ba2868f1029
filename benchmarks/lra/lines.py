"""Keys of the JSON lines that `speed` and `test` write."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..run import measure
from .floors import Result

SPEED = Path("benchmarks/results/lra_speed.jsonl")
# file in the folder of a run
TEST = "test.jsonl"

# keys of `speed`. status: "ok", "out of memory" or another reason for missing times and memory, which are then None.
# task: None for attention alone. n: tokens of a document.
SPEED_KEYS = [
    *("bench", "task", "provider", "backend", "pattern", "density", "n", "documents", "batch", "heads", "head_dim"),
    *("dtype", "dropout_p", "direction", "status", "ms", "ms_p20", "ms_p80", "tflops", "peak_bytes", "setup_ms"),
    *("device", "torch", "triton", "commit"),
]
# keys of `test`. is_lra: comparable with published numbers, see scoring.belongs. steps: training steps of the weights
TEST_KEYS = [
    *("bench", "task", "is_lra", "source", "data", "mask", "n_layers", "embed_dim", "weights", "steps", "batch_size"),
    *("n", "accuracy", "standard_error", "floor", "floor_name", "balanced", "chance", "pair_accuracy"),
    *("device", "torch", "commit"),
]


def untimed(status: str) -> dict[str, Any]:
    """The keys of a line without times, with the reason."""
    return {"status": status, **dict.fromkeys(("ms", "ms_p20", "ms_p80", "peak_bytes", "setup_ms"))}


def append_test(folder: Path, result: Result, **facts: Any) -> None:
    """Appends the line of a test to the folder of its run. facts: the keys of TEST_KEYS that Result lacks."""
    known = {**asdict(result), "standard_error": result.standard_error}
    known |= {"torch": torch.__version__, "commit": measure.commit()}
    measure.append(folder / TEST, {"bench": "lra", **known, **facts}, TEST_KEYS)
