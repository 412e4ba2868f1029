"""The documentation site has every page and public name, turns docstrings into Markdown and builds without warnings."""

from __future__ import annotations

import html
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import blocksparse_flash
import masks
from blocksparse_flash import diffusers, distributed, huggingface, interop, nn, paged, vllm_omni
from masks import deepspeed

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
# packages with one entry each; masks has one entry per name, since its modules and functions share names
WHOLE = (blocksparse_flash, nn, paged, interop, distributed, diffusers, vllm_omni, huggingface, deepspeed)


def extension(name: str, monkeypatch: pytest.MonkeyPatch, **packages: object) -> ModuleType:
    """A module of docs/extensions, with stand-ins for packages of the extra `docs`."""
    for package, stand_in in packages.items():
        monkeypatch.setitem(sys.modules, package.replace("__", "."), stand_in)
    spec = importlib.util.spec_from_file_location(name, DOCS / "extensions" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def docstrings(monkeypatch: pytest.MonkeyPatch) -> Any:
    return extension("docstrings", monkeypatch, griffe=SimpleNamespace(Extension=object))


@pytest.fixture
def repository_links(monkeypatch: pytest.MonkeyPatch) -> Any:
    files = SimpleNamespace(File=SimpleNamespace(generated=lambda _, uri, abs_src_path: (uri, abs_src_path)))
    return extension("repository_links", monkeypatch, mkdocs__structure__files=files)


# ---- contents ----


def test_every_page_is_in_the_navigation() -> None:
    pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert sorted(re.findall(r": (\S+\.md)$", CONFIG, flags=re.MULTILINE)) == pages


def test_every_public_module_has_a_page() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    entries = re.findall(r"^::: (\S+)$", pages, flags=re.MULTILINE)
    expected = [module.__name__ for module in WHOLE]
    expected += [f"{getattr(masks, name).__module__}.{name}" for name in masks.__all__]
    assert sorted(entries) == sorted(expected)


def test_the_site_has_every_public_name(tmp_path: Path) -> None:
    """Builds the site without warnings."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="needs the extra `docs`")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {
        name
        for page in (tmp_path / "reference").glob("*.html")
        for name in re.findall(r'id="([\w.]+)"', page.read_text())
    }
    # constants have no docstring
    public = {f"{module.__name__}.{name}" for module in WHOLE[:-1] for name in module.__all__ if not name.isupper()}
    assert public <= found
    assert {f"{getattr(masks, name).__module__}.{name}" for name in masks.__all__} <= found
    pictures = re.findall(r'<img [^>]*src="([^"]+)"', (tmp_path / "masks.html").read_text())
    assert len(pictures) > 30 and all((tmp_path / picture).is_file() for picture in pictures)
    # read from a folder: links of the error page stay in it, and the search loads nothing from other servers
    assert not re.findall(r'(?:href|src)="/', (tmp_path / "404.html").read_text())
    scripts = re.findall(r'<script src="([^"]+)"', (tmp_path / "index.html").read_text())
    assert "style/iframe-worker.js" in scripts and all((tmp_path / script).is_file() for script in scripts)
    assert (tmp_path / "search" / "search_index.js").is_file()


# ---- docstrings ----

DOCSTRING = """Each token attends to `window` tokens.

Weights are steps of 2**-16; from_<library> is text. window=1 on 2 tokens:
    1 1
    1 1

length      tokens, or (q_len, kv_len)
kv_lengths_ int32 (batch,); a name that fills
            the column
a, b        two names
raises      ValueError

>>> local(2, window=1).nnz
1
"""


def test_a_docstring_becomes_markdown(docstrings: Any) -> None:
    assert docstrings.markdown(DOCSTRING) == "\n\n".join(
        [
            "Each token attends to `window` tokens.",
            "Weights are steps of 2\\*\\*-16; from\\_&lt;library> is text. window=1 on 2 tokens:",
            "```text\n1 1\n1 1\n```",
            "`length`\n:   tokens, or (q\\_len, kv\\_len)",
            "`kv_lengths_`\n:   int32 (batch,); a name that fills the column",
            "`a, b`\n:   two names",
            "`raises`\n:   ValueError",
            "```pycon\n>>> local(2, window=1).nnz\n1\n```",
        ]
    )


def test_no_public_docstring_loses_a_word(docstrings: Any) -> None:
    """The Markdown of every public name and method has the words of the docstring."""
    things = [getattr(module, name) for module in (*WHOLE, masks) for name in getattr(module, "__all__", vars(module))]
    things += [member for thing in things if inspect.isclass(thing) for member in vars(thing).values()]
    texts = [text for thing in things if callable(thing) and (text := inspect.getdoc(thing))]
    assert len(texts) > 100
    for text in texts:
        markdown = re.sub(r"\\(?=[*_\[\]\\#])", "", docstrings.markdown(text))
        markdown = re.sub(r"^```(pycon|text)?$|^:  ", "", markdown, flags=re.MULTILINE)
        assert html.unescape(markdown).replace("`", "").split() == text.replace("`", "").split()


# ---- links to the repository ----


def test_pictures_and_files_of_the_repository_are_linked(repository_links: Any) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="cost.md"))
    config = SimpleNamespace(repo_url="https://example.com/repository/")

    def linked(text: str) -> str:
        return repository_links.on_page_markdown(text, page=page, config=config, files=None)

    assert linked("![a](../benchmarks/results/speed.png)") == "![a](results/speed.png)"
    assert linked("[b](masks.md#a)") == "[b](masks.md#a)"
    web = "https://example.com/repository"
    assert linked("[c](../benchmarks/README.md#sweeps)") == f"[c]({web}/blob/main/benchmarks/README.md#sweeps)"
    assert linked("[d](../benchmarks/results)") == f"[d]({web}/tree/main/benchmarks/results)"
    with pytest.raises(FileNotFoundError, match=r"docs/cost\.md links to missing\.md"):
        linked("[e](../missing.md)")


def test_pictures_of_results_are_copied(repository_links: Any) -> None:
    copied = dict(repository_links.on_files([], SimpleNamespace()))
    assert copied["results/speed.png"] == str(ROOT / "benchmarks" / "results" / "speed.png")


@pytest.mark.parametrize(
    ("template", "site_url", "expected"),
    [("404.html", "", "."), ("404.html", "https://example.com/a/", "/a/"), ("main.html", "", "/a/")],
)
def test_links_of_the_error_page_are_relative_if_the_address_of_the_site_is_unknown(
    repository_links: Any, template: str, site_url: str, expected: str
) -> None:
    context, config = {"base_url": "/a/"}, SimpleNamespace(site_url=site_url)
    assert repository_links.on_template_context(context, template_name=template, config=config)["base_url"] == expected
