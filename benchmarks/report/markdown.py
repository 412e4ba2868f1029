"""Markdown tables and generated sections of pages."""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterable

import pandas as pd


def table(header: Collection[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of texts; | in a cell is escaped, since it would end the cell."""
    lines = ([cell.replace("|", "\\|") for cell in cells] for cells in (header, *rows))
    head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, "|" + "---|" * len(header), *body])


def code(text: str) -> str:
    """Text as code in a cell. | would end the cell on GitHub; escaped inside backticks, it has a backslash on the site.

    >>> code("local | causal")
    '<code>local &#124; causal</code>'
    """
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def listing(lines: pd.DataFrame, columns: dict[str, str]) -> str:
    """A row for each line. columns: header -> format string of the values of a line, such as "{ms:.2f}"."""
    rows = lines.to_dict("records")
    return table(columns, [[cell.format_map(row) for cell in columns.values()] for row in rows])


def joined(*parts: str) -> str:
    """The parts that are not empty, as paragraphs."""
    return "\n\n".join(filter(None, parts))


def replaced(text: str, sections: dict[str, str]) -> str:
    """The text with each section replaced between `<!-- begin NAME: ... -->` and `<!-- end NAME -->`."""
    for name, section in sections.items():
        pattern = rf"(<!-- begin {name}:[^\n]*-->\n).*?(<!-- end {name} -->)"
        found = [*re.finditer(pattern, text, flags=re.DOTALL)]
        if len(found) != 1:
            raise ValueError(
                f"the text must have one pair of markers `<!-- begin {name}: ... -->`, it has {len(found)}"
            )
        body = f"{section}\n" if section else ""
        text = text[: found[0].end(1)] + body + text[found[0].start(2) :]
    return text
