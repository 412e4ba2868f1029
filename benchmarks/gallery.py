"""What do masks look like? `python -m benchmarks.gallery` draws all of them, and a union, for the README.

Knows the names of the masks and an example of each. Must not know how a layout is stored or drawn.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import masks
from blocksparse_flash import BlockLayout

RESULTS = Path(__file__).parent / "results"
LENGTH, BLOCK_SIZE = 1024, 32

RANDOM = np.random.default_rng(0)
GRID, TILE = (32, 32), (4, 8)

# arguments of each mask of masks.__all__, besides block_size; a length of its own only where it is not LENGTH
EXAMPLES: dict[str, dict[str, Any]] = {
    "a_shape": {"sinks": 32, "window": 192},
    "alibi_windows": {"slopes": [0.05], "threshold": 8},
    "axial": {"grid": (8, 8, 16), "axes": [1, 2]},
    "bigbird": {"seed": 0},
    "block_causal": {"size": 200},
    "block_diagonal": {"size": 200},
    "block_diffusion": {"length": 512, "size": 80},
    "butterfly": {},
    "causal": {},
    "dilated_window": {"window": 3, "dilation": 96},
    "documents": {"cu_seqlens": [0, 150, 600, 1024]},
    "erdos_renyi": {"density": 0.1, "seed": 0},
    "expander": {"degree": 4, "seed": 0},
    "fixed": {"stride": 160, "summary": 16, "causal": True},
    "global_tokens": {"tokens": 24},
    "hierarchical": {"size": 32},
    "local": {"window": 96},
    "longformer": {"window": 64, "global_tokens": [0, 500]},
    "longnet": {"segments": [128, 512, 1024], "dilations": [1, 64, 256]},
    "lsh": {"q_buckets": np.sort(RANDOM.integers(0, 12, LENGTH))},
    "neighborhood": {"grid": GRID, "kernel": 7},
    "pixelfly": {"n_factors": 3},
    "prefix_lm": {"prefix": 300},
    "random": {"density": 0.1, "seed": 0},
    "shared_prefix": {"cu_seqlens": [0, 200, 450, 700, 1024]},
    "sink_window": {"sinks": 4, "window": 128},
    "sliding_tile": {"grid": GRID, "kernel": (12, 24), "tile": TILE, "order": masks.tile_order(GRID, tile=TILE)},
    "small_world": {"neighbors": 4, "rewire": 0.2, "seed": 0},
    "strided": {"stride": 128, "causal": True},
    "swin": {"grid": GRID, "window": 8, "shift": 4},
    "top_k": {"scores": RANDOM.normal(size=(32, 32)), "q_len": LENGTH, "kv_len": LENGTH, "k": 4, "causal": True},
    "top_p": {"scores": RANDOM.normal(size=(32, 32)), "q_len": LENGTH, "kv_len": LENGTH, "p": 0.3},
    "tree": {"parents": [-1, *((node - 1) // 2 for node in range(1, 512))], "prompt": 300},
    "tri_shape": {"sinks": 32, "window": 192, "last": 100},
    "vertical_slash": {"verticals": [0, 300, 310, 700], "slashes": [0, 64, 320]},
}


def example(name: str) -> BlockLayout:
    """The layout of a mask with its arguments of the table."""
    builder, arguments = getattr(masks, name), dict(EXAMPLES[name])
    # the others say their length themselves: documents, grids, scores, ...
    takes_length = "length" in inspect.signature(builder).parameters
    lengths = (arguments.pop("length", LENGTH),) if takes_length else ()
    return builder(*lengths, **arguments, block_size=BLOCK_SIZE)


def _said(value: object) -> str:
    """A value as a title has room for it."""
    text = repr(value)
    return text if len(text) <= 40 and not isinstance(value, np.ndarray | torch.Tensor) else "..."


def call(name: str) -> str:
    """The mask and, below it, its arguments, without what is the same for all."""
    said = ", ".join(f"{argument}={_said(value)}" for argument, value in EXAMPLES[name].items())
    return f"{name}\n{textwrap.fill(said, 44)}"


def panels() -> dict[str, BlockLayout]:
    """Title -> layout of every mask."""
    return {call(name): example(name) for name in sorted(EXAMPLES)}


def union() -> dict[str, BlockLayout]:
    """Title -> layout of three masks and of their union."""
    parts = {call(name): example(name) for name in ("butterfly", "local", "global_tokens")}
    butterfly, local, tokens = parts.values()
    return parts | {"butterfly | local | global_tokens\n": butterfly | local | tokens}


def draw(layouts: Mapping[str, BlockLayout], *, across: int) -> Any:
    """A matplotlib Figure with a panel for each layout, `across` in a row, and one legend."""
    from matplotlib.figure import Figure

    down = -(-len(layouts) // across)
    # inches: square panels, and around them what is written
    figure = Figure(figsize=(3.2 * across, 3.4 * down + 0.4), layout="constrained")
    for index, (title, layout) in enumerate(layouts.items()):
        axis = figure.add_subplot(down, across, index + 1)
        layout.plot(axis)
        legend: Any = axis.get_legend()
        legend.remove()
        axis.set_title(f"{title}\n{layout.density:.0%} of the blocks", fontsize=9)
    names = [text.get_text() for text in legend.get_texts()]
    figure.legend(legend.legend_handles, names, loc="outside lower center", ncols=3, frameon=False)
    return figure


def main() -> None:
    for name, layouts, across in (("layouts", union(), 4), ("gallery", panels(), 4)):
        path = RESULTS / f"{name}.png"
        # no date and no version: the same layouts give the same file
        draw(layouts, across=across).savefig(path, dpi=80, metadata={"Software": None})
        print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
