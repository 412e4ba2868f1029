"""The fixture that registers the attention with transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blocksparse_flash import huggingface


@pytest.fixture
def registered() -> Iterator[None]:
    """Registers the attention; transformers prints errors only."""
    # not at the top: a test of this folder runs without transformers
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    huggingface.register()
    yield
    transformers.logging.set_verbosity(level)
