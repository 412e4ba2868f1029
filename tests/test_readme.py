"""README and docs are short, their code runs, and their names, links, commands and versions exist."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import blocksparse_flash
import masks
from blocksparse_flash import BlockLayout, diffusers, distributed, huggingface, interop, nn
from masks import command_line

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES, MAX_CHARACTERS = 200, 15_000
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (
        ROOT / "README.md",
        *sorted((ROOT / "benchmarks").rglob("README.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}
# pages of developers, with links but without examples
NOTES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("blocksparse_flash/**/TUNING.md")))
}
README = PAGES["README.md"]
# without docs/reference, which is generated from docstrings
DOCS = [name for name in PAGES if name.startswith("docs/") and not name.startswith("docs/reference/")]


class Block(NamedTuple):
    """A block of code of a page.

    reason  from the comment `<!-- not run: REASON -->` above the block; None for a block that runs
    """

    page: str
    language: str
    code: str
    line: int
    reason: str | None


def blocks(pages: dict[str, str]) -> list[Block]:
    pattern = re.compile(
        r"(?:^<!-- not run: (?P<reason>.*) -->\n\n?)?^```(?P<language>\w*)\n(?P<code>.*?)^```", re.M | re.S
    )
    return [
        Block(name, found["language"], found["code"], text.count("\n", 0, found.start("code")), found["reason"])
        for name, text in pages.items()
        for found in pattern.finditer(text)
    ]


BLOCKS = blocks(PAGES)
PYTHON = [pytest.param(block, id=f"{block.page}:{block.line}") for block in BLOCKS if block.language == "python"]
SHELL = [pytest.param(block, id=f"{block.page}:{block.line}") for block in BLOCKS if block.language == "sh"]


# ---- code ----


def run(block: Block) -> None:
    """Runs a block, or only parses it if its page says why it cannot run here."""
    # as many empty lines as its page has above it, so that tracebacks name the right line
    code = "\n" * block.line + block.code
    if block.reason is not None:
        ast.parse(code)
        return
    for package in ("transformers", "diffusers"):
        if package in block.code:
            pytest.importorskip(package, reason=f"needs {package}")
    torch.manual_seed(0)
    exec(compile(code, block.page, "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("block", PYTHON)
def test_python_blocks_run(block: Block) -> None:
    run(block)


def test_a_block_that_is_not_run_is_parsed() -> None:
    marked = "<!-- not run: needs two GPUs -->\n```python\nraise EOFError\n```\n\n```python\nraise EOFError\n```\n"
    skipped, executed = blocks({"page.md": marked})
    assert (skipped.reason, executed.reason) == ("needs two GPUs", None)
    run(skipped)
    with pytest.raises(EOFError):
        run(executed)
    with pytest.raises(SyntaxError):
        run(skipped._replace(code="for"))


def test_every_block_is_found_and_has_a_language() -> None:
    assert len(BLOCKS) == sum(len(re.findall("^```", page, flags=re.M)) for page in PAGES.values()) / 2
    assert {block.language for block in BLOCKS} == {"python", "sh", "bibtex"}
    assert all(block.reason is None or len(block.reason.split()) > 1 for block in BLOCKS)
    assert [name for name in DOCS if not any(block.page == name for block in BLOCKS)] == ["docs/performance.md"]


@pytest.mark.parametrize("block", SHELL)
def test_shell_blocks_name_programs_and_files_that_exist(
    block: Block, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in block.code.replace("\\\n", "").splitlines():
        words = shlex.split(line)
        if "-m" in words:
            module, *arguments = words[words.index("-m") + 1 :]
            assert importlib.util.find_spec(module) is not None, line
            if module == "masks":
                pytest.importorskip("matplotlib", reason="needs matplotlib")
                command_line.main([str(tmp_path / word) if word.endswith(".svg") else word for word in arguments])
                assert list(tmp_path.glob("*.svg"))
        else:
            assert line.startswith(("git clone https://", "cd ", "pip install ")), line
        assert [word for word in words if word.endswith((".yaml", ".py")) and not (ROOT / word).exists()] == []


# ---- the README ----


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MAX_LINES
    assert len(README) <= MAX_CHARACTERS


def test_the_first_example_has_leaves_with_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    """In bfloat16, which the fastest backend supports."""
    first = next(block for block in BLOCKS if block.page == "README.md" and block.language == "python")
    scope: dict[str, object] = {}
    exec(first.code, scope)
    assert len([line for line in first.code.splitlines() if line and "import" not in line]) <= 10
    for name in "qkv":
        tensor = scope[name]
        assert isinstance(tensor, torch.Tensor)
        assert tensor.dtype == torch.bfloat16 and tensor.is_leaf and tensor.grad is not None
    assert capsys.readouterr().out == "torch.Size([1, 4, 2048, 64])\n"


def rows_of(page: str, head: str) -> list[list[str]]:
    """The cells of the table that begins with `head`."""
    table = page[page.index(head) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table[2:]]


def test_the_mask_calls_of_the_readme_give_layouts() -> None:
    calls = [row[0].strip("`") for row in rows_of(README, "| Mask | A token attends to |")]
    assert len(calls) == 8
    assert all(isinstance(eval(call, {"masks": masks, "n": 4096}), BlockLayout) for call in calls)


def test_the_number_of_masks_is_right() -> None:
    # build and orders are not masks
    count = sum(name != "build" and not name.endswith("_order") for name in masks.__all__)
    assert f"**{count} masks are included**" in README


def test_the_hugging_face_example_has_at_most_five_lines() -> None:
    (block,) = (block for block in BLOCKS if block.page == "README.md" and "transformers" in block.code)
    assert len([line for line in block.code.splitlines() if line and "import" not in line]) <= 5


# ---- names ----


def test_every_mask_and_order_is_on_the_page_of_masks() -> None:
    page = PAGES["docs/masks.md"]
    drawn = re.findall(r"^\| !\[(\w+)\]\(pictures/\1\.png\) \| \*\*`\1\(", page, flags=re.M)
    rows = rows_of(page, "| Order | Tokens that end up close together |")
    orders = [row[0].strip("`").partition("(")[0] for row in rows]
    assert sorted([*drawn, *orders, "build"]) == masks.__all__


def test_every_format_is_in_the_table() -> None:
    cells = [cell for row in rows_of(PAGES["docs/coming_from.md"], "| Library | From") for cell in row[1:]]
    assert sorted(re.findall(r"`(\w+)\(", "".join(cells))) == [name for name in interop.__all__ if name.islower()]


OWNERS: dict[str, Callable[[str], bool]] = {
    "masks": lambda name: hasattr(masks, name) or importlib.util.find_spec(f"masks.{name}") is not None,
    "interop": lambda name: hasattr(interop, name),
    "diffusers": lambda name: hasattr(diffusers, name),
    "huggingface": lambda name: hasattr(huggingface, name),
    "nn": lambda name: hasattr(nn, name) or hasattr(torch.nn, name),
    "distributed": lambda name: hasattr(distributed, name),
    "BlockLayout": lambda name: hasattr(BlockLayout, name),
    "layout": lambda name: hasattr(BlockLayout, name),
    "plan": lambda name: hasattr(distributed.ContextPlan, name) or name in distributed.ContextPlan.__annotations__,
}


def unknown_names(text: str) -> list[str]:
    """Names in inline code, such as `layout.density`, that do not exist."""
    found = re.findall(rf"(?<![\w./-])({'|'.join(OWNERS)})\.(\w+)", " ".join(re.findall(r"`([^`\n]+)`", text)))
    return [f"{owner}.{name}" for owner, name in found if not OWNERS[owner](name)]


@pytest.mark.parametrize("name", ["README.md", *DOCS])
def test_names_in_the_text_exist(name: str) -> None:
    assert unknown_names(prose(PAGES[name])) == []


def test_unknown_names_are_found() -> None:
    text = "`masks.local(n)`, `masks.sliding_window(n)`, `layout.density` and `layout.sparsity`; out/layout.png"
    assert unknown_names(text) == ["masks.sliding_window", "layout.sparsity"]


# ---- links ----


def prose(page: str) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)


def anchors(page: str) -> set[str]:
    """Link anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", [name for name in {**PAGES, **NOTES} if not name.startswith("docs/reference/")])
def test_links_exist(name: str) -> None:
    text = prose({**PAGES, **NOTES}[name])
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")]
    assert links or name in NOTES
    for link in links:
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def test_the_notebook_and_every_page_are_linked() -> None:
    for name in ("README.md", "docs/index.md"):
        links = re.findall(r"\]\(([^)#]+)", prose(PAGES[name]))
        linked = {(ROOT / name).parent.joinpath(link).resolve() for link in links if not link.startswith("https://")}
        pages = {ROOT / page for page in DOCS if page != name} | {ROOT / "docs" / "quickstart.ipynb"}
        assert pages <= linked, name


def index_readme() -> str:
    """README.md as a package index shows it: with the substitutions of pyproject.toml."""
    hooks = project()["tool"]["hatch"]["metadata"]["hooks"]
    text = README
    for each in hooks["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    return text


def project() -> dict[str, Any]:
    """pyproject.toml."""
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_a_package_index_shows_the_pictures_of_the_readme() -> None:
    home = project()["project"]["urls"]["Homepage"]
    raw = home.replace("https://github.com/", "https://raw.githubusercontent.com/")
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", index_readme())
    assert len(pictures) == 2 and all(picture.startswith(f"{raw}/main/benchmarks/results/") for picture in pictures)
    links = re.findall(r"(?<!!)\[[^\]]*\]\(([^)]+)\)", index_readme())
    assert f"{home}/blob/main/docs/masks.md" in links and all(link.startswith("https://") for link in links)


def test_the_source_distribution_has_the_files_that_its_build_reads() -> None:
    """A readme made by a plugin is not included automatically."""
    hatch = project()["tool"]["hatch"]
    read = [fragment["path"] for fragment in hatch["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]]
    included = [path.lstrip("/") for path in hatch["build"]["targets"]["sdist"]["include"]]
    assert {*read, "mkdocs.yml", "CITATION.cff"} <= {*included}
    assert [path for path in included if not (ROOT / path).exists()] == []


def test_the_address_of_the_repository_is_the_same_everywhere() -> None:
    home = project()["project"]["urls"]["Homepage"]
    assert all(url.startswith(home) for url in project()["project"]["urls"].values())
    for name in ("README.md", "docs/index.md", "CITATION.cff", "mkdocs.yml"):
        found = re.findall(r"https://github\.com/[\w.-]+/[\w.-]+", (ROOT / name).read_text(encoding="utf-8"))
        assert found and {*found} == {home}, name


# ---- versions and commands ----


def test_the_cited_version_is_that_of_the_package() -> None:
    version = blocksparse_flash.__version__
    assert re.findall(r"version = {(.*?)}", README) == [version]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", citation, flags=re.M) == [version]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_required_versions_are_those_of_the_package() -> None:
    metadata = project()["project"]
    python = metadata["requires-python"].removeprefix(">=")
    torch_version = next(each.removeprefix("torch>=") for each in metadata["dependencies"] if each.startswith("torch"))
    for name in ("README.md", "docs/index.md"):
        assert f"You need Python {python} and PyTorch {torch_version}, or later versions." in PAGES[name]
    assert f"Programming Language :: Python :: {python}" in metadata["classifiers"]


def escaped_bars(text: str) -> list[str]:
    """Code in table cells with `\\|`: the site shows the backslash."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [code for row in rows for code in re.findall(r"`[^`]*`", row) if r"\|" in code]


def test_no_code_in_a_table_has_an_escaped_bar() -> None:
    assert escaped_bars(r"| `a \| b` | c \| d | `e` |") == [r"`a \| b`"]
    assert [code for page in PAGES.values() for code in escaped_bars(page)] == []


def test_extras_exist() -> None:
    extras = {extra for page in PAGES.values() for extra in re.findall(r"pip install '[\w.]+\[(\w+)\]'", page)}
    assert {"huggingface", "docs"} <= extras <= project()["project"]["optional-dependencies"].keys()


def test_every_extra_is_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `pip install '\.\[(\w+)\]'` \|", PAGES["docs/index.md"], flags=re.MULTILINE)
    assert {name for pair in rows for name in pair} == project()["project"]["optional-dependencies"].keys()


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", "\n".join(PAGES.values()), flags=re.MULTILINE))
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {"demo", "docs", "test"} <= targets <= made
