"""Does every kernel compile for every architecture, without a GPU, into something fast? (compile_kernels.py)

Each pair of a Triton and an architecture is a process of its own: Triton is read once, and this process interprets kernels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ARCHS = (80, 86, 90, 100)
ROOT = Path(__file__).resolve().parents[1]
# the Triton before the pinned one, installed by `make test` beside the environment's packages
BEFORE = "3.6.0"
FOLDER = Path(sys.prefix) / f"triton-{BEFORE}"

Record = dict[str, Any]


def compile_all(arch: int, before: bool, cache: Path) -> list[Record]:
    """What tests/compile_kernels.py prints."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(cache)
    env["PYTHONPATH"] = str(FOLDER) if before else ""
    said = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels", str(arch)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    return [json.loads(line) for line in said.stdout.splitlines()]


def faults(record: Record) -> list[str]:
    """What silently costs speed, or cannot launch."""
    call = record["call"]
    is_half = call["dtype"] in ("float16", "bfloat16")
    said = []
    if record["spills"] and is_half and call["head_dim"] in (64, 128):
        said.append(f"spills {record['spills']} bytes")
    if record["shared"] > record["shared_limit"]:
        said.append(f"takes {record['shared']} bytes of shared memory, {record['shared_limit']} are there")
    if record["registers"] * 32 * record["warps"] > 65536:
        said.append(f"takes {record['registers']} registers in {record['warps']} warps, more than 65536 in all")
    if record["tensor_memory"] > 512:
        said.append(f"takes {record['tensor_memory']} columns of tensor memory, 512 are there")
    if record["arch"] == 90 and is_half and record["products"]:
        if not record["wgmma"]:
            said.append("has products without wgmma")
        # head_dim 256, lengths and dropout are right but not tuned: ptxas gives up some of their overlap
        is_tuned = call["head_dim"] <= 128 and not call.get("limited") and not call.get("dropout_p")
        if record["serialised"] and is_tuned:
            said.append(f"serialises wgmma: {', '.join(record['serialised'])}")
        # healthy is a wait for at least 2 products
        if record["wgmma_waits"] * 2 > record["wgmma"] and call["head_dim"] >= 64:
            said.append(f"waits {record['wgmma_waits']} times for {record['wgmma']} wgmma")
    return [f"{record['kernel']} {call}: {sentence}" for sentence in said]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("before", [False, True], ids=["triton", f"triton-{BEFORE}"])
def test_kernels_compile_well(arch: int, before: bool, tmp_path: Path) -> None:
    if before and not FOLDER.is_dir():
        pytest.skip(f"needs Triton {BEFORE} in {FOLDER.name} of the environment, where `make test` installs it")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    records = compile_all(arch, before, tmp_path)
    assert sum(record["products"] > 0 for record in records) >= 3
    assert {record["arch"] for record in records} == {arch}
    assert not before or {record["triton"] for record in records} == {BEFORE}
    found = "\n".join(fault for record in records for fault in faults(record))
    assert not found, f"\n{found}"


def test_make_installs_the_triton_before() -> None:
    assert f"\nTRITON_BEFORE = {BEFORE}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


GOOD = {
    "kernel": "forward_kernel",
    "arch": 90,
    "registers": 255,
    "spills": 0,
    "shared": 98336,
    "shared_limit": 232448,
    "products": 2,
    "tensor_memory": 0,
    "warps": 8,
    "wgmma": 44,
    "wgmma_waits": 4,
    "serialised": [],
    "call": {"head_dim": 128, "dtype": "bfloat16"},
}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"spills": 4}, "spills"),
        ({"shared": 232449}, "shared memory"),
        ({"registers": 255, "warps": 16}, "registers"),
        ({"tensor_memory": 1024}, "tensor memory"),
        ({"wgmma": 0, "wgmma_waits": 0}, "without wgmma"),
        ({"serialised": ["C7510"]}, "serialises"),
        ({"wgmma_waits": 23}, "waits"),
    ],
)
def test_each_fault_is_seen(change: dict[str, Any], word: str) -> None:
    (fault,) = faults({**GOOD, **change})
    assert word in fault


def test_what_is_no_fault() -> None:
    """Nothing wrong with GOOD; spills of float32 and of other head dimensions are allowed, they are not fast paths."""
    assert faults(GOOD) == []
    assert faults({**GOOD, "spills": 4, "call": {"head_dim": 256, "dtype": "bfloat16"}}) == []
    assert (
        faults({**GOOD, "spills": 4, "wgmma": 0, "call": {"head_dim": 64, "dtype": "float32"}, "wgmma_waits": 0}) == []
    )
