"""Every mask has a picture and a row in docs/masks.md."""

from __future__ import annotations

from pathlib import Path

import pytest

import masks

pytest.importorskip("pandas", reason="needs the extra [bench]")

from benchmarks.report import gallery
from benchmarks.report.markdown import replaced
from blocksparse_flash import BlockLayout

# build reads the others, orders are no masks
MASKS = [name for name in masks.__all__ if name != "build" and not name.endswith("_order")]


def test_every_mask_has_an_example_and_a_family() -> None:
    assert sorted(name for names in gallery.FAMILIES.values() for name in names) == MASKS


@pytest.mark.parametrize("name", sorted(gallery.EXAMPLES))
def test_examples_show_something(name: str) -> None:
    """In the blocks of the gallery, small enough to see, neither empty nor everything."""
    layout = gallery.example(name)
    assert isinstance(layout, BlockLayout)
    assert layout.block_size == (gallery.BLOCK_SIZE, gallery.BLOCK_SIZE)
    assert 0 < layout.density < 1 and max(layout.shape[2:]) <= 4 * gallery.LENGTH
    assert gallery.call(name).startswith(f"{name}\n")


def test_a_row_has_the_signature_the_sentence_and_the_paper() -> None:
    assert gallery.signature("local") == "local(length, *, window)"
    assert gallery.paper("longformer") == '[Beltagy et al., "Longformer"](https://arxiv.org/abs/2004.05150)'
    assert gallery.paper("erdos_renyi") == '[Zaheer et al., "Big Bird"](https://arxiv.org/abs/2007.14062)'
    assert gallery.paper("tile_order").startswith("[Zhang et al.") and gallery.paper("morton_order") == ""
    row = next(line for line in gallery.tables().splitlines() if line.startswith("| ![tree]"))
    sentence = "Each node attends to itself, to its ancestors, and to the whole prompt."
    assert row.startswith(f"| ![tree](pictures/tree.png) | **`tree(parents, *, prompt=0)`**<br>{sentence}<br>[Miao")


def test_the_page_of_masks_is_up_to_date() -> None:
    """If this fails, `python -m benchmarks.report.gallery` writes the tables anew."""
    text = (gallery.ROOT / gallery.PAGE).read_text(encoding="utf-8")
    assert replaced(text, {"masks": gallery.tables()}) == text


def test_the_command_draws_every_mask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    for folder in (gallery.RESULTS, gallery.PICTURES):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / gallery.PAGE).write_text("<!-- begin masks: here -->\n<!-- end masks -->\n")
    monkeypatch.setattr(gallery, "ROOT", tmp_path)
    gallery.main()
    drawn = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png"))
    assert drawn == sorted([f"{gallery.RESULTS}/layouts.png", *(f"{gallery.PICTURES}/{name}.png" for name in MASKS)])
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in drawn)
    assert "## Images and video" in (tmp_path / gallery.PAGE).read_text()


def test_a_figure_has_a_panel_for_each_layout_and_one_legend() -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    layouts = {gallery.call(name): gallery.example(name) for name in ("local", "neighborhood", "tree")}
    figure = gallery.draw(layouts, across=2)
    assert [axis.get_title().splitlines()[0] for axis in figure.axes] == ["local", "neighborhood", "tree"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*gallery.MEANINGS.values()]
    swatches = figure.legends[0].legend_handles[:3]
    assert len({handle.get_facecolor() for handle in swatches}) == 3


def test_pictures_are_in_the_repository() -> None:
    names = {path.stem for path in (gallery.ROOT / gallery.PICTURES).glob("*.png")}
    assert names == {*MASKS} and (gallery.ROOT / gallery.RESULTS / "layouts.png").is_file()
