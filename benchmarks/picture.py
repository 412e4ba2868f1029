"""What do layouts look like? `python -m benchmarks.picture` draws the picture of the README.

Knows the names of the masks and matplotlib. Must not know how a layout is stored.
"""

from __future__ import annotations

from pathlib import Path

import masks
from blocksparse_flash import BlockLayout

PATH = Path(__file__).parent / "results" / "layouts.png"
LENGTH, BLOCK_SIZE = 1024, 32


def layouts() -> dict[str, BlockLayout]:
    """Title -> layout, in the order of the picture."""
    butterfly = masks.butterfly(LENGTH, block_size=BLOCK_SIZE)
    local = masks.local(LENGTH, window=96, block_size=BLOCK_SIZE)
    tokens = masks.global_tokens(LENGTH, tokens=24, block_size=BLOCK_SIZE)
    return {
        "butterfly": butterfly,
        "local, window 96": local,
        "global_tokens, 24": tokens,
        "butterfly | local | global_tokens": butterfly | local | tokens,
    }


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import ListedColormap

    panels = layouts()
    figure, axes = plt.subplots(1, len(panels), figsize=(3.1 * len(panels), 3.6), layout="constrained")
    for axis, (title, layout) in zip(axes, panels.items(), strict=True):
        colours = ListedColormap(["#f4f1ea", "#1f6f8b"])
        axis.imshow(layout.to_dense()[0, 0].numpy(), cmap=colours, interpolation="nearest")
        axis.set_title(title, fontsize=11)
        axis.set_xlabel(f"keys     {layout.density:.0%} of the blocks", fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0].set_ylabel("queries", fontsize=9)
    figure.savefig(PATH, dpi=80, metadata={"Software": None})
    print(PATH.relative_to(Path.cwd()) if PATH.is_relative_to(Path.cwd()) else PATH)


if __name__ == "__main__":
    main()
