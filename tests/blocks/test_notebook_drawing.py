"""What notebooks show of a layout: SVG and HTML, parsed and compared block by block."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.blocks import drawing
from tests.support.dense_masks import Problem, problems

NAMESPACE = "{http://www.w3.org/2000/svg}"
KINDS = {drawing._COLORS[kind]: kind for kind in range(3)}


def squares(svg: str) -> np.ndarray:
    """The kind of each square, read from the paths."""
    root = ET.fromstring(svg)
    left, top, width, height = map(int, root.attrib["viewBox"].split())
    assert (left, top) == (0, 0) and root.find(f"{NAMESPACE}rect") is not None
    found = np.zeros((height, width), int)
    for path in root.findall(f"{NAMESPACE}path"):
        d, kind = path.attrib["d"], KINDS[path.attrib["fill"]]
        runs = re.findall(r"M(\d+) (\d+)h(\d+)v1h-(\d+)z", d)
        assert d == "".join(f"M{x} {y}h{n}v1h-{n}z" for x, y, n, _ in runs)
        for x, y, n, _ in runs:
            row = found[int(y), int(x) : int(x) + int(n)]
            # inside the picture, and nothing drawn twice
            assert len(row) == int(n) and not row.any()
            row[:] = kind
    return found


def kinds_of(layout: BlockLayout) -> np.ndarray:
    mask, (block_q, block_kv) = layout.to_dense()[0, 0].numpy(), layout.block_size
    kinds = np.zeros((layout.n_rows, layout.n_cols), int)
    for row, col in np.ndindex(*kinds.shape):
        block = mask[row * block_q : (row + 1) * block_q, col * block_kv : (col + 1) * block_kv]
        kinds[row, col] = 2 if block.all() else int(block.any())
    return kinds


@given(problems())
@settings(max_examples=25)
def test_squares_are_blocks(problem: Problem) -> None:
    layout = BlockLayout.from_dense(problem.mask, block_size=problem.block_size)
    if layout.n_rows * layout.n_cols:
        assert max(layout.n_rows, layout.n_cols) <= 64
        np.testing.assert_array_equal(squares(layout._repr_svg_()), kinds_of(layout))


def test_pictures_of_long_layouts_stay_small() -> None:
    layout = masks.random(64 * 1024, density=0.2, seed=0, block_size=64)
    assert squares(layout._repr_svg_()).shape == (64, 64)
    checks = BlockLayout.from_block_mask(
        (torch.arange(64)[:, None] + torch.arange(64)) % 2 == 0, 4096, 4096, block_size=64
    )
    assert len(checks._repr_html_()) < 50_000
    assert "a square is 16 x 16 blocks" in layout._repr_html_() and "a square is" not in checks._repr_html_()


def test_sizes_and_legend_stand_around_the_picture() -> None:
    layout = BlockLayout.stack_heads([masks.causal(300, block_size=64), masks.local(300, window=9, block_size=64)])
    shown = layout._repr_html_()
    assert all(line in shown for line in repr(layout).splitlines()[:2]) and layout._repr_svg_() in shown
    assert all(name in shown for name in ("full", "partial", "empty", "batch 0, head 0"))
    open_tags: list[str] = []

    class Balance(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag != "br":
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Balance().feed(shown)
    assert not open_tags


@pytest.mark.parametrize(("q_len", "kv_len", "size"), [(64, 256, (320, 80)), (256, 64, (128, 320)), (9, 9, (320, 320))])
def test_pictures_are_true_to_scale_within_limits(q_len: int, kv_len: int, size: tuple[int, int]) -> None:
    root = ET.fromstring(
        BlockLayout.from_dense(torch.ones(q_len, kv_len, dtype=torch.bool), block_size=16)._repr_svg_()
    )
    assert (int(root.attrib["width"]), int(root.attrib["height"])) == size


def test_layouts_without_blocks_are_shown_too() -> None:
    layout = BlockLayout.from_dense(torch.zeros(0, 5, dtype=torch.bool), block_size=16)
    assert "0 x 1 blocks" in layout._repr_html_()
    ET.fromstring(layout._repr_svg_())
