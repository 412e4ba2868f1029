"""Drawings of a layout: as text, as SVG and HTML, and by matplotlib, which is imported when needed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import block_list, checks, set_operations
from .block_list import FULL, Array, BlockList, Frame, Size
from .reindexing import gather

# kinds of cells
_EMPTY, _PARTIAL, _FULL = 0, 1, 2
# Okabe and Ito's palette: distinct for color-blind readers, and still distinguishable in grayscale
_COLORS = ("#f3f3f3", "#e69f00", "#0072b2")
_BORDER = "#d55e00"
_NAMES = ("empty", "partial", "full")

# most cells down and across, in text, in SVG and in pictures
_LETTERS, _SQUARES, _DOTS = 32, 64, 512
# longer side of an SVG, in pixels
_PIXELS = 320
# most tokens of a picture of pairs
_MAX_TOKENS = 1024
_MAX_HEADS = 64


def _blocks_per_cell(frame: Frame, most: int) -> Size:
    return max(1, -(-frame.n_rows // most)), max(1, -(-frame.n_cols // most))


def _cells(found: BlockList, frame: Frame, most: int) -> Array:
    """The first head in at most `most` x `most` cells: _FULL if all their blocks are, _EMPTY if none is stored."""
    down, across = _blocks_per_cell(frame, most)
    height, width = -(-frame.n_rows // down), -(-frame.n_cols // across)
    is_first = found.keys < frame.blocks_per_batch_head
    is_full = found.ids[is_first] == FULL
    _, rows, cols = frame.positions(found.keys[is_first])
    place = rows // down * width + cols // across
    n_rows = np.bincount(np.arange(frame.n_rows) // down, minlength=height)
    n_all = np.outer(n_rows, np.bincount(np.arange(frame.n_cols) // across, minlength=width))
    n_stored = np.bincount(place, minlength=height * width).reshape(height, width)
    n_full = np.bincount(place[is_full], minlength=height * width).reshape(height, width)
    return np.where(n_full == n_all, _FULL, np.where(n_stored > 0, _PARTIAL, _EMPTY))


def _notes(frame: Frame, most: int, cell: str, rule: str = "") -> str:
    """What a legend adds if cells hold several blocks, or if there are several heads."""
    down, across = _blocks_per_cell(frame, most)
    notes = f"; a {cell} is {down} x {across} blocks{rule}" if down * across > 1 else ""
    return notes + "; batch 0, head 0" * (frame.batch_heads > 1)


# ----------------------------------------------------------------------------------------------------------------- text


def title(frame: Frame) -> str:
    """The sizes of a layout that need no blocks."""
    batch, heads, q_len, kv_len, block_size = frame
    return f"BlockLayout({q_len} x {kv_len} tokens, {block_size=}, {batch=}, {heads=})"


def _sizes(found: BlockList, frame: Frame) -> list[str]:
    """Two lines with the sizes of a layout."""
    nnz, density = len(found.keys), frame.density(len(found.keys))
    return [
        title(frame),
        f"{frame.n_rows} x {frame.n_cols} blocks, {nnz=}, {density=:.4g}, {len(found.bitmasks)} distinct bitmasks",
    ]


def text(found: BlockList, frame: Frame) -> str:
    """The sizes of a layout, and its first head drawn in letters."""
    lines = _sizes(found, frame)
    if not frame.blocks_per_batch_head:
        return "\n".join(lines)
    key = "# full, + partial, . empty" + _notes(frame, _LETTERS, "character")
    drawn = np.array(list(".+#"))[_cells(found, frame, _LETTERS)]
    return "\n".join([*lines, key, *map("".join, drawn)])


# ------------------------------------------------------------------------------------------------------------ notebooks


def svg(found: BlockList, frame: Frame) -> str:
    """The first head of a layout as SVG, at most 64 x 64 squares. A few kilobytes."""
    cells = _cells(found, frame, _SQUARES)
    height, width = cells.shape
    ratio = _ratio(frame.q_len, frame.kv_len)
    size = _PIXELS * min(1, 1 / ratio), _PIXELS * min(1, ratio)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]:.0f}" height="{size[1]:.0f}" '
            f'viewBox="0 0 {max(width, 1)} {max(height, 1)}" preserveAspectRatio="none" shape-rendering="crispEdges">'
        ),
        f"<title>{_sizes(found, frame)[1]}</title>",
        f'<rect width="100%" height="100%" fill="{_COLORS[_EMPTY]}"/>',
    ]
    for kind in (_PARTIAL, _FULL):
        # 0 around each row, so that every run has a begin and an end
        steps = np.diff((cells == kind).astype(np.int8), axis=1, prepend=0, append=0)
        (row, begin), (_, end) = np.nonzero(steps == 1), np.nonzero(steps == -1)
        runs = zip(row.tolist(), begin.tolist(), (end - begin).tolist(), strict=True)
        path = "".join(f"M{left} {top}h{n}v1h-{n}z" for top, left, n in runs)
        if path:
            parts.append(f'<path fill="{_COLORS[kind]}" d="{path}"/>')
    return "".join([*parts, "</svg>"])


def html(found: BlockList, frame: Frame) -> str:
    """The sizes of a layout and its `svg`, with a legend, for notebooks."""
    lines = _sizes(found, frame)
    if not frame.blocks_per_batch_head:
        return f"<div>{'<br>'.join(lines)}</div>"
    legend = ", ".join(
        f'<span style="color:{_COLORS[kind]};background:{_COLORS[kind]};border:1px solid #888">&#9632;</span> '
        f"{_NAMES[kind]}"
        for kind in (_FULL, _PARTIAL, _EMPTY)
    )
    legend += _notes(frame, _SQUARES, "square", ": full or empty if all of them are, else partial")
    return f"<div>{'<br>'.join(lines)}<br>{svg(found, frame)}<br>{legend}</div>"


# ------------------------------------------------------------------------------------------------------------- pictures


class _View(NamedTuple):
    """What a picture of one head shows: all blocks, or the pairs of a region.

    q, kv   (start, stop) in tokens
    """

    frame: Frame
    q: Size
    kv: Size
    is_zoom: bool

    @property
    def ratio(self) -> float:
        """Height / width of a panel: true to scale, within limits."""
        return _ratio(self.q[1] - self.q[0], self.kv[1] - self.kv[0])

    def title(self, mask: BlockList | None = None) -> str:
        """Without a mask, for all heads."""
        if self.is_zoom:
            return f"pairs of queries {self.q[0]} to {self.q[1] - 1} and keys {self.kv[0]} to {self.kv[1] - 1}"
        title = "blocks of {} x {} tokens".format(*self.frame.block_size)
        if mask is not None:
            title = f"{len(mask.keys)} {title}, density {self.frame.density(len(mask.keys)):.3g}"
        down, across = _blocks_per_cell(self.frame, _DOTS)
        if down * across == 1:
            return title
        return f"{title}\na dot is {down} x {across} blocks: full if all are, empty if all are, else partial"


def _ratio(height: int, width: int) -> float:
    return min(max(max(height, 1) / max(width, 1), 0.25), 2.5)


def _view(tokens: Any, frame: Frame) -> _View:
    """The view of the caller's tokens, checked."""
    one = frame._replace(batch=1, heads=1)
    if tokens is None:
        return _View(one, (0, frame.q_len), (0, frame.kv_len), is_zoom=False)
    is_pairs = isinstance(tokens, (tuple, list)) and len(tokens) == 2
    if not is_pairs or not all(isinstance(side, (tuple, list)) and len(side) == 2 for side in tokens):
        raise TypeError(f"tokens must be ((q_start, q_stop), (kv_start, kv_stop)), got {tokens!r}")
    sides = []
    for (start, stop), length, name in zip(tokens, (frame.q_len, frame.kv_len), ("q", "kv"), strict=True):
        first, last = checks.integer(start, f"tokens: {name}_start"), checks.integer(stop, f"tokens: {name}_stop")
        if not 0 <= first < last <= length or last - first > _MAX_TOKENS:
            raise ValueError(
                f"tokens must be 0 <= {name}_start < {name}_stop <= {name}_len = {length}, at most {_MAX_TOKENS} "
                f"apart, got ({first}, {last}); tokens=None draws blocks"
            )
        sides.append((first, last))
    return _View(one, sides[0], sides[1], is_zoom=True)


def _batch_heads(found: BlockList, frame: Frame, batch: Any, head: Any) -> dict[str, BlockList]:
    """Title -> block list of each head to draw: the chosen one, or all if they differ."""
    index = checks.position(batch, frame.batch, "batch", f"; the layout has {frame.batch}")
    of_batch = set_operations.pick(found, frame, "batch", index)
    alone = frame._replace(batch=1)
    where = [f"batch {index}"] if frame.batch > 1 else []
    if head is not None:
        number = checks.position(head, frame.heads, "head", f"; the layout has {frame.heads}")
        where += [f"head {number}"] if frame.heads > 1 else []
        return {", ".join(where): set_operations.pick(of_batch, alone, "heads", number)}
    if frame.heads > _MAX_HEADS:
        raise ValueError(f"head must be given for a layout of more than {_MAX_HEADS} heads, got None of {frame.heads}")
    heads = [set_operations.pick(of_batch, alone, "heads", number) for number in range(frame.heads)]
    if all(all(map(np.array_equal, other, heads[0])) for other in heads[1:]):
        where += [f"all {frame.heads} heads alike"] if frame.heads > 1 else []
        return {", ".join(where): heads[0]}
    return {", ".join([*where, f"head {number}"]): one for number, one in enumerate(heads)}


def plot(found: BlockList, frame: Frame, *, ax: Any, batch: Any, head: Any, tokens: tuple[Size, Size] | None) -> Any:
    """The Figure of `BlockLayout.plot`."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ImportError("layout.plot needs matplotlib: pip install 'blocksparse_flash[plot]'") from error
    view, panels = _view(tokens, frame), _batch_heads(found, frame, batch, head)
    if ax is not None and not isinstance(ax, matplotlib.axes.Axes):
        raise TypeError(f"ax must be matplotlib Axes, or None for a figure of its own, got {type(ax).__name__}")
    if len(panels) > 1:
        if ax is not None:
            raise ValueError(f"ax has room for one panel, but {len(panels)} heads differ: choose one by head=")
        return _grid(matplotlib.figure.Figure, panels, view)
    ((where, mask),) = panels.items()
    if ax is not None:
        _panel(ax, mask, view)
        _legend(ax, view)
        ax.set_title(where)
        return ax.figure
    # width of the panel in inches; the figure adds labels, title and bars
    across = min(5.2, 7.5 / view.ratio)
    figure = matplotlib.figure.Figure(figsize=(across * 1.3 + 1.1, across * view.ratio + 1.5), layout="constrained")
    ax = figure.subplots()
    _panel(ax, mask, view)
    _legend(ax, view)
    ax.set_title(f"{where}: {view.title(mask)}" if where else view.title(mask), fontsize=11)
    if not view.is_zoom and frame.n_rows:
        _row_work(ax, mask, view.frame)
    return figure


def _row_work(ax: Any, mask: BlockList, frame: Frame) -> None:
    """Bars next to a panel: stored blocks of each row."""
    work = ax.inset_axes((1.05, 0, 0.2, 1), sharey=ax)
    counts = np.bincount(mask.keys // max(frame.n_cols, 1), minlength=frame.n_rows)
    edges = np.minimum(np.arange(frame.n_rows + 1) * frame.block_size[0], frame.q_len)
    work.stairs(counts, edges, orientation="horizontal", fill=True, color="#5a5a5a")
    work.set_xlim(0, max(1, counts.max()) * 1.05)
    # no 0, which would overlap the last label of the panel
    work.set_xticks([max(1, counts.max())])
    work.set_xlabel("blocks in\nthe row")
    work.tick_params(labelleft=False)
    work.spines[["top", "right"]].set_visible(False)


def _grid(new_figure: Any, panels: dict[str, BlockList], view: _View) -> Any:
    """A figure with one panel per head."""
    n_across = min(4, len(panels))
    n_down = -(-len(panels) // n_across)
    figure = new_figure(figsize=(2.9 * n_across, 3.0 * n_down + 0.5), layout="constrained")
    for index, (title, mask) in enumerate(panels.items()):
        ax = figure.add_subplot(n_down, n_across, index + 1)
        _panel(ax, mask, view)
        density = "" if view.is_zoom else f": density {view.frame.density(len(mask.keys)):.3g}"
        ax.set_title(title + density, fontsize=10)
        # labels at the left, and where no panel is below
        is_left, is_last = index % n_across == 0, index + n_across >= len(panels)
        ax.tick_params(labelleft=is_left, labelbottom=is_last)
        ax.set_ylabel(ax.get_ylabel() if is_left else "")
        ax.set_xlabel(ax.get_xlabel() if is_last else "")
    figure.suptitle(view.title(), fontsize=11)
    figure.legend(handles=_swatches(view), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _panel(ax: Any, mask: BlockList, view: _View) -> None:
    """The cells of a mask, or the pairs of a region, with axes in tokens; queries down, keys across."""
    from matplotlib.colors import ListedColormap

    frame, (top, bottom), (left, right), is_zoom = view
    if is_zoom:
        part = gather(mask, frame, np.arange(top, bottom), np.arange(left, right))
        pairs = block_list.to_mask(part, frame._replace(q_len=bottom - top, kv_len=right - left))[0]
        cells, extent = np.where(pairs, _FULL, _EMPTY), (left, right, bottom, top)
    else:
        cells, (down, across) = _cells(mask, frame, _DOTS), _blocks_per_cell(frame, _DOTS)
        # whole cells, clipped by the limits of the axes
        height, width = cells.shape[0] * down * frame.block_size[0], cells.shape[1] * across * frame.block_size[1]
        extent = (0, width, height, 0)
    ax.set_facecolor(_COLORS[_EMPTY])
    if cells.size:
        colors = ListedColormap(_COLORS)
        ax.imshow(cells, cmap=colors, vmin=0, vmax=2, interpolation="nearest", extent=extent, aspect="auto")
    if is_zoom:
        for (start, stop), side, line in zip(view[1:3], frame.block_size, (ax.axhline, ax.axvline), strict=True):
            for border in range(start // side * side + side, stop, side):
                line(border, color=_BORDER, linewidth=0.8)
    ax.set_xlim(left, max(right, left + 1))
    ax.set_ylim(max(bottom, top + 1), top)
    ax.set_box_aspect(view.ratio)
    ax.set_xlabel("key (token)")
    ax.set_ylabel("query (token)")
    ax.locator_params(nbins=5, integer=True)


def _swatches(view: _View) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = {_FULL: "attends", _EMPTY: "does not attend"} if view.is_zoom else dict(enumerate(_NAMES))
    swatches: list[Any] = [
        Patch(facecolor=_COLORS[kind], edgecolor="#888888", label=names[kind]) for kind in sorted(names, reverse=True)
    ]
    return [*swatches, Line2D([], [], color=_BORDER, label="border of a block")] if view.is_zoom else swatches


def _legend(ax: Any, view: _View) -> None:
    """Legend half an inch below the panel, leaving the title to the caller."""
    from matplotlib.transforms import ScaledTranslation

    below = ax.transAxes + ScaledTranslation(0, -0.5, ax.figure.dpi_scale_trans)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": below, "borderaxespad": 0}
    ax.legend(handles=_swatches(view), ncols=3, frameon=False, fontsize=9, **place)
