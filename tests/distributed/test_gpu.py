"""Shared attention on 2 or 4 GPUs over NCCL: runs context_gpu_cases.py with one process per GPU.

Each check has a timeout. If one fails its ranks are stopped, and the next check starts new ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.context_truth import LAYOUTS
from tests.support.crew import Answer, Crew

N_RANKS = {0: 0, 1: 1, 2: 2, 3: 2}.get(torch.cuda.device_count(), 4)
pytestmark = pytest.mark.skipif(N_RANKS < 2, reason="needs two CUDA GPUs")
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
CASES = "tests.support.context_gpu_cases"
DEVICE = "cuda"
ORDERS = ("contiguous", "zigzag", "balanced", "tuned", "uneven")
# seconds: timeout of the group, of a check, and of a check that compiles much
PATIENCE, USUAL, LONG = 60, 45, 90


class Crews:
    """A working crew; starts a new one if the last one ended."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.crew = folder, None

    def get(self) -> Crew:
        if self.crew is None or not self.crew.is_alive:
            self.crew = Crew(N_RANKS, DEVICE, PATIENCE, self.folder)
        return self.crew


@pytest.fixture(scope="module")
def crews(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crews]:
    crews = Crews(tmp_path_factory.mktemp("ranks"))
    yield crews
    if crews.crew is not None:
        crews.crew.end()


def assert_holds(crews: Crews, function: str, *arguments: object, seconds: float = USUAL) -> None:
    for rank, answer in enumerate(crews.get().run(CASES, function, *arguments, seconds=seconds)):
        if answer.said:
            pytest.fail(f"on rank {rank} of {N_RANKS}:\n{answer.said}", pytrace=False)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exchange_equals_one_process(crews: Crews, layout: str, order: str) -> None:
    """dk and dv within tolerance; out, lse and dq bit by bit. Each layout is tested with and without grouped heads."""
    kv_heads = (4, 1)[(list(LAYOUTS).index(layout) + ORDERS.index(order)) % 2]
    assert_holds(crews, "exchange_equals_one_process", layout, order, kv_heads, seconds=LONG)


@pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize(("layout", "order", "kv_heads"), [("local", "contiguous", 4), ("butterfly", "zigzag", 1)])
def test_exchange_runs_on_hopper(crews: Crews, layout: str, order: str, kv_heads: int) -> None:
    """backend="hopper" in its deterministic form repeats bit by bit."""
    assert_holds(crews, "exchange_equals_one_process", layout, order, kv_heads, "hopper", seconds=LONG)


@pytest.mark.parametrize(
    ("layout", "order"),
    [("causal", "zigzag"), ("butterfly", "uneven"), ("butterfly", "contiguous"), ("bigbird", "contiguous")],
)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_ulysses_equals_one_process(crews: Crews, layout: str, order: str, kv_heads: int) -> None:
    assert_holds(crews, "ulysses_equals_one_process", layout, order, kv_heads)


@pytest.mark.parametrize(("order", "kv_heads"), [("contiguous", 4), ("zigzag", 2)])
def test_pass_q_rows_are_as_accurate(crews: Crews, order: str, kv_heads: int) -> None:
    assert_holds(crews, "uses_pass_q", "global", order, kv_heads)


def test_messages_of_nothing_arrive(crews: Crews) -> None:
    assert_holds(crews, "nothing_moves")


@pytest.mark.parametrize(("layout", "group"), [("butterfly", 1), ("random", 4)])
def test_many_runs_give_equal_bits(crews: Crews, layout: str, group: int) -> None:
    assert_holds(crews, "runs_over_and_over", layout, group, 8)


@pytest.mark.parametrize("scheme", ["exchange", "ulysses"])
def test_the_host_never_waits(crews: Crews, scheme: str) -> None:
    assert_holds(crews, "never_waits_on_the_host", scheme)


@pytest.mark.parametrize("scheme", ["exchange", "ulysses"])
def test_compiles_and_checkpoints(crews: Crews, scheme: str) -> None:
    assert_holds(crews, "compiles", scheme, "inductor", seconds=LONG)


def test_takes_dtensors(crews: Crews) -> None:
    assert_holds(crews, "takes_dtensors")


@pytest.mark.parametrize("n_context", [1, N_RANKS])
def test_the_example_trains(crews: Crews, n_context: int) -> None:
    arguments = f"--context {n_context} --length 1000 --window 64 --steps 12 --learning-rate 0.01 --print-every 100"
    assert_holds(crews, "trains", arguments, seconds=LONG)


def test_differences_are_named(crews: Crews) -> None:
    assert_holds(crews, "differences_are_named")


# seconds: timeout of a group in which a rank fails, and the delay of the watchdog
SHORT, GRACE = 8, 30
FAILURES = ("killed", "never comes", "wrong length")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    """Failure -> answers of the ranks. All failures run at once in separate crews, since they mostly wait."""

    def fail(what: str) -> list[Answer]:
        crew = Crew(N_RANKS, DEVICE, SHORT, tmp_path_factory.mktemp("failure"))
        # the last rank never answers
        n_awaited = N_RANKS - 1 if what == "never comes" else N_RANKS
        try:
            # imports and compilation have a separate timeout
            assert not any(answer.said for answer in crew.run(CASES, "misses_a_rank", "nothing", seconds=LONG))
            return crew.run(CASES, "misses_a_rank", what, seconds=SHORT + GRACE, n_awaited=n_awaited)
        finally:
            crew.end()

    with ThreadPoolExecutor(len(FAILURES)) as threads:
        return dict(zip(FAILURES, threads.map(fail, FAILURES), strict=True))


@pytest.mark.parametrize("what", FAILURES)
def test_a_failed_rank_is_an_error_on_the_others(failed: dict[str, list[Answer]], what: str) -> None:
    """Within the group's timeout the others raise or exit, and their output gives the reason."""
    answers = failed[what]
    for rank, answer in enumerate(answers[: N_RANKS - 1]):
        assert answer.said and "no answer" not in answer.said, f"rank {rank} got no error: {answer}"
        assert any(word in answer.said.lower() for word in ("timeout", "timed out", "connection", "nccl")), answer
    if what != "never comes":
        assert {"killed": "exit code -9", "wrong length": "tokens of rank"}[what] in answers[-1].said, answers[-1]
