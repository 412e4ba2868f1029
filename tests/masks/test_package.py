"""blocksparse_flash.masks: the builders of `import masks`, also behind another module of that name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import blocksparse_flash.masks
import masks
from masks import deepspeed

ROOT = Path(__file__).resolve().parents[2]


def output_behind_another_masks(folder: Path, code: str) -> str:
    """Standard output of `code` in a fresh interpreter in which `import masks` finds a file of the user's."""
    (folder / "masks.py").write_text("MINE = True\n")
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_both_names_give_the_same_functions() -> None:
    assert blocksparse_flash.masks.__all__ == masks.__all__
    assert all(getattr(blocksparse_flash.masks, name) is getattr(masks, name) for name in masks.__all__)
    assert blocksparse_flash.masks.deepspeed is deepspeed
    assert not hasattr(blocksparse_flash.masks, "nothing")


def test_builders_are_found_behind_another_masks(tmp_path: Path) -> None:
    code = """
import masks
import blocksparse_flash.masks as ours
from blocksparse_flash.masks import deepspeed
assert masks.MINE and not hasattr(masks, "butterfly")
print(ours.build("butterfly | local(window=64)", 1024) == ours.butterfly(1024) | ours.local(1024, window=64))
print(deepspeed.DenseSparsityConfig(num_heads=1).layout(64).density)
"""
    assert output_behind_another_masks(tmp_path, code).split() == ["True", "1.0"]


def test_huggingface_builds_specifications_behind_another_masks(tmp_path: Path) -> None:
    code = """
from blocksparse_flash.layout_crops import FullLayout, built
print(built(FullLayout("causal", 256)).density)
"""
    assert output_behind_another_masks(tmp_path, code).split() == ["0.75"]
