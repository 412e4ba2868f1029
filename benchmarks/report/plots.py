"""Plots of result lines: speed by pattern, the sweeps, mask construction, bytes moved, several GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from . import context_parallel, io
from . import lines as measurements
from .attention import SWEEPS, main_lines, most, swept
from .lines import DIRECTIONS, SETTING, break_even, groups, panels, providers, select
from .summaries import dense_times, sparse_curves

# in the order of LABELS, ours in blues; distinguishable with color blindness
HUES = (
    "#08306b", "#4292c6", "#e69f00", "#d55e00", "#cc79a7", "#009e73", "#005a32", "#8c510a", "#66c2a5", "#b3a100",
    "#555555", "#999999", "#cccccc",
)  # fmt: skip
COLORS = dict(zip(measurements.LABELS.values(), HUES, strict=True))
# provider -> (name, color)
MASK_STYLES = {
    "blocksparse_flash": ("blocksparse_flash", "#08306b"),
    "flex, compiled": ("create_block_mask, compiled", "#e69f00"),
    "flex, compiled, first call": ("create_block_mask, first call (compiles)", "#f3cf80"),
    "flex": ("create_block_mask, not compiled", "#d55e00"),
    "dense": ("a bool for every pair, then blocks", "#999999"),
}
CONTEXT_HUES = dict(zip(context_parallel.LABELS, ("#08306b", "#4292c6", "#9ecae1", "#999999", "#e69f00"), strict=True))
# sweep with a curve for each pattern -> (column, its unit, patterns with dashed curves, what all panels have in common)
CURVES = {
    "length": ("n", "tokens", ("dense", "causal"), "; bands: 20th to 80th percentile"),
    "block-size": ("side", "side of a block, tokens", ("random",), ", {n:,} tokens; the share stored is equal"),
}
# width of all bars of one pattern; patterns are 1 apart
BARS = 0.84


def color(by: str) -> str:
    return COLORS.get(by, "#000000")


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


def _legend(figure: Any) -> Any:
    """The figure with one legend for all panels, below them."""
    found = (zip(*axis.get_legend_handles_labels(), strict=True) for axis in figure.axes)
    entries = {name: handle for axis in found for handle, name in axis}
    # four long names are wider than two panels
    across = 4 if max(map(len, entries)) <= 40 else 2
    place = {"loc": "outside lower center", "ncols": min(across, len(entries)), "frameon": False}
    figure.legend([*entries.values()], [*entries], **place)
    return figure


def _curve(axis: Any, lines: pd.DataFrame, x: str, name: str, hue: str, linestyle: str = "-") -> None:
    """Medians over a column, with a band from the 20th to the 80th percentile."""
    lines = lines.sort_values(x, kind="stable")
    axis.plot(lines[x], lines["ms"], marker="o", markersize=4, color=hue, label=name, linestyle=linestyle)
    axis.fill_between(lines[x], lines["ms_p20"], lines["ms_p80"], color=hue, alpha=0.15, linewidth=0)


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


def _setting(lines: pd.DataFrame) -> str:
    """`NVIDIA H200, bf16, batch 1, hidden size 2048`: what all panels have in common."""
    return "{device}, {dtype}, batch {batch}, hidden size {hidden}".format_map(groups(lines, SETTING)[0].iloc[0])


def _tokens(lines: pd.DataFrame) -> str:
    return f"{lines['n'].iloc[0]:,} tokens"


def _panels(lines: pd.DataFrame, title: str) -> tuple[Any, Iterator[tuple[Any, pd.DataFrame]]]:
    """A figure with a row for each head_dim and a column for each direction, and the lines of each panel."""
    found = [*panels(lines)]
    figure, axes = _figure(len(found) // len(DIRECTIONS), len(DIRECTIONS), title)
    for axis, (head_dim, direction, _) in zip(axes.flat, found, strict=True):
        axis.set_title(f"{DIRECTIONS[direction]}, head_dim {head_dim}", fontsize=10)
    return figure, zip(axes.flat, (panel for *_, panel in found), strict=True)


def speed(lines: pd.DataFrame, rate: float | None) -> Any:
    """Bars: TFLOP/s by pattern and provider; a line at what a large matrix product reaches."""
    title = (
        f"TFLOP/s of stored 128 x 128 blocks, higher is better\n{_setting(lines)}, {_tokens(lines)}; "
        "below each pattern the share of blocks that it stores"
    )
    figure, found = _panels(lines, title)
    for axis, panel in found:
        patterns = dict(zip(panel["pattern"], panel["density"], strict=True))
        names = providers(panel)
        width = BARS / max(1, len(names))
        for place, by in enumerate(names):
            mine = select(panel, by=by)
            lefts = [[*patterns].index(pattern) - BARS / 2 + (place + 0.5) * width for pattern in mine["pattern"]]
            axis.bar(lefts, mine["tflops"], 0.92 * width, color=color(by), label=by)
        if rate is not None:
            axis.axhline(rate, color="black", linestyle=":", linewidth=1, label="a large matrix product")
        labels = [f"{name}\n{density:.0%}" for name, density in patterns.items()]
        axis.set_xticks(range(len(patterns)), labels, fontsize=8)
        axis.set_ylabel("TFLOP/s")
    return _legend(figure)


def curves(lines: pd.DataFrame, sweep: str) -> Any:
    """Curves: time over the length, or at equal density over the side of a block, for each provider and pattern."""
    x, unit, dashed, common = CURVES[sweep]
    title = f"{SWEEPS[sweep][1]}\n{_setting(lines)}{common.format_map(lines.iloc[0])}"
    # of `random, 16`: the pattern and the side of its blocks
    names = lines["pattern"].str.partition(", ")
    figure, found = _panels(lines.assign(pattern=names[0], side=pd.to_numeric(names[2])), title)
    for axis, panel in found:
        for by in providers(panel):
            for pattern in panel["pattern"].unique():
                mine = select(panel, by=by, pattern=pattern)
                if len(mine):
                    _curve(axis, mine, x, f"{by}, {pattern}", color(by), "--" if pattern in dashed else "-")
        places = sorted(panel[x].unique())
        _ticks(axis, places, [short(place) for place in places])
        _plain_log(axis)
        axis.set_xlabel(unit)
    return _legend(figure)


def density(lines: pd.DataFrame) -> Any:
    """Curves: time over density; dense times are level lines, and a dot marks where ours crosses the fastest."""
    title = f"{SWEEPS['density'][1]}\n{_setting(lines)}, {_tokens(lines)}, random 128 x 128 blocks"
    figure, found = _panels(lines, title)
    for axis, panel in found:
        curves, dense = sparse_curves(panel), dense_times(panel)
        for by, curve in curves.items():
            _curve(axis, curve, "density", by, color(by))
        for line in dense.itertuples():
            axis.axhline(line.ms, color=color(line.by), linestyle="--", linewidth=1, label=f"dense, {line.by}")
        levels = []
        for by, curve in sparse_curves(select(panel, is_ours=True)).items() if len(dense) else ():
            fastest = dense["ms"].iloc[0]
            crossing = break_even(curve["density"], curve["ms"], fastest)
            if crossing is not None:
                axis.plot([crossing], [fastest], marker="o", markersize=9, markerfacecolor="none", color=color(by))
                levels.append(f"{crossing:.0%} ({curve['backend'].iloc[0]})")
        if levels:
            text = f"as slow as the fastest dense\nfrom density {', '.join(levels)} on"
            axis.text(0.03, 0.8, text, transform=axis.transAxes, fontsize=8, va="top")
        axis.set_xscale("log")
        axis.set_xticks([0.01, 0.03, 0.1, 0.3, 1.0], ["1%", "3%", "10%", "30%", "100%"])
        axis.set_xticks([], minor=True)
        _plain_log(axis)
        axis.set_xlabel("share of blocks stored")
    return _legend(figure)


def change(lines: pd.DataFrame) -> Any:
    """Bars: a synchronized step (mask, forward, backward) with one mask and with new ones; a panel per length."""
    lines = select(lines, direction="step")
    cases = [*lines.assign(largest_first=-lines["head_dim"]).groupby(["n", "largest_first"])]
    title = f"{SWEEPS['change'][1]}\n{_setting(lines)}; wall clock of mask, forward and backward"
    figure, axes = _figure(len(cases), 1, title)
    # the names of the ways are long
    figure.set_figwidth(9)
    for axis, ((n, _), found) in zip(axes[:, 0], cases, strict=True):
        ways, names = [*found["pattern"].unique()], providers(found)
        for place, by in enumerate(names):
            mine = select(found, by=by)
            rows = [ways.index(way) - BARS / 2 + (place + 0.5) * BARS / len(names) for way in mine["pattern"]]
            bars = axis.barh(rows, mine["ms"], 0.78 / len(names), color=color(by), label=by)
            axis.bar_label(bars, [f"{ms:.3g}" for ms in mine["ms"]], padding=3, fontsize=8)
        axis.set_yticks(range(len(ways)), ways)
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set_title(f"{n:,} tokens, head_dim {found['head_dim'].iloc[0]}", fontsize=10)
        # a rebuild that evaluates every pair may take a hundred times as long as a step
        axis.set_xscale("log" if found["ms"].max() > 20 * found["ms"].min() else "linear")
        axis.set_xlabel("milliseconds a step")
    return _legend(figure)


def masks(lines: pd.DataFrame) -> Any:
    """Curves: time to build each mask that peers build too, over its length."""
    shared = lines.loc[~lines["is_ours"], "pattern"].unique()
    devices = ", ".join(sorted(lines["device"].unique()))
    title = f"Time to build a mask, lower is better\none core of {devices}, blocks of 128"
    figure, axes = _figure(1, len(shared), title)
    for axis, pattern in zip(axes[0], shared, strict=True):
        found = select(lines, pattern=pattern)
        for provider, (name, hue) in MASK_STYLES.items():
            mine = select(found, provider=provider)
            if len(mine):
                _curve(axis, mine, "n", name, hue)
        lengths = sorted(found["n"].unique())
        _ticks(axis, lengths, [short(n) for n in lengths])
        _plain_log(axis)
        axis.set_title(pattern, fontsize=10)
        axis.set_xlabel("tokens")
    return _legend(figure)


def bytes_moved(lines: pd.DataFrame) -> Any:
    """Curves: bytes moved over density, per backend, with the expected bytes; both axes logarithmic."""
    lines = io.counted(select(lines, heads=lines["heads"].max()))
    where = "{device}, bf16, batch {batch}, {heads} heads, {n:,} tokens".format_map(lines.iloc[0])
    figure, found = _panels(lines, f"Bytes moved against the share of stored blocks\n{where}")
    for axis, panel in found:
        for by in providers(panel):
            mine = select(panel, by=by).sort_values("density", kind="stable")
            for column, name, style in (
                ("on_chip", "L2 to SMs", {"marker": "o", "color": color(by)}),
                ("memory", "device memory", {"marker": "s", "markersize": 4, "linestyle": "--", "color": color(by)}),
                ("bound", "bound", {"linestyle": ":", "color": "#555555"}),
                ("tiles", "what tiles load", {"linestyle": "-.", "color": "#555555"}),
            ):
                axis.plot(mine["density"], mine[column], label=f"{name}, {by}", **style)
        densities = sorted(panel["density"].unique())
        _ticks(axis, densities, [f"{density:.3g}" for density in densities])
        axis.set_yscale("log")
        axis.set_xlabel("share of blocks stored")
        axis.set_ylabel("bytes")
    return _legend(figure)


def context(lines: pd.DataFrame) -> Any:
    """Speed-ups of a forward and backward over one GPU: a panel for each number of ranks, length and KV heads."""
    cases = context_parallel.settings(lines, direction="step")
    across = min(len(cases), 2)
    where = "{device}, {dtype}".format_map(cases[0].iloc[0])
    title = f"Forward and backward on several GPUs, times as fast as one; a dash is the bound ({where})"
    figure, axes = _figure(-(-len(cases) // across), across, title)
    for axis, shown in zip(axes.flat, cases, strict=False):
        patterns = [*shown["pattern"].unique()]
        for i, (provider, hue) in enumerate(CONTEXT_HUES.items()):
            mine = select(shown, provider=provider)
            places = [patterns.index(pattern) + 0.2 * (i - 1.5) for pattern in mine["pattern"]]
            if places:
                axis.bar(places, mine["speedup"], 0.18, color=hue, label=context_parallel.LABELS[provider])
                ends = [[place + side for place in places] for side in (-0.09, 0.09)]
                axis.hlines(mine["bound"], *ends, color="black")
        case = shown.iloc[0]
        axis.axhline(case["ranks"], color="#888888", linewidth=0.7, linestyle=":")
        axis.set_xticks(range(len(patterns)), patterns)
        axis.set_xlim(-0.5, len(patterns) - 0.5)
        heads = f"{case['heads']}/{case['kv_heads']} heads"
        axis.set_title(f"{case['ranks']} GPUs, {short(case['n'])} tokens, {heads}", fontsize=9)
    for axis in axes.flat[len(cases) :]:
        axis.set_visible(False)
    return _legend(figure)


def figures(lines: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """Name -> Figure of everything that was measured, from the lines of each result file."""
    found: dict[str, Any] = {}
    attention = most(lines["attention"])
    if (attention["bench"] == "attention").any():
        shown = main_lines(attention)
        found["speed"] = speed(shown, measurements.matmul_rate(attention, shown))
    for name in SWEEPS:
        shown = swept(attention, name)
        if len(shown):
            found[name] = curves(shown, name) if name in CURVES else {"density": density, "change": change}[name](shown)
    found["masks"] = masks(lines["masks"])
    if (lines["context_parallel"]["bench"] == "context_parallel").any():
        found["context_parallel"] = context(lines["context_parallel"])
    if len(lines["io"]):
        found["io"] = bytes_moved(lines["io"])
    return found
