"""The cached launcher passes the same arguments as Triton's own, for every supported release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.test_compile import OTHERS, run_under

pytest.importorskip("triton", reason="needs Triton")


# 3.6 compiles a launch function per kernel, 3.7 has one for all kernels, 3.8 expands TMA descriptors elsewhere
@pytest.mark.parametrize(
    "version",
    [None, *(pytest.param(each, marks=pytest.mark.compilers) for each in OTHERS)],
)
def test_launches_pass_the_arguments_that_triton_passes(version: str | None, tmp_path: Path) -> None:
    output = run_under(version, tmp_path, "launch_again")
    assert output.rstrip().endswith("every launch passes equal arguments")
    assert version is None or f"Triton {version}:" in output


def test_an_unknown_launcher_is_called_through_triton() -> None:
    from blocksparse_flash.runtime import launcher

    class Compiled:
        """A compiled kernel of a future Triton release."""

        run = object()
        launched: Any = None

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*arguments: Any) -> None:
                self.launched = (grid, arguments)

            return run

    class DescriptorFactory:
        def describe(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
            return "described", tensor

    compiled, tensor, other = Compiled(), torch.zeros(1), torch.zeros(1)
    run = launcher.bind(compiled, (4, 1, 1), (tensor, None, tensor), (None, None, DescriptorFactory()), (3,))
    run((other, None, other))
    assert compiled.launched == ((4, 1, 1), (other, None, ("described", other), 3))
