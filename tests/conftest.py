"""What holds for every test? Poisoned memory, Triton's interpreter where no GPU is, hypothesis profiles, the device.

Options: --hypothesis-profile=thorough (2000 examples), --zoo=full (every combination of test_zoo.py).
"""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

from tests.support.interpreter import patch_once_a_launch

HAS_CUDA = torch.cuda.is_available()

# they are read when their libraries are first used. Of what was compiled in an earlier run PyTorch remembers an operator's name, not what it returns
os.environ |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if not HAS_CUDA:
    patch_once_a_launch()

# a shared CI machine stops for seconds at times, so a deadline would only test the machine
hypothesis.settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
hypothesis.settings.register_profile("thorough", max_examples=2000, deadline=None)
hypothesis.settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--zoo", choices=("spread", "full"), default="spread", help="which combinations test_zoo.py runs")


def pytest_configure(config: pytest.Config) -> None:
    # poisoning needs the deterministic mode, which says so when an operator of PyTorch's own is not deterministic
    config.addinivalue_line("filterwarnings", "ignore:.*does not have a deterministic implementation:UserWarning")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which configurations of the launch tables have run, and which seeds of the fuzz, where a GPU has run them."""
    told: dict[str, list[object]] = {}
    for report in (*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")):
        for name, value in report.user_properties if report.when == "call" else ():
            told.setdefault(name, []).append(value)
    for known in told.get("configurations known", [])[:1]:
        run = {each for of_call in told.get("configurations", []) for each in of_call}
        n_calls = len(told.get("configurations", []))
        terminalreporter.write_line(
            f"launch tables: {len(known)} configurations known, {len(run)} run by {n_calls} calls"
        )
        for each in sorted(set(known) - run):
            terminalreporter.write_line(f"  not run: {each}")
    for line in sorted(told.get("fuzz", [])):
        terminalreporter.write_line(f"fuzz: {line}")


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """torch.empty is full of NaN (of the largest number for integers), so that reading unwritten memory shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda", 0) if HAS_CUDA else torch.device("cpu")
