"""The mask builders of `import masks`, also reachable if another module named `masks` is in front of them.

`blocksparse_flash.masks.butterfly` is the same function as `masks.butterfly`. If `masks` means something else, such
as a masks.py in the working directory, the builders are loaded from their own folder under a private name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from masks import *  # noqa: F403

_FILE = Path(__file__).resolve().parents[1] / "masks" / "__init__.py"
_PRIVATE_NAME = "blocksparse_flash._masks"


def _load() -> ModuleType:
    try:
        found = importlib.util.find_spec("masks")
    except ValueError:
        # a module in sys.modules without a spec
        found = None
    if found is not None and found.origin is not None and Path(found.origin).resolve() == _FILE:
        return importlib.import_module("masks")
    spec = importlib.util.spec_from_file_location(_PRIVATE_NAME, _FILE, submodule_search_locations=[str(_FILE.parent)])
    assert spec is not None and spec.loader is not None
    module = sys.modules[_PRIVATE_NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_package = _load()
__all__ = list(_package.__all__)
globals().update({name: getattr(_package, name) for name in __all__})


def __getattr__(name: str) -> ModuleType:
    if name == "deepspeed":
        return importlib.import_module(f"{_package.__name__}.deepspeed")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
