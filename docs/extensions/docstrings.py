"""Griffe extension: docstrings as Markdown.

Docstrings of this repository are written for `help()`: paragraphs, tables of fields (a name, spaces and a description,
whose further lines are indented), drawings and doctests. Paragraphs stay, fields become definition lists, drawings and
doctests become code blocks.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

# the names of a field, and the spaces before its description
FIELD = re.compile(r"^(\S(?:.*?\S)??)(\s{2,})\S")
# characters; longer first columns are sentences or drawings
LONGEST_NAMES = 50
# an indent of this many spaces begins a drawing
DRAWN = "  "


def wide(line: str) -> re.Match[str] | None:
    """The names and spaces of a line of a table of fields."""
    found = FIELD.match(line)
    return found if found and len(found[1]) <= LONGEST_NAMES and not found[1].endswith(".") else None


def text_column(lines: list[str]) -> int | None:
    """The column in which the descriptions of a table of fields begin; None for a paragraph or a drawing."""
    columns = [found.end(2) for found in map(wide, lines) if found]
    first = wide(lines[0])
    if first is None or not re.fullmatch(r"[\w`\"', *./()-]+", first[1]) or not re.search(r"[A-Za-z]", first[1]):
        return None
    return max(set(columns), key=columns.count)


def fields(lines: list[str], column: int) -> list[tuple[str, list[str]]]:
    """(names, lines of the description) of each row of a table of fields."""
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        row = wide(line)
        if row:
            found.append((row[1], [line[row.end(2) :]]))
        elif not line.startswith(" ") and line[column - 1 : column] == " ":
            # a name as long as its column
            found.append((line[:column].strip(), [line[column:]]))
        else:
            found[-1][1].append(line.strip())
    return found


def escaped(text: str) -> str:
    """Text whose characters outside of backticks mean nothing in Markdown: 2**-16, <library>, mesh["context"]."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if part.startswith("`") else _plain(part) for part in parts)


def _plain(text: str) -> str:
    return re.sub(r"([*_\[\]\\#])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))


def fenced(language: str, lines: list[str]) -> str:
    return f"```{language}\n" + textwrap.dedent("\n".join(lines)) + "\n```"


def markdown(docstring: str) -> str:
    """The Markdown of a docstring."""
    parts: list[str] = []
    for paragraph in re.split(r"\n\s*\n", docstring.strip()):
        lines = paragraph.splitlines()
        column = text_column(lines)
        if lines[0].lstrip().startswith(">>> "):
            parts.append(fenced("pycon", lines))
        elif column is not None:
            parts += [f"`{names}`\n:   {escaped(' '.join(words))}" for names, words in fields(lines, column)]
        else:
            n_text = next((index for index, line in enumerate(lines) if line.startswith(DRAWN)), len(lines))
            if n_text:
                parts.append(escaped("\n".join(lines[:n_text])))
            if n_text < len(lines):
                parts.append(fenced("text", lines[n_text:]))
    return "\n\n".join(parts)


class FieldTables(griffe.Extension):
    """Rewrites the docstring of every object that Griffe loads."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
