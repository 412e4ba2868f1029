"""How does Triton's interpreter get through a launch sooner? It makes its language ready once, not at each call of a helper.

Knows the interpreter of Triton 3.6 to 3.9. Must not know any kernel.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any


def patch_once_a_launch() -> None:
    """From now on the functions of `triton.language` are replaced by those of the interpreter once a launch.

    Triton looks through all of them again at every call of a jitted helper, two fifths of the time of a launch, and finds
    them replaced. Without Triton there is nothing to do; TRITON_INTERPRET must be set before, as Triton is imported.
    """
    if importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    # modules whose functions are those of the interpreter, until the launch ends
    ready: set[ModuleType] = set()

    class Launch(interpreter._LangPatchScope):
        def restore(self) -> None:
            ready.clear()
            super().restore()

    @cache
    def languages(fn: Callable) -> frozenset[ModuleType]:
        return frozenset(module for module in fn.__globals__.values() if module is tl or module is tl.core)

    def patch_lang(fn: Callable) -> Any:
        scope = Launch()
        # what a launch has made ready for its kernel may not be all that a helper in another file calls
        if not languages(fn) <= ready:
            scope._changes = patch(fn)._changes
            ready.update(languages(fn))
        return scope

    interpreter._patch_lang = patch_lang
