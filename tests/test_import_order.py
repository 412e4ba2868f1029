"""Imports point one way: a module (a file or folder of the package) imports only modules listed before it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# modules between two < may not import each other
ORDER = """
philox runtime < blocks < plan_format < score_mods < reference < kernels < plan < layout < packed < validation dispatch
< ops < gathering < explanation < merging < functional < selection paged < interop masks < layout_crops < nn
< diffusers distributed huggingface < vllm_omni
"""
RANK = {module: rank for rank, modules in enumerate(ORDER.split("<")) for module in modules.split()}
# third-party packages that a module may import while it is loaded; others are imported inside functions
LOADED = {
    "blocks": {"numpy", "torch"},
    "kernels": {"numpy", "torch", "triton"},
    "runtime": {"torch", "triton"},
    # its base classes, in a file that `register` imports
    "vllm_omni": {"torch", "vllm_omni"},
}
ELSEWHERE = {"einops", "numpy", "torch"}
KNOWN = {*sys.stdlib_module_names, "blocksparse_flash"}


def imports(path: Path, package: str) -> Iterator[tuple[str, bool]]:
    """(full name of what is imported, whether it is imported when the module is loaded)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from ((f"{base}.{alias.name}", id(node) not in lazy) for alias in node.names)


def violations(root: Path) -> list[str]:
    """One sentence per import that the order of the modules forbids."""
    found = []
    for path in sorted((root / "blocksparse_flash").rglob("*.py")):
        name = path.relative_to(root / "blocksparse_flash").as_posix()
        module = name.split("/")[0].removesuffix(".py")
        if module == "__init__":
            continue
        package = ".".join(path.relative_to(root).parent.parts)
        for target, is_loaded in imports(path, package):
            top, *rest = target.split(".")
            if top == "masks" or top == "benchmarks":
                if is_loaded or top == "benchmarks":
                    found.append(f"{name} imports {target}")
            elif top == "blocksparse_flash" and rest and rest[0] in RANK:
                if rest[0] != module and RANK[rest[0]] >= RANK[module]:
                    found.append(f"{name} imports {target}")
            elif is_loaded and top not in {*KNOWN, *LOADED.get(module, ELSEWHERE)}:
                found.append(f"{name} loads {top}")
    return found


def test_imports_point_one_way() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line", "sentence"),
    [
        ("plan/host_builder.py", "from ..layout import BlockLayout", "imports blocksparse_flash.layout.BlockLayout"),
        ("plan/host_builder.py", "def late():\n    from .. import ops", "imports blocksparse_flash.ops"),
        ("kernels/eager/attention.py", "from ...functional import attention", "imports blocksparse_flash.functional"),
        ("layout.py", "import scipy.sparse", "loads scipy"),
        ("blocks/block_list.py", "import triton", "loads triton"),
        ("nn/layers.py", "import masks", "imports masks"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, file: str, line: str, sentence: str) -> None:
    path = tmp_path / "blocksparse_flash" / file
    path.parent.mkdir(parents=True)
    path.write_text(f"import os\n{line}\n")
    assert [found.removesuffix(".attention") for found in violations(tmp_path)] == [f"{file} {sentence}"]
