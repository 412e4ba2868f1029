"""The package of `import masks` under a name that no other module can hide.

`blocksparse_flash.masks` is the module `masks`. If `masks` means something else, such as a masks.py in the working
directory, the builders are loaded from their own folder under the name `blocksparse_flash.masks`.
`python -m blocksparse_flash.masks` is `python -m masks`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from masks import *  # noqa: F403
    from masks import deepspeed as deepspeed

_NAME = "blocksparse_flash.masks"
_FILE = Path(__file__).resolve().parents[1] / "masks" / "__init__.py"


def _is_found_as_masks() -> bool:
    """Whether `import masks` gives this library's package."""
    try:
        found = importlib.util.find_spec("masks")
    except ValueError:
        # a module in sys.modules without a spec
        return False
    return found is not None and found.origin is not None and Path(found.origin).resolve() == _FILE


def _load() -> None:
    """Replaces this module in sys.modules by the package of the builders; its submodules get both names."""
    if not _is_found_as_masks():
        spec = importlib.util.spec_from_file_location(_NAME, _FILE, submodule_search_locations=[str(_FILE.parent)])
        assert spec is not None and spec.loader is not None
        module = sys.modules[_NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return
    module = importlib.import_module("masks")
    # not imported by the package itself; a second copy of its classes would be other classes
    importlib.import_module("masks.deepspeed")
    for name in [name for name in sys.modules if name.startswith("masks.")]:
        sys.modules[f"blocksparse_flash.{name}"] = sys.modules[name]
    sys.modules[_NAME] = module


if __name__ == "__main__":
    raise SystemExit(importlib.import_module(f"{_NAME}.command_line").main())
_load()
