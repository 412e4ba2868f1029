"""Keeps the weights of trained runs beside their results, where a test or a later stage can begin with them."""

from __future__ import annotations

from pathlib import Path

import torch

from ..run import saved
from .recipe import RESULTS, stages
from .scoring import digest
from .tasks import check_seed

# keys of a checkpoint that a test and the start of another stage read
KEYS = ("epoch", "global_step", "pytorch-lightning_version", "state_dict", "task", "settings", "architecture", "record")


def keep(name: str, *, seed: int = 0, results: Path = RESULTS) -> None:
    """Keep the weights of a trained run beside its results, in a file an eighth as large as its checkpoint.

    Matrices are rounded to bfloat16, the precision in which training multiplies them. The state of the optimizer is
    left out: a test or another stage can begin with the file, but no training can continue from it. The kept weights
    of another checkpoint are not replaced.

    Args:
        name: a configuration of configs/ours, or ablation/NAME
        seed: seed of the run
        results: folder of the results
    """
    check_seed("seed", seed)
    stage = stages(name, seed)[-1]
    steps = stage.trained_steps()
    if steps < stage.steps:
        seeds = f' --seeds "[{seed}]"' if seed else ""
        raise ValueError(
            f"name must be that of a run with all of its {stage.steps:,} steps, got {name!r} with {steps:,} in "
            f"{stage.checkpoint}: train it with `recipe {name}{seeds}`"
        )
    whole = saved.load(stage.checkpoint, KEYS)
    found = {key: whole[key] for key in KEYS}
    found["state_dict"] = {
        each: weight.bfloat16() if weight.is_floating_point() and weight.dim() > 1 else weight
        for each, weight in whole["state_dict"].items()
    }
    # of the checkpoint that a line of test.jsonl names
    found["checkpoint"] = digest(stage.checkpoint)
    path = stage.kept(results)
    if path.exists() and saved.load(path, ("checkpoint",))["checkpoint"] != found["checkpoint"]:
        raise ValueError(
            f"name must be that of a run whose weights are not kept yet, got {name!r}: {path} has those of another "
            "checkpoint; remove it, or choose another folder of results"
        )
    with saved.replacing(path) as unfinished:
        torch.save(found, unfinished)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
