"""Makes Triton's interpreter (3.6 to 3.9) patch `triton.language` once a launch, not at every call of a helper."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any


def patch_once_a_launch() -> None:
    """Make the interpreter patch `triton.language` once a launch.

    Triton patches it again at every call of a jitted helper, which takes two fifths of a launch. Does nothing without
    Triton. Set TRITON_INTERPRET before the call, because it imports Triton.
    """
    if importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    # modules patched for the current launch
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
        # a helper in another file may use a module that the kernel's file does not
        if not languages(fn) <= ready:
            scope._changes = patch(fn)._changes
            ready.update(languages(fn))
        return scope

    interpreter._patch_lang = patch_lang
