"""Public names and signatures, what an import loads, and rules that hold for every file of the repository."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import blocksparse_flash
import masks

ROOT = Path(__file__).resolve().parents[1]
CODE = ("blocksparse_flash", "masks", "benchmarks")


def python_files() -> dict[str, Path]:
    """Path inside the repository -> file, of all code that ships."""
    return {
        path.relative_to(ROOT).as_posix(): path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))
    }


# ---- imports ----


def modules_after(statement: str) -> set[str]:
    """Top-level packages loaded in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(said.stdout.split())


@pytest.mark.parametrize("package", ["blocksparse_flash", "blocksparse_flash.interop"])
def test_importing_the_package_loads_nothing_heavy(package: str) -> None:
    # what torch itself loads is not ours to say
    added = modules_after(f"import {package}") - modules_after("import torch, numpy, einops")
    assert "blocksparse_flash" in added
    assert not added & {"triton", "scipy", "matplotlib", "masks", "benchmarks", "networkx", "pandas"}


def test_peers_formats_are_loaded_when_asked_for() -> None:
    code = "import sys, blocksparse_flash; print([name for name in sys.modules if 'interop' in name or 'flex' in name])"
    before = "import sys, torch; print([name for name in sys.modules if 'interop' in name or 'flex' in name])"
    said = [
        subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for run in (code, before)
    ]
    assert said[0] == said[1]


# ---- names ----


def test_public_names() -> None:
    assert blocksparse_flash.__all__ == [
        "BlockLayout",
        "Explanation",
        "attention",
        "attention_with_lse",
        "explain",
        "merge",
    ]
    assert masks.__all__ == [
        "a_shape",
        "alibi_windows",
        "axial",
        "bigbird",
        "block_causal",
        "block_diagonal",
        "block_diffusion",
        "build",
        "butterfly",
        "causal",
        "dilated_window",
        "documents",
        "erdos_renyi",
        "expander",
        "fixed",
        "global_tokens",
        "hierarchical",
        "hilbert_order",
        "local",
        "longformer",
        "longnet",
        "lsh",
        "morton_order",
        "neighborhood",
        "pixelfly",
        "prefix_lm",
        "random",
        "shared_prefix",
        "sink_window",
        "sliding_tile",
        "small_world",
        "strided",
        "swin",
        "tile_order",
        "top_k",
        "top_p",
        "tree",
        "tri_shape",
        "vertical_slash",
    ]
    assert all(hasattr(module, name) for module in (blocksparse_flash, masks) for name in module.__all__)


def test_attention_has_its_exact_signature() -> None:
    expected = (
        "q, k, v, layout=None, *, causal=False, scale=None, kv_lengths=None, dropout_p=0.0, seed=None, "
        "deterministic=None, backend='auto', sinks=None, softcap=None, alibi_slopes=None, block_bias=None"
    )
    for function in (blocksparse_flash.attention, blocksparse_flash.attention_with_lse, blocksparse_flash.explain):
        signature = inspect.signature(function)
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        assert str(inspect.Signature(bare)) == f"({expected})"


def test_no_file_is_a_drawer() -> None:
    drawers = {"util", "utils", "common", "helper", "helpers", "config", "misc"}
    everything = [path for folder in (*CODE, "tests") for path in (ROOT / folder).rglob("*")]
    assert [path for path in everything if path.stem in drawers] == []


def test_no_environment_variables_are_read() -> None:
    reading = re.compile(r"\b(environ|getenv|putenv)\b")
    readers = [name for name, path in python_files().items() if reading.search(path.read_text(encoding="utf-8"))]
    assert readers == []


# ---- the repository ----


def tracked_text() -> dict[str, str]:
    """Path -> text of the files in the repository, pictures left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("needs a git checkout")
    paths = (ROOT / name for name in listed.stdout.splitlines())
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in paths
        if path.is_file() and path.suffix != ".png"
    }


def test_no_path_of_a_machine() -> None:
    machine = re.compile(r"(?<![\w.*}$)])/(home|root|work|Users|mnt|opt|tmp)/\w")
    assert machine.search(" /home/someone")
    assert [name for name, text in tracked_text().items() if machine.search(text)] == ["tests/test_repository.py"]


def test_nothing_is_left_for_later() -> None:
    words = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")))
    assert [name for name, text in tracked_text().items() if words.search(text)] == []


def test_rooms_at_the_top_are_fixed() -> None:
    folders = {name.split("/")[0] for name in tracked_text() if "/" in name}
    assert folders <= {*CODE, "tests", "docs", ".ci"}
