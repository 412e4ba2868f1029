"""The fixture that runs a GPU test on one backend with tiles of one size."""

from __future__ import annotations

import pytest

from blocksparse_flash import dispatch
from blocksparse_flash.plan_format import PIECE, TILE


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend with tiles of 128 x 128, or with the suffix "-64" of 64 x 64, with "-16" gathered ones."""
    name, _, tile = request.param.partition("-")
    # a call with dropout runs on `triton`, which has no gathered tiles
    side = int(tile or TILE)
    monkeypatch.setattr(dispatch, "tile_of", lambda by, *_, **__: TILE if (by, side) == ("triton", PIECE) else side)
    return str(name)
