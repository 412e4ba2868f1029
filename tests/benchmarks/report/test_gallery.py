"""The gallery shows every mask, and its pictures are in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

import masks
from benchmarks.report import gallery
from blocksparse_flash import BlockLayout

# build reads the others, orders are no masks
MASKS = [name for name in masks.__all__ if name != "build" and not name.endswith("_order")]


def test_every_mask_has_an_example() -> None:
    assert [*gallery.EXAMPLES] == MASKS


@pytest.mark.parametrize("name", sorted(gallery.EXAMPLES))
def test_examples_show_something(name: str) -> None:
    """In the blocks of the gallery, small enough to see, neither empty nor everything."""
    layout = gallery.example(name)
    assert isinstance(layout, BlockLayout)
    assert layout.block_size == (gallery.BLOCK_SIZE, gallery.BLOCK_SIZE)
    assert 0 < layout.density < 1 and max(layout.shape[2:]) <= 4 * gallery.LENGTH
    assert gallery.call(name).startswith(f"{name}\n")


def test_the_command_draws_every_panel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    monkeypatch.setattr(gallery, "RESULTS", tmp_path)
    gallery.main()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gallery.png", "layouts.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
    figure = gallery.draw(gallery.panels(), across=4)
    assert len(figure.axes) == len(MASKS)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*gallery.MEANINGS.values()]
    swatches = figure.legends[0].legend_handles[:3]
    assert len({handle.get_facecolor() for handle in swatches}) == 3
    titles = [axis.get_title() for axis in figure.axes]
    assert all(title.startswith(name) for title, name in zip(titles, MASKS, strict=True))


def test_results_are_drawn() -> None:
    assert all((gallery.RESULTS / name).is_file() for name in ("layouts.png", "gallery.png"))
