"""Public names and signatures, what an import loads, and rules that hold for every file of the repository."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import blocksparse_flash
import masks

ROOT = Path(__file__).resolve().parents[1]
CODE = ("blocksparse_flash", "masks", "benchmarks")
# private words with a standard term (CONTRIBUTING.md), also as parts of identifiers. WHO was a constant
OWN_WORDS = re.compile(
    r"(?i)(?<![a-z])(told|hand[ _]in|handed[ _]in|served|descend|soften|watchers|copy[ _]engine|multiprocessors?)"
    r"(?![a-z])|(?-i:\bWHO\b)"
)
# facts with one home in the package
DEFINED_ONCE = ("TILE", "PARTIAL", "LOG2_E", "padded_dim")
MAX_PARAMETERS, MAX_JITTED_PARAMETERS, MAX_TOP_LEVEL_FILES = 12, 30, 16
# their signature is public
PUBLIC_CALLS = re.compile(r"_?(attention|attention_with_lse|explain)(_scored)?")


def python_files(*folders: str, root: Path = ROOT) -> dict[str, str]:
    """Path inside the repository -> text of the Python files in some folders, by default all code that ships."""
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for folder in folders or CODE
        for path in sorted((root / folder).rglob("*.py"))
    }


# ---- imports ----


# in one process, since importing torch takes seconds; torch itself may load any of these packages
IMPORTS = """
import sys
import torch, numpy, einops
for statement in {statements}:
    before = {{*sys.modules}}
    exec(statement)
    print(*sorted({{*sys.modules}} - before))
"""
HEAVY = {"triton", "scipy", "matplotlib", "benchmarks", "networkx", "pandas", "transformers", "diffusers"}


def test_imports_load_nothing_heavy() -> None:
    statements = (
        "import blocksparse_flash",
        "import blocksparse_flash.interop",
        "import masks; masks.longformer(256, window=3, global_tokens=1)",
    )
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(statements=statements)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    package, interop, _ = loaded = [line.split() for line in done.stdout.splitlines()]
    for names in loaded:
        assert names and not HEAVY & {name.partition(".")[0] for name in names}
    assert "blocksparse_flash.functional" in package
    assert not [name for name in package if "interop" in name or "flex" in name or name.startswith("masks")]
    assert "blocksparse_flash.interop" in interop and not [name for name in interop if name.startswith("masks")]


# ---- names ----


def test_public_names_are_fixed() -> None:
    assert blocksparse_flash.__all__ == [
        "BlockLayout",
        "Explanation",
        "attention",
        "attention_with_lse",
        "explain",
        "merge",
        "paged_attention",
        "paged_attention_with_lse",
        "selected_attention",
        "selected_attention_with_lse",
    ]
    assert masks.__all__ == [
        "a_shape",
        "alibi_windows",
        "axial",
        "bigbird",
        "block_causal",
        "block_diagonal",
        "block_diffusion",
        "build",
        "butterfly",
        "causal",
        "dilated_window",
        "documents",
        "erdos_renyi",
        "expander",
        "fixed",
        "global_tokens",
        "hierarchical",
        "hilbert_order",
        "local",
        "longformer",
        "longnet",
        "lsh",
        "morton_order",
        "neighborhood",
        "pixelfly",
        "prefix_lm",
        "random",
        "shared_prefix",
        "sink_window",
        "sliding_tile",
        "small_world",
        "strided",
        "swin",
        "tile_order",
        "top_k",
        "top_p",
        "tree",
        "tri_shape",
        "vertical_slash",
    ]
    assert all(hasattr(module, name) for module in (blocksparse_flash, masks) for name in module.__all__)


def test_attention_has_its_exact_signature() -> None:
    expected = (
        "q, k, v, layout=None, *, causal=False, scale=None, kv_lengths=None, dropout_p=0.0, seed=None, "
        "deterministic=None, backend='auto', sinks=None, softcap=None, alibi_slopes=None, block_bias=None, "
        "pair_bias=None, **unknown"
    )
    for function in (blocksparse_flash.attention, blocksparse_flash.attention_with_lse, blocksparse_flash.explain):
        signature = inspect.signature(function)
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        assert str(inspect.Signature(bare)) == f"({expected})"


def test_no_file_has_a_vague_name() -> None:
    vague = {"util", "utils", "common", "helper", "helpers", "config", "misc"}
    everything = [path for folder in (*CODE, "tests") for path in (ROOT / folder).rglob("*")]
    assert [path for path in everything if path.stem in vague] == []


def test_no_environment_variables_are_read() -> None:
    reading = re.compile(r"\b(environ|getenv|putenv)\b")
    readers = [name for name, text in python_files().items() if reading.search(text)]
    assert readers == []


# ---- the style of the code: each rule returns one string for each violation ----


def questions(files: dict[str, str]) -> list[str]:
    """Module docstrings whose first line is a question."""
    found = {name: ast.get_docstring(ast.parse(text)) or "" for name, text in files.items()}
    return [f"{name}: {doc.splitlines()[0]}" for name, doc in found.items() if doc and "?" in doc.splitlines()[0]]


def own_words(files: dict[str, str]) -> list[str]:
    """Uses of a private word that has a standard term."""
    return [
        f"{name}:{number}: {found[0]}"
        for name, text in files.items()
        for number, line in enumerate(text.splitlines(), start=1)
        for found in OWN_WORDS.finditer(line)
    ]


def definitions(files: dict[str, str]) -> list[str]:
    """Definitions of names in DEFINED_ONCE; `TILE = tl.constexpr(plan_format.TILE)` does not count."""
    found = []
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                defined = {node.name}
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                used = set(re.findall(r"\w+", ast.unparse(node.value)))
                defined = {target.id for target in targets if isinstance(target, ast.Name)} - used
            else:
                continue
            found += [f"{each} in {name}" for each in DEFINED_ONCE if each in defined]
    return sorted(found)


def long_signatures(files: dict[str, str]) -> list[str]:
    """Functions with too many parameters; kernels and device functions have a limit of their own."""
    found = []
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and not PUBLIC_CALLS.fullmatch(node.name):
                n = sum(map(len, (node.args.posonlyargs, node.args.args, node.args.kwonlyargs)))
                is_jitted = any(re.match(r"(triton|gluon)\.jit\b", ast.unparse(each)) for each in node.decorator_list)
                if n > (MAX_JITTED_PARAMETERS if is_jitted else MAX_PARAMETERS):
                    found.append(f"{name}: {node.name} takes {n} parameters")
    return found


def test_no_module_docstring_is_a_question() -> None:
    assert questions(python_files(*CODE, "tests")) == []


def test_code_uses_standard_terms() -> None:
    assert own_words(python_files()) == []


def test_shared_facts_are_defined_once() -> None:
    found = definitions(python_files("blocksparse_flash"))
    assert [line.split()[0] for line in found] == sorted(DEFINED_ONCE), found


def test_signatures_are_short() -> None:
    assert long_signatures(python_files("blocksparse_flash", "masks")) == []


def test_the_package_has_few_top_level_files() -> None:
    names = sorted(path.name for path in (ROOT / "blocksparse_flash").glob("*.py"))
    assert len(names) <= MAX_TOP_LEVEL_FILES, names


def function_with(n: int) -> str:
    """A function with n parameters."""
    return f"def f({', '.join(f'x{i}' for i in range(n))}): pass"


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        (questions, '"""What is it?"""', ["code.py: What is it?"]),
        (questions, '"""Sums.\n\nWhy?"""', []),
        (own_words, "x = 1  # is Told", ["code.py:1: Told"]),
        (own_words, "\ndef hand_in(): pass", ["code.py:2: hand_in"]),
        (own_words, "served_rows = 1", ["code.py:1: served"]),
        (own_words, "n_multiprocessors = 1", ["code.py:1: multiprocessors"]),
        (own_words, "WHO = 1", ["code.py:1: WHO"]),
        (own_words, "# who has preserved, reserved and untold descendants", []),
        (definitions, "TILE = 128", ["TILE in code.py"]),
        (definitions, "TILE: int = 128\ndef padded_dim(): pass", ["TILE in code.py", "padded_dim in code.py"]),
        (definitions, "PARTIAL = tl.constexpr(plan_format.PARTIAL)", []),
        (definitions, "from plan_format import TILE\ndef f(TILE): pass", []),
        (long_signatures, function_with(13), ["code.py: f takes 13 parameters"]),
        (long_signatures, function_with(12), []),
        (long_signatures, function_with(13).replace("f(", "attention_with_lse("), []),
        (long_signatures, "@triton.jit\n" + function_with(30), []),
        (long_signatures, "@gluon.jit(do_not_specialize=[])\n" + function_with(31), ["code.py: f takes 31 parameters"]),
    ],
)
def test_a_planted_violation_is_found(rule, text: str, expected: list[str]) -> None:
    assert rule({"code.py": text}) == expected


# ---- the repository ----


def tracked_text() -> dict[str, str]:
    """Path -> text of the files in the repository, without pictures."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("needs a git checkout")
    paths = (ROOT / name for name in listed.stdout.splitlines())
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in paths
        if path.is_file() and path.suffix not in (".png", ".ckpt")
    }


def test_no_file_has_a_path_of_a_machine() -> None:
    machine = re.compile(r"(?<![\w.*}$)])/(home|root|work|Users|mnt|opt|tmp)/\w")
    assert machine.search(" /home/someone")
    assert [name for name, text in tracked_text().items() if machine.search(text)] == ["tests/test_repository.py"]


def test_no_file_has_a_marker_for_later_work() -> None:
    words = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")))
    assert [name for name, text in tracked_text().items() if words.search(text)] == []


def test_makefile_names_files_that_exist() -> None:
    named = re.findall(r"\btests/[\w/*.]+", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert named and [path for path in named if not list(ROOT.glob(path))] == []


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str], str]:
    """The commands that make would run for a target, in a folder with what its targets depend on."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for name in ("pyproject.toml", ".ci/constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")

    # `make test` passes on its options and its level, with which another make prints more
    variables = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "MFLAGS"}

    def run(target: str) -> str:
        command = ["make", "--dry-run", "--file", str(ROOT / "Makefile"), target]
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True).stdout

    return run


def environment(folder: Path, *names: str) -> None:
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / ".venv" / name).write_text("")


def test_an_interrupted_environment_is_made_again(made: Callable[[str], str], tmp_path: Path) -> None:
    """Regression: it had python, but no pip, and no target could be made."""
    environment(tmp_path, "bin/python")
    assert "-m venv .venv" in made("demo") and "pip install" in made("demo")
    environment(tmp_path, "bin/pip")
    assert "-m venv .venv" not in made("demo") and "pip install" in made("demo")
    environment(tmp_path, ".demo")
    assert made("demo").splitlines() == [".venv/bin/python -m benchmarks.lra.first_result"]


def test_the_corpus_of_the_demo_is_made_once(made: Callable[[str], str], tmp_path: Path) -> None:
    """Regression: after an installation it was another one, with which an interrupted demo could not go on."""
    environment(tmp_path, "bin/python", "bin/pip", ".demo")
    assert "benchmarks.lm corpus --max-bytes 5000000 --out out/lm/demo.bin" in made("demo-lm")
    (tmp_path / "out" / "lm").mkdir(parents=True)
    (tmp_path / "out" / "lm" / "demo.bin").write_text("")
    # later than the corpus
    environment(tmp_path, ".demo")
    assert made("demo-lm").splitlines() == [".venv/bin/python -m benchmarks.lm figure demo --corpus out/lm/demo.bin"]


def test_cleaning_keeps_what_was_trained(made: Callable[[str], str]) -> None:
    """Regression: hours of training in out went with the caches."""
    (removed,) = (line.split() for line in made("clean").splitlines() if line.startswith("rm "))
    assert {".venv", "out/site", "dist", ".mypy_cache"} <= {*removed} and "out" not in removed


def test_top_level_folders_are_known() -> None:
    folders = {name.split("/")[0] for name in tracked_text() if "/" in name}
    assert folders <= {*CODE, "tests", "docs", ".ci", ".github"}
