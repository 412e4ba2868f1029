"""Plots of result lines: speed by pattern, the sweeps, mask construction, bytes moved, several GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import lines as measurements
from .lines import DIRECTIONS, Line, label, measured, provider_of, select
from .summaries import dense_times, level_with_dense

# sweeps of benchmarks.run.attention -> titles
SWEEPS = {
    "length": "Time against length, at a fixed number of keys for each query",
    "density": "Time against density, and where sparse stops paying",
    "block-size": "Time against the block size of the layout",
    "change": "A step with one mask for all steps, and with a new mask each step",
}
# ours in blues; distinguishable with colour blindness
COLOURS = {
    ("blocksparse_flash", "hopper"): "#08306b",
    ("blocksparse_flash", "triton"): "#4292c6",
    ("flex", "triton"): "#e69f00",
    ("flash_attention_4", "cute"): "#d55e00",
    ("flashinfer", "auto"): "#cc79a7",
    ("block_sparse_attention", "cuda"): "#009e73",
    ("natten", "auto"): "#66c2a5",
    ("xformers", "auto"): "#b3a100",
    ("cudnn", "cudnn"): "#555555",
    ("flash_attention_2", "sdpa"): "#999999",
    ("math", "sdpa"): "#cccccc",
}
MASK_LOOKS = {
    "blocksparse_flash": ("blocksparse_flash", "#08306b"),
    "flex, compiled": ("create_block_mask, compiled", "#e69f00"),
    "flex, compiled, first call": ("create_block_mask, first call (compiles)", "#f3cf80"),
    "flex": ("create_block_mask, not compiled", "#d55e00"),
    "dense": ("a bool for every pair, then blocks", "#999999"),
}

CONTEXT_LOOKS = {
    "exchange": ("exchange of needed keys", "#08306b"),
    "ulysses": ("Ulysses", "#4292c6"),
    "gathered": ("all-gather (ours)", "#9ecae1"),
    "all_gather": ("all-gather", "#999999"),
    "flex": ("FlexAttention, all-gather", "#e69f00"),
}


def colour(provider: tuple[str, str]) -> str:
    return COLOURS.get(provider, "#000000")


def block_size(line: Line) -> int:
    """Of a line of the sweep over block sizes, whose pattern ends in it: `random, 64`."""
    return int(line["pattern"].rpartition(", ")[2])


def short(count: float) -> str:
    """2,048 -> 2K, 1,048,576 -> 1M."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= size and count % size == 0:
            return f"{count // size:.0f}{letter}"
    return f"{count:g}"


def _figure(down: int, across: int, title: str) -> tuple[Any, Any]:
    """(figure, axes [down, across]); about 5 x 3.4 inches a panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * across + 0.4, 3.4 * down + 1.1), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(down, across, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e0e0e0", linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, axes


def _legend(figure: Any) -> None:
    """One legend for all panels, below them."""
    entries: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    # four long names are wider than two panels
    across = 4 if max(map(len, entries)) <= 40 else 2
    figure.legend(
        [*entries.values()], [*entries], loc="outside lower center", ncols=min(across, len(entries)), frameon=False
    )


def _curve(axis: Any, lines: Sequence[Line], at: Callable[[Line], float], name: str, hue: str) -> None:
    """Medians over `at`, with a band from the 20th to the 80th percentile."""
    lines = sorted(lines, key=at)
    places = [at(line) for line in lines]
    axis.plot(places, [line["ms"] for line in lines], marker="o", markersize=4, color=hue, label=name)
    axis.fill_between(
        places,
        [line["ms_p20"] for line in lines],
        [line["ms_p80"] for line in lines],
        color=hue,
        alpha=0.15,
        linewidth=0,
    )


def _ticks(axis: Any, places: Sequence[float], names: Sequence[str]) -> None:
    """Names at these places of a logarithmic axis, and nothing between them."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(places, names)
    axis.set_xticks([], minor=True)


def _plain_log(axis: Any) -> None:
    """A logarithmic axis of time, with 0.1, 1, 10, 1,000 written out, and 2 and 5 where there are few of those."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_ylabel("milliseconds")


def _where(lines: Sequence[Line]) -> str:
    """`NVIDIA H200, bf16, batch 1, hidden size 2048`: what all panels have in common."""
    setting = next(iter(measurements.settings(lines)))
    return f"{setting.device}, {setting.dtype}, batch {setting.batch}, hidden size {setting.hidden}"


def _panels(lines: Sequence[Line], title: str) -> tuple[Any, list[tuple[Any, list[Line]]]]:
    """A figure with a row for each head_dim and a column for each direction, and the lines of each panel."""
    head_dims = sorted({line["head_dim"] for line in lines}, reverse=True)
    figure, axes = _figure(len(head_dims), len(DIRECTIONS), title)
    panels = []
    for row, head_dim in zip(axes, head_dims, strict=True):
        for axis, (direction, said) in zip(row, DIRECTIONS.items(), strict=True):
            axis.set_title(f"{said}, head_dim {head_dim}", fontsize=10)
            panels.append((axis, select(lines, head_dim=head_dim, direction=direction)))
    return figure, panels


def speed(lines: Sequence[Line], rate: float | None) -> Any:
    """Bars: TFLOP/s by pattern and provider; a line at what a large matrix product reaches."""
    setting = next(iter(measurements.settings(lines)))
    title = (
        f"TFLOP/s of stored 128 x 128 blocks, higher is better\n{_where(lines)}, {setting.n:,} tokens; "
        "below each pattern the share of blocks that it stores"
    )
    figure, panels = _panels(lines, title)
    for axis, found in panels:
        patterns = {line["pattern"]: line["density"] for line in found}
        providers = measured(found)
        width = 0.84 / max(1, len(providers))
        for place, provider in enumerate(providers):
            mine = select(found, provider)
            lefts = [[*patterns].index(line["pattern"]) - 0.42 + (place + 0.5) * width for line in mine]
            axis.bar(
                lefts, [line["tflops"] for line in mine], 0.92 * width, color=colour(provider), label=label(provider)
            )  # fmt: skip
        if rate is not None:
            axis.axhline(rate, color="black", linestyle=":", linewidth=1, label="a large matrix product")
        axis.set_xticks(
            range(len(patterns)), [f"{name}\n{density:.0%}" for name, density in patterns.items()], fontsize=8
        )
        axis.set_ylabel("TFLOP/s")
    _legend(figure)
    return figure


def _sweep(lines: Sequence[Line], title: str, at: Callable[[Line], float], unit: str, dashed: Sequence[str]) -> Any:
    """Curves: time over `at`, a curve for each provider and pattern; block sizes are not part of a pattern's name."""
    figure, panels = _panels(lines, title)
    for axis, found in panels:
        for provider in measured(found):
            for pattern in dict.fromkeys(line["pattern"].partition(", ")[0] for line in found):
                mine = [line for line in select(found, provider) if line["pattern"].partition(", ")[0] == pattern]
                if mine:
                    _curve(axis, mine, at, f"{label(provider)}, {pattern}", colour(provider))
                    axis.lines[-1].set_linestyle("--" if pattern in dashed else "-")
        places = sorted({at(line) for line in found})
        _ticks(axis, places, [short(place) for place in places])
        _plain_log(axis)
        axis.set_xlabel(unit)
    _legend(figure)
    return figure


def length(lines: Sequence[Line]) -> Any:
    """Curves: time over length, both logarithmic."""
    title = f"{SWEEPS['length']}\n{_where(lines)}; bands: 20th to 80th percentile"
    return _sweep(lines, title, lambda line: line["n"], "tokens", ("dense", "causal"))


def block_sizes(lines: Sequence[Line]) -> Any:
    """Curves: time over the side of a block, at equal density."""
    title = f"{SWEEPS['block-size']}\n{_where(lines)}, {lines[0]['n']:,} tokens; the share stored is equal"
    return _sweep(lines, title, block_size, "side of a block, tokens", ("random",))


def swept(lines: Sequence[Line], sweep: str) -> list[Line]:
    """The lines of a sweep. Of density only head_dims measured up to half of all blocks: fewer show no break-even."""
    found = select(lines, bench=sweep)
    if sweep == "density":
        reached = {line["head_dim"] for line in found if line["pattern"] != "dense" and line["density"] >= 0.5}
        found = [line for line in found if line["head_dim"] in reached]
    return found


def density(lines: Sequence[Line]) -> Any:
    """Curves: time over density; dense times are level lines, and a dot marks where ours crosses the fastest."""
    figure, panels = _panels(
        lines, f"{SWEEPS['density']}\n{_where(lines)}, {lines[0]['n']:,} tokens, random 128 x 128 blocks"
    )
    for axis, found in panels:
        for provider in measured(found):
            mine = [line for line in select(found, provider) if line["pattern"] != "dense"]
            if mine:
                _curve(axis, mine, lambda line: line["density"], label(provider), colour(provider))
        for line in dense_times(found):
            provider = provider_of(line)
            name = f"dense, {label(provider)}"
            axis.axhline(line["ms"], color=colour(provider), linestyle="--", linewidth=1, label=name)
        said = []
        for provider in measurements.ours(found):
            where = level_with_dense(found, provider)
            if where is not None:
                level = dense_times(found)[0]["ms"]
                axis.plot([where], [level], marker="o", markersize=9, markerfacecolor="none", color=colour(provider))
                said.append(f"{where:.0%} ({provider[1]})")
        if said:
            level_with = f"as slow as the fastest dense\nfrom density {', '.join(said)} on"
            axis.text(0.03, 0.8, level_with, transform=axis.transAxes, fontsize=8, va="top")
        axis.set_xscale("log")
        axis.set_xticks([0.01, 0.03, 0.1, 0.3, 1.0], ["1%", "3%", "10%", "30%", "100%"])
        axis.set_xticks([], minor=True)
        _plain_log(axis)
        axis.set_xlabel("share of blocks stored")
    _legend(figure)
    return figure


def change(lines: Sequence[Line]) -> Any:
    """Bars: a synchronised step (mask, forward, backward) with one mask and with new ones; a panel per length."""
    lines = select(lines, direction="step")
    cases = sorted({(line["n"], -line["head_dim"]) for line in lines})
    title = f"{SWEEPS['change']}\n{_where(lines)}; wall clock of mask, forward and backward"
    figure, axes = _figure(len(cases), 1, title)
    # names of ways are long
    figure.set_figwidth(9)
    for axis, (n, minus_head_dim) in zip(axes[:, 0], cases, strict=True):
        found = select(lines, n=n, head_dim=-minus_head_dim)
        ways = [*dict.fromkeys(line["pattern"] for line in found)]
        providers = measured(found)
        for place, provider in enumerate(providers):
            mine = select(found, provider)
            heights = [line["ms"] for line in mine]
            rows = [ways.index(line["pattern"]) - 0.42 + (place + 0.5) * 0.84 / len(providers) for line in mine]
            bars = axis.barh(rows, heights, 0.78 / len(providers), color=colour(provider), label=label(provider))
            axis.bar_label(bars, [f"{height:.3g}" for height in heights], padding=3, fontsize=8)
        axis.set_yticks(range(len(ways)), ways)
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set_title(f"{n:,} tokens, head_dim {-minus_head_dim}", fontsize=10)
        slowest, fastest = (bound(line["ms"] for line in found) for bound in (max, min))
        # a rebuild that looks at every pair may take a hundred times as long as a step
        axis.set_xscale("log" if slowest > 20 * fastest else "linear")
        axis.set_xlabel("milliseconds a step")
    _legend(figure)
    return figure


def masks(lines: Sequence[Line]) -> Any:
    """Curves: time to build each mask that peers build too, over its length."""
    shared = [*dict.fromkeys(line["pattern"] for line in lines if line["provider"] != "blocksparse_flash")]
    devices = ", ".join(sorted({line["device"] for line in lines}))
    figure, axes = _figure(
        1, len(shared), f"Time to build a mask, lower is better\none core of {devices}, blocks of 128"
    )
    for axis, pattern in zip(axes[0], shared, strict=True):
        for provider, (name, hue) in MASK_LOOKS.items():
            mine = select(lines, provider=provider, pattern=pattern)
            if mine:
                _curve(axis, mine, lambda line: line["n"], name, hue)
        lengths = sorted({line["n"] for line in select(lines, pattern=pattern)})
        _ticks(axis, lengths, [short(n) for n in lengths])
        _plain_log(axis)
        axis.set_title(pattern, fontsize=10)
        axis.set_xlabel("tokens")
    _legend(figure)
    return figure


def io(lines: Sequence[Line], expected: Mapping[str, Callable[[Line], float]], counted: Callable[[Line], float]) -> Any:
    """Curves: bytes moved over density, per backend, with the `expected` bytes of each line; both axes logarithmic.

    counted  the bytes between L2 and the SMs
    """
    heads = max(line["heads"] for line in lines)
    lines = select(lines, heads=heads)
    where = f"{lines[0]['device']}, bf16, batch {lines[0]['batch']}, {heads} heads, {lines[0]['n']:,} tokens"
    figure, panels = _panels(lines, f"Bytes moved against the share of stored blocks\n{where}")
    for axis, found in panels:
        for provider in measured(found):
            mine = sorted(select(found, provider), key=lambda line: line["density"])
            places, hue, name = [line["density"] for line in mine], colour(provider), label(provider)
            axis.plot(places, [counted(line) for line in mine], marker="o", color=hue, label=f"L2 to SMs, {name}")
            memory = [line["dram_read_bytes"] + line["dram_write_bytes"] for line in mine]
            axis.plot(
                places, memory, marker="s", markersize=4, linestyle="--", color=hue, label=f"device memory, {name}"
            )
            for (what, of), style in zip(expected.items(), (":", "-."), strict=False):
                axis.plot(
                    places, [of(line) for line in mine], linestyle=style, color="#555555", label=f"{what}, {name}"
                )
        densities = sorted({line["density"] for line in found})
        _ticks(axis, densities, [f"{density:.3g}" for density in densities])
        axis.set_yscale("log")
        axis.set_xlabel("share of blocks stored")
        axis.set_ylabel("bytes")
    _legend(figure)
    return figure


def context(lines: Sequence[Line]) -> Any:
    """Speed-ups of a forward and backward over one GPU: a panel for each number of ranks, length and key heads."""
    lines = select(lines, direction="step")
    cases = [*dict.fromkeys((line["ranks"], line["n"], line["kv_heads"]) for line in lines)]
    across = min(len(cases), 2)
    where = f"{lines[0]['device']}, {lines[0]['dtype']}"
    title = f"Forward and backward on several GPUs, times as fast as one; a dash is the bound ({where})"
    figure, axes = _figure(-(-len(cases) // across), across, title)
    for axis, (ranks, n, kv_heads) in zip(axes.flat, cases, strict=False):
        shown = select(lines, ranks=ranks, n=n, kv_heads=kv_heads)
        patterns = [*dict.fromkeys(line["pattern"] for line in shown)]
        for i, (name, (legend, hue)) in enumerate(CONTEXT_LOOKS.items()):
            mine = select(shown, provider=name)
            places = [patterns.index(line["pattern"]) + 0.2 * (i - 1.5) for line in mine]
            if not mine:
                continue
            axis.bar(places, [line["speedup"] for line in mine], 0.18, color=hue, label=legend)
            bounds = [line["speedup"] * line["ms"] / line["bound_ms"] for line in mine]
            axis.hlines(bounds, [place - 0.09 for place in places], [place + 0.09 for place in places], color="black")
        axis.axhline(ranks, color="#888888", linewidth=0.7, linestyle=":")
        axis.set_xticks(range(len(patterns)), patterns)
        axis.set_xlim(-0.5, len(patterns) - 0.5)
        axis.set_title(f"{ranks} GPUs, {short(n)} tokens, {shown[0]['heads']} on {kv_heads} heads", fontsize=9)
    for axis in axes.flat[len(cases) :]:
        axis.set_visible(False)
    _legend(figure)
    return figure


def figures(
    attention: Sequence[Line], mask_lines: Sequence[Line], context_lines: Sequence[Line] = ()
) -> dict[str, Any]:
    """Name -> Figure of everything that was measured; a sweep that was not run has none."""
    found: dict[str, Any] = {}
    if of_speed := select(attention, bench="attention"):
        shown = next(iter(measurements.settings(of_speed).values()))
        found["speed"] = speed(shown, measurements.matmul_rate(attention, shown))
    drawings = {"length": length, "density": density, "block-size": block_sizes, "change": change}
    for name, draw in drawings.items():
        if shown := swept(attention, name):
            found[name] = draw(shown)
    found["masks"] = masks(mask_lines)
    if shared := select(context_lines, bench="context_parallel"):
        found["context_parallel"] = context(shared)
    return found
