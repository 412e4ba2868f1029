"""Pictures of all masks and of a union, and the tables of docs/masks.md: `python -m benchmarks.report.gallery`."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import masks
from blocksparse_flash import BlockLayout

from .markdown import replaced, table

ROOT = Path(__file__).parents[2]
# folder of the union, page with the tables, folder of the masks' pictures
RESULTS, PAGE, PICTURES = "benchmarks/results", "docs/masks.md", "docs/pictures"
LENGTH, BLOCK_SIZE = 1024, 32

GRID, TILE = (32, 32), (4, 8)
# tokens up to which layouts are drawn pair by pair, as on grids the pairs make the pattern
PAIRS_UP_TO = 256
_random = np.random.default_rng(0)
BUCKETS = np.sort(_random.integers(0, 12, LENGTH))
SCORES = [_random.normal(size=(32, 32)) for _ in range(2)]

# headings of docs/masks.md -> masks -> arguments without block_size; a length only where it is not LENGTH
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "Windows and global tokens": {
        "causal": {},
        "local": {"window": 96},
        "global_tokens": {"tokens": 24},
        "longformer": {"window": 64, "global_tokens": [0, 500]},
        "bigbird": {"seed": 0},
        "sink_window": {"sinks": 4, "window": 128},
        "a_shape": {"sinks": 32, "window": 192},
        "tri_shape": {"sinks": 32, "window": 192, "last": 100},
        "strided": {"stride": 128, "causal": True},
        "fixed": {"stride": 160, "summary": 16, "causal": True},
        "dilated_window": {"window": 3, "dilation": 96},
        "longnet": {"segments": [128, 512, 1024], "dilations": [1, 64, 256]},
        "alibi_windows": {"slopes": [0.05], "threshold": 8},
        "prefix_lm": {"prefix": 300},
    },
    "Blocks and hierarchies": {
        "butterfly": {},
        "pixelfly": {"n_factors": 3},
        "block_diagonal": {"size": 200},
        "block_causal": {"size": 200},
        "block_diffusion": {"length": 512, "size": 80},
        "hierarchical": {"size": 32},
    },
    "Packed sequences and trees": {
        "documents": {"cu_seqlens": [0, 150, 600, 1024]},
        "shared_prefix": {"cu_seqlens": [0, 200, 450, 700, 1024]},
        "tree": {"parents": [-1, *((node - 1) // 2 for node in range(1, 512))], "prompt": 300},
    },
    "Images and video": {
        "neighborhood": {"grid": (16, 16), "kernel": 5},
        "swin": {"grid": (16, 16), "window": 8, "shift": 4},
        "sliding_tile": {"grid": GRID, "kernel": (12, 24), "tile": TILE, "order": masks.tile_order(GRID, tile=TILE)},
        "axial": {"grid": (4, 8, 8), "axes": [1, 2]},
    },
    "Masks that depend on the input": {
        "top_k": {"scores": SCORES[0], "q_len": LENGTH, "kv_len": LENGTH, "k": 4, "causal": True},
        "top_p": {"scores": SCORES[1], "q_len": LENGTH, "kv_len": LENGTH, "p": 0.3},
        "vertical_slash": {"verticals": [0, 300, 310, 700], "slashes": [0, 64, 320]},
        "lsh": {"q_buckets": BUCKETS},
    },
    "Random graphs": {
        "random": {"density": 0.1, "seed": 0},
        "erdos_renyi": {"density": 0.1, "seed": 0},
        "expander": {"degree": 4, "seed": 0},
        "small_world": {"neighbors": 4, "rewire": 0.2, "seed": 0},
    },
}
EXAMPLES = {name: arguments for family in FAMILIES.values() for name, arguments in family.items()}

# legend of layout.plot -> explanation
MEANINGS = {
    "full": "full block: every pair of its queries and keys attends",
    "partial": "partial block: some pairs attend, given by a bitmask",
    "empty": "empty block: no pair attends; not stored, never computed",
    "border of a block": "border of a block, where pairs are drawn one by one",
}


def example(name: str) -> BlockLayout:
    """The layout of a mask with its arguments in EXAMPLES."""
    builder, arguments = getattr(masks, name), dict(EXAMPLES[name])
    # others get their length from documents, grids, scores, ...
    takes_length = next(iter(inspect.signature(builder).parameters)) == "length"
    lengths = (arguments.pop("length", LENGTH),) if takes_length else ()
    return builder(*lengths, **arguments, block_size=BLOCK_SIZE)


def call(name: str) -> str:
    """The name of a mask and, below it, its arguments."""
    arguments = ", ".join(f"{argument}={value!r}" for argument, value in EXAMPLES[name].items())
    return f"{name}\n{arguments}"


def signature(name: str) -> str:
    """`local(length, *, window)`: without annotations, and without block_size, which every mask has."""
    found = inspect.signature(getattr(masks, name))
    shown = (each for each in found.parameters.values() if each.name != "block_size")
    return f"{name}{inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in shown])}"


def paper(name: str) -> str:
    """A Markdown link to the first paper that a docstring cites; "" if it has no arXiv number."""
    for paragraph in (inspect.getdoc(getattr(masks, name)) or "").split("\n\n"):
        found = re.match(r"(.*?),? arXiv:(\d{4}\.\d{5})", " ".join(paragraph.split()))
        if found:
            return f"[{found[1].rpartition('; as attention: ')[2]}](https://arxiv.org/abs/{found[2]})"
    return ""


def tables() -> str:
    """The masks by family: picture, signature, first sentence of the docstring, paper."""
    parts = []
    for family, names in FAMILIES.items():
        rows = []
        for name in names:
            sentence = " ".join((inspect.getdoc(getattr(masks, name)) or "").split("\n\n")[0].split())
            cell = "<br>".join(filter(None, [f"**`{signature(name)}`**", sentence, paper(name)]))
            rows.append([f"![{name}]({Path(PICTURES).name}/{name}.png)", cell])
        parts += [f"## {family}", table(["example", "mask"], rows)]
    return "\n\n".join(parts)


def union() -> dict[str, BlockLayout]:
    """Title -> layout of three masks and of their union."""
    parts = {call(name): example(name) for name in ("butterfly", "local", "global_tokens")}
    butterfly, local, tokens = parts.values()
    return parts | {"butterfly | local | global_tokens\n": butterfly | local | tokens}


def _small(layout: BlockLayout) -> bool:
    return max(layout.q_len, layout.kv_len) <= PAIRS_UP_TO


def _drawn(axis: Any, layout: BlockLayout) -> dict[str, Any]:
    """Draws a layout, a small one pair by pair. Legend of what is shown: text -> handle."""
    layout.plot(axis, tokens=((0, layout.q_len), (0, layout.kv_len)) if _small(layout) else None)
    legend: Any = axis.get_legend()
    legend.remove()
    return dict(zip((text.get_text() for text in legend.get_texts()), legend.legend_handles, strict=True))


def draw(layouts: Mapping[str, BlockLayout], *, across: int) -> Any:
    """A matplotlib Figure with a panel for each layout, `across` in a row, and one legend."""
    from matplotlib.figure import Figure

    down = -(-len(layouts) // across)
    # inches: square panels with titles and a legend
    figure = Figure(figsize=(3.2 * across, 3.4 * down + 0.8), layout="constrained")
    handles: dict[str, Any] = {}
    for index, (title, layout) in enumerate(layouts.items()):
        axis = figure.add_subplot(down, across, index + 1)
        handles |= _drawn(axis, layout)
        unit = "pairs of tokens" if _small(layout) else "blocks stored"
        share = float(layout.to_dense().float().mean()) if _small(layout) else layout.density
        axis.set_title(f"{title}\n{share:.0%} of the {unit}", fontsize=9)
    shown = {meaning: handles[name] for name, meaning in MEANINGS.items() if name in handles}
    figure.legend([*shown.values()], [*shown], loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_alone(layout: BlockLayout) -> Any:
    """A matplotlib Figure of one layout: a square without axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6, 1.6))
    axis = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    _drawn(axis, layout)
    axis.set(xticks=[], yticks=[], xlabel="", ylabel="", title="")
    return figure


def main() -> None:
    figures = {f"{RESULTS}/layouts.png": draw(union(), across=4)}
    figures |= {f"{PICTURES}/{name}.png": draw_alone(example(name)) for name in EXAMPLES}
    for path, figure in figures.items():
        # no date and no version: the same layouts give the same file
        figure.savefig(ROOT / path, dpi=80 if path.startswith(RESULTS) else 100, metadata={"Software": None})
        print(path)
    page = ROOT / PAGE
    page.write_text(replaced(page.read_text(encoding="utf-8"), {"masks": tables()}), encoding="utf-8")


if __name__ == "__main__":
    # there are no options, but --help must not rewrite anything
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
