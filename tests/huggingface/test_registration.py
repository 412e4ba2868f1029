"""`register()` without transformers says what to install."""

from __future__ import annotations

import sys

import pytest

from blocksparse_flash import huggingface


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = r"huggingface\.register needs transformers: pip install 'blocksparse_flash\[huggingface\]'"
    with pytest.raises(ImportError, match=message):
        huggingface.register()
