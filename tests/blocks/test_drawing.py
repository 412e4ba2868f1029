"""Drawings show the mask, with labels inside the figure and none overlapping; bad arguments are refused."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from blocksparse_flash import BlockLayout
from tests.support import cases
from tests.support.dense_masks import Problem, problems

pytest.importorskip("matplotlib", reason="needs matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

_ROOT = Path(__file__).parents[2]
# what a cell of an image holds
EMPTY, PARTIAL, FULL = 0, 1, 2


def kinds_of(mask: np.ndarray, block_size: tuple[int, int]) -> np.ndarray:
    """Block by block: (n_rows, n_cols)."""
    n_rows, n_cols = (-(-length // side) for length, side in zip(mask.shape, block_size, strict=True))
    kinds = np.zeros((n_rows, n_cols), int)
    for row, col in np.ndindex(n_rows, n_cols):
        block = mask[row * block_size[0] :, col * block_size[1] :][: block_size[0], : block_size[1]]
        kinds[row, col] = FULL if block.all() else PARTIAL if block.any() else EMPTY
    return kinds


def image_of(axis: Any) -> np.ndarray:
    (image,) = axis.images
    return np.asarray(image.get_array())


@given(problems())
@settings(max_examples=15)
def test_cells_are_blocks_and_bars_count_them(problem: Problem) -> None:
    mask = problem.mask[:1, :1]
    layout = BlockLayout.from_dense(mask, block_size=problem.block_size)
    figure = layout.plot()
    axis = figure.axes[0]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("key (token)", "query (token)")
    # queries run down
    assert axis.get_xlim() == (0, max(mask.shape[3], 1)) and axis.get_ylim() == (max(mask.shape[2], 1), 0)
    if not mask.size:
        return
    np.testing.assert_array_equal(image_of(axis), kinds_of(mask[0, 0], layout.block_size))
    bars = axis.child_axes[0].patches[0]
    np.testing.assert_array_equal(bars.get_data().values, np.diff(layout.indptr[0, 0].numpy()))


@given(problems())
@settings(max_examples=15)
def test_a_region_shows_its_pairs(problem: Problem) -> None:
    mask, random = problem.mask[:1, :1], problem.random
    if not mask.size:
        return
    sides = []
    for length in mask.shape[2:]:
        start = int(random.integers(0, length))
        sides.append((start, int(random.integers(start + 1, length + 1))))
    (top, bottom), (left, right) = sides
    figure = BlockLayout.from_dense(mask, block_size=problem.block_size).plot(tokens=tuple(sides))
    (axis,) = figure.axes
    np.testing.assert_array_equal(image_of(axis) == FULL, mask[0, 0, top:bottom, left:right])
    assert axis.images[0].get_extent() == [left, right, bottom, top]
    borders = [line.get_xdata()[0] for line in axis.lines if line.get_xdata()[0] == line.get_xdata()[1]]
    assert borders == [x for x in range(left + 1, right) if x % problem.block_size[1] == 0]


def test_heads_that_differ_have_panels_and_heads_alike_share_one() -> None:
    layout = next(case.build() for case in cases.LAYOUTS if str(case) == "per-batch-and-head")
    figure = layout.plot(batch=1)
    assert len(figure.axes) == 4
    for head, axis in enumerate(figure.axes):
        np.testing.assert_array_equal(image_of(axis), kinds_of(layout.to_dense()[1, head].numpy(), layout.block_size))
        assert axis.get_title().startswith(f"batch 1, head {head}: density ")
    one = layout.plot(batch=0, head=2)
    np.testing.assert_array_equal(image_of(one.axes[0]), kinds_of(layout.to_dense()[0, 2].numpy(), layout.block_size))
    assert one.axes[0].get_title().startswith("batch 0, head 2: ")
    alike = BlockLayout.stack_heads([layout.batch(0).head(1)] * 3).plot()
    assert len(alike.axes) == 1 and alike.axes[0].get_title().startswith("all 3 heads alike: ")


def test_many_blocks_share_dots_and_the_title_says_so() -> None:
    rows = np.arange(2048)
    layout = BlockLayout.from_blocks(np.r_[rows, 1], np.r_[rows, 0], 2048 * 16, 2048 * 16, block_size=16)
    axis = layout.plot().axes[0]
    assert "a dot is 4 x 4 blocks: full if all are, empty if all are, else partial" in axis.get_title()
    np.testing.assert_array_equal(image_of(axis), np.eye(512) * PARTIAL)


def test_axes_of_the_caller_are_used_and_their_figure_returned() -> None:
    layout = cases.LAYOUTS[8].build()
    figure = Figure()
    axes = figure.subplots(1, 2)
    assert layout.plot(axes[1]) is figure
    assert not axes[0].images and len(axes[1].images) == 1
    assert [text.get_text() for text in axes[1].get_legend().get_texts()] == ["full", "partial", "empty"]


def written_in(figure: Any) -> list[tuple[str, Any]]:
    """(words, box) of every text that is drawn; ticks beyond the limits of an axis have a text that is not."""
    drawn: dict[int, Any] = {}
    draw = Text.draw

    def note(self: Text, *args: Any, **others: Any) -> None:
        drawn[id(self)] = self
        draw(self, *args, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", note)
        FigureCanvasAgg(figure).draw()
    words = [text for text in drawn.values() if text.get_visible() and text.get_text()]
    return [(text.get_text(), text.get_window_extent()) for text in words]


def misplaced(figure: Any) -> list[tuple[str, ...]]:
    """Words that touch others, and words that reach over the edge."""
    written = written_in(figure)
    assert written
    width, height = figure.get_size_inches() * figure.dpi
    cut = [(words,) for words, box in written if min(box.x0, box.y0) < 0 or box.x1 > width or box.y1 > height]
    return cut + [
        (one, other)
        for i, (one, box) in enumerate(written)
        for other, other_box in written[i + 1 :]
        if box.overlaps(other_box)
    ]


_PICTURES: dict[str, Callable[[], Any]] = {
    "square": lambda: cases.LAYOUTS[8].build().plot(),
    "wide": lambda: BlockLayout.from_ranges([0] * 4, [60] * 4, 64, 960, block_size=16).plot(),
    "tall": lambda: BlockLayout.from_ranges([0] * 60, [4] * 60, 960, 64, block_size=16).plot(),
    "long": lambda: BlockLayout.from_blocks([0], [0], 1 << 20, 1 << 20, block_size=128).plot(),
    "heads": lambda: next(case.build() for case in cases.LAYOUTS if str(case) == "per-head").plot(),
    "region": lambda: cases.LAYOUTS[8].build().plot(tokens=((0, 100), (30, 400))),
    "empty": lambda: BlockLayout.from_blocks([], [], 0, 0, block_size=16).plot(),
}


@pytest.mark.parametrize("name", _PICTURES)
@pytest.mark.parametrize("kind", ["svg", "png"])
def test_pictures_save_and_no_words_overlap(name: str, kind: str) -> None:
    figure = _PICTURES[name]()
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind)
    assert buffer.getvalue()[:5] in (b"<?xml", b"\x89PNG\r")
    assert misplaced(figure) == []


def test_what_is_misplaced_is_seen() -> None:
    figure = Figure()
    figure.text(0.5, 0.5, "one")
    figure.text(0.51, 0.5, "other")
    figure.text(0.99, 0.1, "beyond")
    assert misplaced(figure) == [("beyond",), ("one", "other")]


def test_matplotlib_is_loaded_when_asked_for_and_missed_by_name() -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from blocksparse_flash import BlockLayout\n"
        "layout = BlockLayout.from_blocks([0], [0], 16, 16, block_size=16)\n"
        "try: layout.plot()\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=_ROOT)
    assert done.stdout.strip() == "layout.plot needs matplotlib: pip install 'blocksparse_flash[plot]'"
    assert "plot = [" in (_ROOT / "pyproject.toml").read_text(encoding="utf-8")


_GOOD = BlockLayout.from_dense(torch.ones(2, 3, 40, 2000, dtype=torch.bool).tril(9), block_size=16)
_HEADS = BlockLayout.stack_heads([_GOOD, ~_GOOD])
_MANY = BlockLayout.stack_heads([_GOOD.batch(0)] * 22)

_BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "ax-figure": (lambda: _GOOD.plot(Figure()), TypeError, "ax must be matplotlib Axes, or None .* got Figure"),
    "ax-of-heads": (
        lambda: _HEADS.plot(Figure().subplots()),
        ValueError,
        "ax has room for one panel, but 6 heads differ: choose one by head=",
    ),
    "batch-large": (lambda: _GOOD.plot(batch=2), ValueError, "batch must be in 0 .. 1, got 2; the layout has 2"),
    "batch-none": (lambda: _GOOD.plot(batch=None), TypeError, "batch must be an int, got None"),
    "head-large": (lambda: _GOOD.plot(head=3), ValueError, "head must be in 0 .. 2, got 3; the layout has 3"),
    "head-float": (lambda: _GOOD.plot(head=0.0), TypeError, "head must be an int, got 0.0"),
    "head-none-of-many": (
        _MANY.plot,
        ValueError,
        "head must be given for a layout of more than 64 heads, got None of 66",
    ),
    "tokens-slice": (
        lambda: _GOOD.plot(tokens=slice(3)),
        TypeError,
        r"tokens must be \(\(q_start, q_stop\), \(kv_start, kv_stop\)\), got slice",
    ),
    "tokens-flat": (lambda: _GOOD.plot(tokens=(0, 10)), TypeError, r"tokens must be \(\(q_start"),
    "tokens-float": (
        lambda: _GOOD.plot(tokens=((0, 1.5), (0, 1))),
        TypeError,
        "tokens: q_stop must be an int, got 1.5",
    ),
    "tokens-beyond": (
        lambda: _GOOD.plot(tokens=((0, 41), (0, 1))),
        ValueError,
        r"tokens must be 0 <= q_start < q_stop <= q_len = 40, at most 1024 apart, got \(0, 41\); tokens=None",
    ),
    "tokens-nothing": (
        lambda: _GOOD.plot(tokens=((0, 1), (5, 5))),
        ValueError,
        "tokens must be 0 <= kv_start < kv_stop",
    ),
    "tokens-many": (lambda: _GOOD.plot(tokens=((0, 1), (0, 1025))), ValueError, r"at most 1024 apart, got \(0, 1025\)"),
}


@pytest.mark.parametrize("name", _BAD)
def test_wrong_calls_are_refused_by_name(name: str) -> None:
    call, error, message = _BAD[name]
    with pytest.raises(error, match=message):
        call()
