"""Every kernel compiles for every architecture, without spills and serialized wgmma; needs no GPU (compile_kernels.py).

One test per kernel, target and Triton version, or a few. Of the tuned configurations for sm90 with the installed
Triton, `make test` compiles a share for each kernel and `make test-thorough` the others. `make test-compilers` compiles
all other targets. Each Triton version compiles in a process of its own, because the test process runs kernels in the
interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.compiled_calls import each_option_once

ROOT = Path(__file__).resolve().parents[2]
# Triton versions besides the installed one, installed by `make test-compilers`: an older one, and newer ones, in which
# Gluon has other names
BEFORE, *AFTER = OTHERS = ("3.6.0", "3.8.0", "3.9.0")
# kernels compiled in their tuned configurations, and kernels compiled with every option
TABLES = (
    "forward_kernel",
    "keys_kernel",
    "queries_kernel",
    "split_kv_kernel",
    "paged_kernel",
    "preprocess_kernel",
    "combine_kernel",
    "combine_paged_kernel",
)
SELECTION = ("mark_scores_kernel", "mark_indices_kernel", "mark_rows_kernel", "list_rows_kernel")
ROWS = ("move_kernel", "add_kernel", "merge_kernel", "gather_kernel")
PACKED = ("runs_kernel", "list_packed_kernel", "records_kernel")
OPTIONS = (
    *TABLES,
    *ROWS,
    *SELECTION,
    *PACKED,
    "count_kernel",
    "list_kernel",
    "group_weights_kernel",
    "index_scores_kernel",
    "block_choice_kernel",
    "pair_bias_kernel",
    "look_up_kernel",
    "page_scores_kernel",
    "rotary_kernel",
    "gated_sum_kernel",
)
FINE = ("fine_dkdv_kernel", "fine_dq_kernel", "fine_forward_kernel")
ALONE = ("wide_dkdv_kernel", "hopper_dq_kernel")
SELECTED = ("selected_backward_kernel", "selected_forward_kernel")
HOPPER = ("hopper_backward_kernel", "hopper_forward_kernel", *ALONE, *FINE, *SELECTED, "postprocess_kernel")
# and the portable kernels that backend `hopper` uses, in one launch each
HOPPER_TABLES = (
    *HOPPER,
    "preprocess_kernel",
    "combine_rows_kernel",
    "sum_splits_kernel",
    "combine_out_kernel",
    "reduce_dq_kernel",
    "reduce_dkdv_kernel",
    "ranges_kernel",
    "mark_entries_kernel",
    "list_entries_kernel",
    "count_items_kernel",
    "write_items_kernel",
)
# (target, Triton version or None for the installed one): kernels.
# Registers, spills and shared memory of a tuned configuration depend on Triton and on the architecture, so each is
# compiled with the installed and the older Triton for every architecture. Other options and head dimensions only have
# to compile: with the installed Triton for all architectures but sm86, with the older one for sm90. The `hopper`
# kernels are compiled with the older Triton once per configuration, scale and pair of options, and with the newer ones
# in their tuned configurations
TARGETS: dict[tuple[str, str | None], tuple[str, ...]] = {
    ("hopper-few", None): HOPPER_TABLES,
    ("hopper-rest", None): HOPPER,
    ("hopper-once", BEFORE): HOPPER_TABLES,
    **{("hopper-few", version): HOPPER_TABLES for version in AFTER},
    ("90-few", None): (*TABLES, "joint_kernel"),
    ("90-rest", None): (*OPTIONS, "joint_kernel"),
    ("90", BEFORE): (*OPTIONS, "joint_kernel"),
    ("80", None): OPTIONS,
    ("86", None): TABLES,
    ("100", None): OPTIONS,
    **{(f"{arch}-few", BEFORE): TABLES for arch in (80, 86, 100)},
}
# what `make test` and `make test-thorough` compile
INSTALLED = (("hopper-few", None), ("90-few", None))
# number of tests per kernel, for kernels whose launches take minutes to compile
SHARDS = {
    "hopper_backward_kernel": 4, "hopper_forward_kernel": 4, **dict.fromkeys(ALONE + FINE + SELECTED, 2),
    "forward_kernel": 4,
    "split_kv_kernel": 3, "paged_kernel": 2, "joint_kernel": 3, "keys_kernel": 2, "queries_kernel": 2,
}  # fmt: skip
# more for targets where `make test` compiles only the first share
SHARDS_OF_INSTALLED = {
    "hopper_backward_kernel": 12, "hopper_forward_kernel": 12, **dict.fromkeys(FINE, 10),
    **dict.fromkeys(ALONE, 2), **dict.fromkeys(SELECTED, 6),
    "forward_kernel": 12, "split_kv_kernel": 10, "paged_kernel": 8, "joint_kernel": 6, "keys_kernel": 8,
    "queries_kernel": 8,
}  # fmt: skip


def shards_of(target: str, kernel: str) -> int:
    """Number of tests of a kernel. The calls of `hopper` launch the portable kernels only once."""
    if target.startswith("hopper") and kernel not in HOPPER:
        return 1
    return (SHARDS_OF_INSTALLED if target.endswith("-few") and (target, None) in INSTALLED else SHARDS).get(kernel, 1)


# kernels with matrix products
PRODUCTS = {
    *TABLES[:5],
    "joint_kernel",
    "group_weights_kernel",
    "index_scores_kernel",
    "pair_bias_kernel",
    *HOPPER[:2],
    *ALONE,
    *FINE,
    *SELECTED,
}

# bytes that a `hopper` kernel spills at (head_dim, with kv_lengths, with splits): exactly the maximum over Triton 3.6
# to 3.9, so that one more spill fails
KNOWN_SPILLS = {
    # at most 220 with Triton 3.6 to 3.8; the rest with 3.9, which has not run on a GPU
    ("hopper_backward_kernel", 64, False, False): 564,
    ("hopper_backward_kernel", 64, True, False): 212,
    ("hopper_backward_kernel", 64, False, True): 560,
    ("hopper_backward_kernel", 64, True, True): 116,
    ("hopper_backward_kernel", 128, False, False): 340,
    ("hopper_backward_kernel", 128, True, False): 240,
    ("hopper_backward_kernel", 128, False, True): 640,
    ("hopper_backward_kernel", 128, True, True): 528,
    # up to three words, stored once per program and loaded once per tile row
    ("hopper_forward_kernel", 128, True, False): 44,
    ("hopper_forward_kernel", 128, True, True): 44,
    # with Triton 3.6
    ("wide_dkdv_kernel", 256, False, True): 8,
    # bounded registers, so that several programs share an SM; 24 to 92 without kv_lengths at head_dim 64 and 128 cost
    # less than one program fewer
    ("fine_dkdv_kernel", 64, False, False): 92,
    ("fine_dkdv_kernel", 64, True, False): 68,
    ("fine_dkdv_kernel", 128, False, False): 48,
    ("fine_forward_kernel", 64, False, False): 32,
    ("fine_forward_kernel", 64, False, True): 24,
    ("fine_forward_kernel", 64, True, False): 140,
    # with Triton 3.8
    ("fine_forward_kernel", 128, True, False): 312,
    # the same kernels for gathered plans, with up to 16 copies a step
    ("gathered fine_dkdv_kernel", 64, False, False): 344,
    ("gathered fine_dkdv_kernel", 64, False, True): 276,
    ("gathered fine_dkdv_kernel", 64, True, False): 272,
    ("gathered fine_dkdv_kernel", 128, False, False): 288,
    ("gathered fine_dkdv_kernel", 128, False, True): 180,
    ("gathered fine_dkdv_kernel", 128, True, False): 240,
    ("gathered fine_dq_kernel", 64, True, False): 156,
    ("gathered fine_forward_kernel", 64, True, False): 24,
    ("gathered fine_forward_kernel", 128, False, False): 84,
    ("gathered fine_forward_kernel", 128, False, True): 88,
    ("gathered fine_forward_kernel", 128, True, False): 188,
    # selected blocks of 64, 128 and 256 keys by key block, with query blocks of 8, 16 and 32 rows; with two programs on
    # an SM, but for the backward of 128 x 128
    ("keys64 selected_backward_kernel", 64, False, False): 76,
    ("keys64 selected_backward_kernel", 128, False, False): 620,
    # of 64 columns with Triton 3.9
    ("keys64 selected_forward_kernel", 64, False, False): 16,
    ("keys64 selected_forward_kernel", 128, False, False): 72,
    ("keys128 selected_backward_kernel", 64, False, False): 76,
    # most with query blocks of 8 rows and Triton 3.8; of 16 rows 660 to 700
    ("keys128 selected_backward_kernel", 128, False, False): 876,
    ("keys128 selected_forward_kernel", 64, False, False): 16,
    ("keys128 selected_forward_kernel", 128, False, False): 72,
    ("keys256 selected_backward_kernel", 64, False, False): 156,
    ("keys256 selected_backward_kernel", 128, False, False): 32,
}
# spill instructions in loops with matrix products, by minor version of Triton
SPILLS_BESIDE_PRODUCTS = {
    "hopper_backward_kernel": {6: 20, 7: 20, 8: 40, 9: 74},
    "hopper_forward_kernel": {6: 1, 7: 1, 8: 6, 9: 8},
    "fine_dkdv_kernel": {6: 4, 7: 8, 8: 8, 9: 9},
    "fine_dq_kernel": {6: 0, 7: 0, 8: 0, 9: 0},
    "fine_forward_kernel": {6: 8, 7: 8, 8: 79, 9: 19},
    "gathered fine_dkdv_kernel": {6: 36, 7: 36, 8: 30, 9: 54},
    "gathered fine_dq_kernel": {6: 0, 7: 0, 8: 9, 9: 14},
    "gathered fine_forward_kernel": {6: 20, 7: 20, 8: 22, 9: 6},
    "keys64 selected_backward_kernel": {6: 44, 7: 43, 8: 43, 9: 38},
    "keys64 selected_forward_kernel": {6: 0, 7: 0, 8: 0, 9: 1},
    "keys128 selected_backward_kernel": {6: 50, 7: 54, 8: 54, 9: 39},
    "keys128 selected_forward_kernel": {6: 0, 7: 0, 8: 0, 9: 1},
    "keys256 selected_backward_kernel": {6: 8, 7: 6, 8: 8, 9: 1},
}
# the same for calls with score mods, at (kernel, head_dim): bytes, and instructions in loops with products. Where
# slopes and a softcap are combined, more is spilled than with either
SPILLS_OF_SCORE_MODS = {
    ("hopper_backward_kernel", 64): (716, 113),
    ("hopper_backward_kernel", 128): (2180, 435),
    # causal slopes: 4 instructions in each of four loops
    ("hopper_forward_kernel", 64): (88, 16),
    ("hopper_forward_kernel", 128): (236, 47),
    ("fine_dkdv_kernel", 64): (1232, 364),
    ("fine_dkdv_kernel", 128): (364, 73),
    ("gathered fine_dkdv_kernel", 64): (644, 127),
    ("gathered fine_dkdv_kernel", 128): (268, 16),
    ("gathered fine_forward_kernel", 64): (32, 4),
    ("gathered fine_forward_kernel", 128): (80, 10),
}
# the same with a block bias, with whatever other score mods: its pointer takes two registers. With Triton 3.6 to 3.8,
# and with 3.9; most is spilled with causal slopes in the forward, with a softcap and slopes in the backward
SPILLS_OF_BIAS = {
    ("hopper_forward_kernel", 64): ((48, 7), (164, 22)),
    ("hopper_forward_kernel", 96): ((52, 9), (572, 77)),
    ("hopper_forward_kernel", 128): ((348, 73), (1124, 206)),
    ("hopper_dq_kernel", 192): ((24, 0), (48, 0)),
    ("hopper_dq_kernel", 256): ((220, 27), (512, 60)),
    ("wide_dkdv_kernel", 256): ((12, 3), (292, 32)),
}
# bytes of shared memory of an SM (sm90), and of them those that each program takes in addition
SHARED_OF_SM, RESERVED = 228 * 1024, 1024
# bytes that the kernel of dk and dv spills for grouped heads on sm90, at (head_dim, results by token): the maximum of
# Triton 3.6 and 3.7
GROUPED_SPILLS = {(64, True): 40, (128, False): 32, (128, True): 32}

Record = dict[str, Any]


def environment_of(version: str | None, cache: Path) -> dict[str, str]:
    """Environment variables of a process that uses a version of Triton, None for the installed one."""
    folder = "" if version is None else Path(sys.prefix) / f"triton-{version}"
    if folder and not folder.is_dir():
        pytest.skip(f"needs Triton {version} in {folder.name} of the environment: `make test-compilers` installs it")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return env | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(folder)}


def run_under(version: str | None, cache: Path, module: str, *arguments: str) -> str:
    """Output of `python -m tests.support.<module>` with a version of Triton, None for the installed one."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}", *arguments],
        cwd=ROOT,
        env=environment_of(version, cache),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Compiler:
    """A process that runs tests/support/compile_kernels.py with one version of Triton."""

    def __init__(self, version: str | None, folder: Path) -> None:
        self.log = folder / "stderr.txt"
        command = [sys.executable, "-m", "tests.support.compile_kernels", "-"]
        with self.log.open("w") as stderr:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment_of(version, folder / "cache"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def request(self, *words: object) -> list[Record]:
        """Sends a request, described at compile_kernels.answer_requests, and returns the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(*words, file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        assert answer, f"the compiling process ended: {self.log.read_text()}"
        return json.loads(answer)

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def compiler() -> Iterator[Callable[[str | None], Compiler]]:
    """Returns the compiling process of a Triton version, which starts when it is first used."""
    running: dict[str | None, Compiler] = {}
    with tempfile.TemporaryDirectory() as folder:

        def start(version: str | None) -> Compiler:
            if version not in running or running[version].process.poll() is not None:
                running[version] = Compiler(version, Path(tempfile.mkdtemp(dir=folder)))
            return running[version]

        yield start
        for each in running.values():
            each.close()


def faults(record: Record) -> list[str]:
    """What makes a compiled kernel slow or impossible to launch, a sentence each."""
    call = record["call"]
    is_half = call["dtype"] in ("float16", "bfloat16")
    found = []
    options = bool(call.get("limited")), call.get("num_splits", 1) > 1
    name = record["kernel"]
    if name in FINE and call["mode"] != "fine":
        name = f"gathered {name}"
    if name in SELECTED:
        name = f"{call['mode']} {name}"
    allowed = KNOWN_SPILLS.get((name, call["head_dim"], *options), 0)
    if record["kernel"] == "keys_kernel" and call.get("group", 1) > 1 and record["arch"] == 90:
        allowed = GROUPED_SPILLS.get((call["head_dim"], call.get("by_token", False)), 0)
    minor = int(record["triton"].split(".")[1])
    most = SPILLS_BESIDE_PRODUCTS.get(name, {}).get(minor, math.inf)
    if call.get("scores"):
        of_mods = SPILLS_OF_SCORE_MODS.get((name, call["head_dim"]), (0, 0))
        of_bias = (0, 0)
        if "bias" in call["scores"]:
            of_bias = SPILLS_OF_BIAS.get((name, call["head_dim"]), ((0, 0), (0, 0)))[minor >= 9]
        allowed, most = max(allowed, of_mods[0], of_bias[0]), max(most, of_mods[1], of_bias[1])
    if record["spills"] > allowed and is_half and (call["head_dim"] in (64, 128) or record["kernel"] in ALONE):
        found.append(f"spills {record['spills']} bytes")
    if record["spills_beside_products"] > most and call["head_dim"] <= 128:
        found.append(f"spills {record['spills_beside_products']} times in loops with matrix products")
    if record["shared"] > record["shared_limit"]:
        found.append(f"needs {record['shared']} bytes of shared memory, the GPU has {record['shared_limit']}")
    if record["registers"] * 32 * record["warps"] * record["programs"] > 65536:
        found.append(
            f"needs {record['registers']} registers per thread in {record['warps']} warps of each of "
            f"{record['programs']} programs, more than 65536 in total"
        )
    if record["programs"] > 1 and record["programs"] * (record["shared"] + RESERVED) > SHARED_OF_SM:
        found.append(f"needs {record['shared']} bytes of shared memory, too many for {record['programs']} programs")
    if record["tensor_memory"] > 512:
        found.append(f"needs {record['tensor_memory']} columns of tensor memory, the GPU has 512")
    if record["early_arrivals"]:
        found.append(
            f"arrives {record['early_arrivals']} times at an mbarrier before its other warps have synchronized"
        )
    if record["unwritten_registers"]:
        found.append(f"reads {record['unwritten_registers']} unwritten uniform registers")
    found += record["unwaited"]
    if record["lost_operands"]:
        found.append(f"overwrites {record['lost_operands']} operands that a loop keeps in registers")
    if record["arch"] == 90 and is_half and record["products"]:
        # wgmma has 64 rows, more than the blocks of pair_bias_gradient.py at head_dim 256
        is_narrow = record["kernel"] == "pair_bias_kernel" and call["head_dim"] > 128
        if not record["wgmma"] and call.get("q_len", 64) * call.get("group", 1) >= 64 and not is_narrow:
            found.append("has matrix products without wgmma")
        # head_dim 256, kv_lengths and score mods are correct but not tuned: ptxas serializes some of their wgmma
        is_tuned = call["head_dim"] <= 128 and not any(map(call.get, ("limited", "scores")))
        is_tuned |= record["kernel"].startswith("hopper")
        if record["serialized"] and is_tuned:
            found.append(f"serializes wgmma: {', '.join(record['serialized'])}")
        # a good loop issues at least 2 wgmma per wait
        if record["wgmma_waits"] * 2 > record["wgmma"] and call["head_dim"] >= 64:
            found.append(f"waits {record['wgmma_waits']} times for {record['wgmma']} wgmma")
    return [f"{record['kernel']} {call}: {sentence}" for sentence in found]


def marks_of(target: str, version: str | None, shard: int) -> list[pytest.MarkDecorator]:
    """`make test` compiles the first share of each kernel's configurations, `make test-thorough` the others."""
    if (target, version) not in INSTALLED:
        return [pytest.mark.slow, pytest.mark.compilers]
    return [pytest.mark.slow, pytest.mark.thorough] if shard else [pytest.mark.slow]


# target by target, the slowest first, so that a worker starts few processes
CASES = [
    pytest.param(
        target,
        version,
        kernel,
        shard,
        id=f"{target}-{version or 'installed'}-{kernel}-{shard}",
        marks=marks_of(target, version, shard),
    )
    for (target, version), kernels in TARGETS.items()
    for kernel in kernels
    for shard in range(shards_of(target, kernel))
]


@pytest.mark.parametrize(("target", "version", "kernel", "shard"), CASES)
def test_kernels_compile_without_faults(
    target: str, version: str | None, kernel: str, shard: int, compiler: Callable[[str | None], Compiler]
) -> None:
    records = compiler(version).request("compile", target, kernel, shard, shards_of(target, kernel))
    for record in records:
        assert record["kernel"] == kernel
        assert record["arch"] == (90 if target.startswith("hopper") else int(target.partition("-")[0]))
        assert version in (None, record["triton"])
        assert (record["products"] > 0) == (kernel in PRODUCTS)
    found = "\n".join(fault for record in records for fault in faults(record))
    assert not found, f"\n{found}"


@pytest.mark.parametrize(
    ("target", "version"),
    # slow, so that it runs with the tests above and uses their processes
    [
        pytest.param(*each, marks=[pytest.mark.slow, *[pytest.mark.compilers] * (each[1] is not None)])
        for each in TARGETS
    ],
)
def test_targets_cover_all_launches(
    target: str, version: str | None, compiler: Callable[[str | None], Compiler]
) -> None:
    launches = compiler(version).request("list", target)
    assert {launch["kernel"] for launch in launches} == set(TARGETS[target, version])
    for kernel in TARGETS[target, version]:
        assert shards_of(target, kernel) <= sum(each["kernel"] == kernel for each in launches)
    if not target.startswith("hopper") or target.endswith("-rest"):
        return
    # at the tuned head dimensions every kind of layout, with and without kv_lengths, with and without splits
    calls = [call for launch in launches if launch["kernel"] == "hopper_forward_kernel" for call in launch["calls"]]
    for head_dim in (64, 128):
        at_dim = [call for call in calls if call["head_dim"] == head_dim]
        assert {call.get("mode", "layout") for call in at_dim} == {"layout", "dense", "causal"}
        assert {call.get("limited", False) for call in at_dim} == {False, True}
        assert {call.get("num_splits", 1) > 1 for call in at_dim} == {False, True}


def test_make_installs_the_other_tritons() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"\nTRITONS = {' '.join(OTHERS)}\n" in makefile


CALL = {"head_dim": 128, "dtype": "bfloat16"}
GOOD = {
    "kernel": "forward_kernel",
    "arch": 90,
    "registers": 255,
    "spills": 0,
    "spills_beside_products": 0,
    "triton": "3.7.1",
    "shared": 98336,
    "shared_limit": 232448,
    "products": 2,
    "tensor_memory": 0,
    "early_arrivals": 0,
    "lost_operands": 0,
    "unwritten_registers": 0,
    "unwaited": [],
    "programs": 1,
    "warps": 8,
    "wgmma": 44,
    "wgmma_waits": 4,
    "serialized": [],
    "call": CALL,
}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"spills": 4}, "spills"),
        ({"spills": 341, "kernel": "hopper_backward_kernel"}, "spills"),
        ({"spills": 2765, "kernel": "hopper_backward_kernel", "call": {**CALL, "scores": "softcap"}}, "spills"),
        ({"spills_beside_products": 21, "kernel": "hopper_backward_kernel"}, "loops with matrix products"),
        (
            {"spills_beside_products": 75, "kernel": "hopper_backward_kernel", "triton": "3.9.0"},
            "loops with matrix products",
        ),
        ({"spills": 32, "kernel": "hopper_forward_kernel"}, "spills"),
        ({"spills": 4, "kernel": "hopper_forward_kernel", "call": {"head_dim": 64, "dtype": "bfloat16"}}, "spills"),
        ({"spills": 565, "kernel": "hopper_backward_kernel", "call": {"head_dim": 64, "dtype": "bfloat16"}}, "spills"),
        (
            {"serialized": ["C7510"], "kernel": "hopper_forward_kernel", "call": {**CALL, "limited": True}},
            "serializes",
        ),
        ({"spills": 32, "kernel": "keys_kernel"}, "spills"),
        ({"spills": 33, "kernel": "keys_kernel", "call": {**CALL, "group": 4}}, "spills"),
        ({"spills": 32, "kernel": "keys_kernel", "call": {**CALL, "group": 4}, "arch": 80}, "spills"),
        ({"shared": 232449}, "shared memory"),
        ({"registers": 255, "warps": 16}, "registers"),
        ({"registers": 136, "programs": 2}, "2 programs"),
        ({"registers": 128, "shared": 115713, "programs": 2}, "2 programs"),
        ({"spills": 877, "kernel": "selected_backward_kernel", "call": {**CALL, "mode": "keys128"}}, "spills"),
        (
            {
                "spills": 17,
                "kernel": "selected_forward_kernel",
                "call": {"head_dim": 64, "dtype": "bfloat16", "mode": "keys64"},
            },
            "spills",
        ),
        ({"tensor_memory": 1024}, "tensor memory"),
        ({"early_arrivals": 1}, "before its other warps"),
        ({"lost_operands": 8}, "keeps in registers"),
        ({"unwritten_registers": 2}, "unwritten uniform registers"),
        ({"unwaited": ["MOV R1, RZ uses R1 before STS [R2], R1 has read it"]}, "has read it"),
        ({"wgmma": 0, "wgmma_waits": 0}, "without wgmma"),
        ({"serialized": ["C7510"]}, "serializes"),
        ({"wgmma_waits": 23}, "waits"),
    ],
)
def test_each_fault_is_reported(change: dict[str, Any], word: str) -> None:
    (fault,) = faults({**GOOD, **change})
    assert word in fault


def test_acceptable_kernels_have_no_faults() -> None:
    """GOOD has no faults; few queries need no wgmma; float32 and other head dimensions may spill."""
    assert faults(GOOD) == []
    few = {**GOOD, "kernel": "split_kv_kernel", "wgmma": 0, "wgmma_waits": 0}
    assert faults({**few, "call": {**CALL, "q_len": 15, "group": 4}}) == []
    (fault,) = faults({**few, "call": {**CALL, "q_len": 16, "group": 4}})
    assert "without wgmma" in fault
    spilled = {**GOOD, "call": {**GOOD["call"], "head_dim": 128}, "kernel": "hopper_backward_kernel"}
    assert faults({**spilled, "spills": 340}) == []
    (fault,) = faults({**spilled, "spills": 341})
    assert "spills 341 bytes" in fault
    with_splits = {**spilled, "call": {**GOOD["call"], "head_dim": 128, "num_splits": 3}}
    assert faults({**with_splits, "spills": 640}) == []
    assert len(faults({**with_splits, "spills": 641})) == 1
    assert faults({**GOOD, "kernel": "keys_kernel", "spills": 32, "call": {**CALL, "group": 4}}) == []
    assert faults({**GOOD, "registers": 128, "shared": 115712, "programs": 2}) == []
    assert faults({**GOOD, "spills": 4, "call": {"head_dim": 256, "dtype": "bfloat16"}}) == []
    assert (
        faults({**GOOD, "spills": 4, "wgmma": 0, "call": {"head_dim": 64, "dtype": "float32"}, "wgmma_waits": 0}) == []
    )


def test_a_repeated_pair_of_options_is_compiled_once() -> None:
    rows = [{"head_dim": dim, "dtype": None, "mode": "layout"} for dim in (64, 128)]
    first, again = ({**row, "length": 1024} for row in rows)
    scales = [{**row, "scale": 0.0} for row in rows]
    assert each_option_once([*rows, first, again, *scales]) == [*rows, first, *scales]
