"""Fixtures of the tests of kernels: a backend with tiles of one size; GPU memory for tests that run side by side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from blocksparse_flash.plan_format import GATHERED_TILE, TILE
from tests.support.forced_tiles import force_tile

# bytes; references in float64 of a few thousand tokens take more
MAX_CACHED = 1 << 30


@pytest.fixture(autouse=True)
def shared_gpu_memory() -> Iterator[None]:
    """Returns cached GPU memory after a test that needed much: with a process per core, other tests need it."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MAX_CACHED:
        torch.cuda.empty_cache()


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend with tiles of 128 x 128, or with the suffix "-64" of 64 x 64, with "-16" gathered ones."""
    name, _, tile = request.param.partition("-")
    # a call with dropout runs on `triton`, which has no gathered tiles
    side = int(tile or TILE)
    force_tile(monkeypatch, lambda by, *_, **__: TILE if (by, side) == ("triton", GATHERED_TILE) else side)
    return str(name)
