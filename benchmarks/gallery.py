"""What do masks look like? `python -m benchmarks.gallery` draws all of them, and a union, for the README.

Knows the names of the masks and an example of each. Must not know how a layout is stored or drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import masks
from blocksparse_flash import BlockLayout

RESULTS = Path(__file__).parent / "results"
LENGTH, BLOCK_SIZE = 1024, 32

# arguments of each mask of masks.__all__, besides block_size; a length of its own only where it is not LENGTH
EXAMPLES: dict[str, dict[str, Any]] = {
    "bigbird": {"seed": 0},
    "butterfly": {},
    "causal": {},
    "documents": {"cu_seqlens": [0, 150, 600, 1024]},
    "global_tokens": {"tokens": 24},
    "local": {"window": 96},
    "longformer": {"window": 64, "global_tokens": [0, 500]},
    "random": {"density": 0.1, "seed": 0},
    "strided": {"stride": 128, "causal": True},
}


def example(name: str) -> BlockLayout:
    """The layout of a mask with its arguments of the table."""
    arguments = dict(EXAMPLES[name])
    # documents say their length themselves
    lengths = () if "cu_seqlens" in arguments else (arguments.pop("length", LENGTH),)
    return getattr(masks, name)(*lengths, **arguments, block_size=BLOCK_SIZE)


def call(name: str) -> str:
    """The mask and, below it, its arguments, without what is the same for all."""
    said = ", ".join(f"{argument}={value!r}" for argument, value in EXAMPLES[name].items())
    return f"{name}\n{said}"


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
