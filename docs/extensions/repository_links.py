"""MkDocs hook: links of pages to files of the repository outside docs/, and links of the page for errors.

In the repository a page links to ../benchmarks/results/speed.png, which shows the picture wherever the page is read. In
the site, pictures are copied to results/, and other files are linked on the repository's web pages.

404.html replaces pages of any folder, so MkDocs links from it by absolute paths. These are right if `site_url` is set.
Without it they would lead out of the folder in which the site is read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
# pictures of docs/*.md, as they are written there and as files of the site
PICTURE = re.compile(r"\.\./benchmarks/(results/[\w-]+\.png)")
OUTSIDE = re.compile(r"\]\(\.\./((?!benchmarks/results/[\w-]+\.png)[\w./-]+)(#[\w-]+)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pictures of benchmarks/results to the site."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrites the links of a page; raises an error if a linked file does not exist."""
    if "/" in page.file.src_uri:
        return markdown

    def on_the_web(found: re.Match[str]) -> str:
        if not (ROOT / found[1]).exists():
            raise FileNotFoundError(f"docs/{page.file.src_uri} links to {found[1]}, which does not exist")
        kind = "tree" if (ROOT / found[1]).is_dir() else "blob"
        return f"]({config.repo_url.rstrip('/')}/{kind}/main/{found[1]}{found[2] or ''})"

    return OUTSIDE.sub(on_the_web, PICTURE.sub(r"\1", markdown))


def on_template_context(context: Any, *, template_name: str, config: Any) -> Any:
    """Makes the links of 404.html relative if the address of the site is unknown."""
    if template_name == "404.html" and not config.site_url:
        context["base_url"] = "."
    return context
