"""Settings of all tests: poisoned memory, Triton's interpreter where there is no GPU, hypothesis profiles, the device.

Options: --hypothesis-profile=thorough (2000 examples), --zoo=full (every combination of test_zoo.py), --part=1/2 (half
of the tests marked thorough or compilers), --launch-tables=few (on a GPU: every kernel configuration once).
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest
import torch

from tests.support.interpreter import speed_up_interpreter
from tests.support.sampling import mark_the_rest, not_in_part

HAS_CUDA = torch.cuda.is_available()

# read when their libraries are first used. PyTorch's compile caches outlive a change of what an operator returns
os.environ |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if not HAS_CUDA:
    speed_up_interpreter()

# no deadline: shared CI machines may stall for seconds
hypothesis.settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
hypothesis.settings.register_profile("thorough", max_examples=2000, deadline=None)
hypothesis.settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        default="0/1",
        help="K/N: of tests marked thorough or compilers, part K (from 0) of N that make up all",
    )
    parser.addoption("--zoo", choices=("spread", "full"), default="spread", help="which combinations test_zoo.py runs")
    parser.addoption(
        "--launch-tables",
        choices=("all", "few"),
        default="all",
        help="calls of test_launch_tables.py on a GPU: all, or few, which reach every configuration once",
    )


def pytest_configure(config: pytest.Config) -> None:
    # a worker on each core: more threads would make collection on a machine of many cores take minutes
    if "PYTEST_XDIST_WORKER" in os.environ and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    # poisoned memory needs deterministic mode, which warns about PyTorch's nondeterministic operators
    config.addinivalue_line("filterwarnings", "ignore:.*does not have a deterministic implementation:UserWarning")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Samples sweeps before -m selects tests, and orders those that are left."""
    mark_the_rest(items)
    outside = not_in_part(items, config.getoption("--part"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in outside])
    items[:] = [item for item in items if item.nodeid not in outside]
    yield
    start_slow_tests_first(items)


def pytest_collection_finish() -> None:
    """Leaves modules and tests out of garbage collections, which took a fifth of the time."""
    gc.collect()
    gc.freeze()


def start_slow_tests_first(items: list[pytest.Item]) -> None:
    """Starts slow tests first, spread over the equal shares of `--dist worksteal`, so that no worker ends with one."""
    n_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if n_workers == 1:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    fast = (item for item in items if not item.get_closest_marker("slow"))
    ordered: list[pytest.Item] = []
    for i_worker in range(n_workers):
        share = slow[i_worker::n_workers]
        size = (len(items) - len(ordered)) // (n_workers - i_worker)
        ordered += share
        ordered += itertools.islice(fast, max(0, size - len(share)))
    items[:] = [*ordered, *fast]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """On a GPU: which configurations of the launch tables and which fuzz seeds have run."""
    properties: dict[str, list[object]] = {}
    for report in (*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")):
        for name, value in report.user_properties if report.when == "call" else ():
            properties.setdefault(name, []).append(value)
    for known in properties.get("configurations known", [])[:1]:
        run = {each for of_call in properties.get("configurations", []) for each in of_call}
        n_calls = len(properties.get("configurations", []))
        terminalreporter.write_line(
            f"launch tables: {len(known)} configurations known, {len(run)} run by {n_calls} calls"
        )
        for each in sorted(set(known) - run):
            terminalreporter.write_line(f"  not run: {each}")
    for line in sorted(properties.get("fuzz", [])):
        terminalreporter.write_line(f"fuzz: {line}")


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Fills torch.empty with NaN (integers: the largest value), so that reads of unwritten memory fail tests."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    """Forgets what earlier tests compiled: beyond 8 versions of one function, torch.compile runs it uncompiled."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the kernels of selection and plan even on the CPU, in Triton's interpreter; PyTorch operations raise."""
    from blocksparse_flash.plan import block_selection

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("PyTorch operations were used")

    if not torch.cuda.is_available():
        monkeypatch.setattr(block_selection, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(block_selection, "sorted_rows", refused)
    monkeypatch.setattr(block_selection, "_plan_by_operations", refused)


@pytest.fixture
def device() -> torch.device:
    """The GPU, or the CPU on machines without one."""
    return torch.device("cuda", 0) if HAS_CUDA else torch.device("cpu")
