"""Tables of the main benchmark and its sweeps, from attention.jsonl."""

from __future__ import annotations

import re
import statistics

import pandas as pd

from ..run.sweeps import TIMED
from . import lines as measurements
from . import summaries
from .lines import DIRECTIONS, SETTING, groups, providers, select
from .markdown import joined, listing, table
from .summaries import Value, ranges

# sweeps with a picture -> heading of their section, and title of the picture
SWEEPS = {
    "length": ("Length", "Time against length, at a fixed number of keys for each query"),
    "density": ("Density", "Time against density, and the break-even density"),
    "block-size": ("Block size", "Time against the block size of the layout"),
    "change": ("A new mask at every step", "A step with one mask for all steps, and with a new mask each step"),
}
# benchmarks whose name in results/attention.md is longer
NAMES = {
    "regroup": "one mask stored in finer blocks (`--sweep regroup`)",
    "change": "a new mask at every step (`--sweep change`)",
    "fine": "random blocks of 16 to 64 (`--sweep fine`)",
}
# explanations of the tables of --sweep change
STEPS = (
    '`< x`: the difference is smaller than x, the variation between steps, so it could not be resolved. In "a '
    'synchronized step", the host waits for the GPU after each step. In "many steps in a row", it does not wait, as in '
    "training."
)
FIRST_CALL = (
    '"First call" is the time of the first call. It includes compilation, unless an earlier measurement has compiled '
    "the kernel."
)
FLEX_MASKS = (
    "`create_block_mask` is the usual way to make a mask for FlexAttention. It evaluates a mask function at every "
    "pair; in the row `create_block_mask, compiled`, it is compiled itself. In the rows without `create_block_mask`, "
    "FlexAttention gets its mask from `BlockMask.from_kv_blocks`. The block lists are made in advance, except for a "
    "mask selected on the GPU, where they are made on the GPU."
)
# over the table of --sweep fine with speed-ups
SPEEDUPS = (
    "Speed-up: time of the baseline divided by our time, over the masks and head dimensions of the table above. The "
    "mean is geometric; `slower` counts the cases in which ours takes longer."
)
CHART = "![TFLOP/s by mask, forward and backward](benchmarks/results/speed.png)"


def most(lines: pd.DataFrame) -> pd.DataFrame:
    """The lines of the GPU with the most measurements, which tables and pictures show."""
    return next(iter(groups(lines, "device")), lines)


def main_lines(lines: pd.DataFrame) -> pd.DataFrame:
    """Forwards and backwards of the main benchmark, in the setting with the most measurements."""
    shown = groups(select(lines, bench="attention"), SETTING)[0]
    return shown[shown["direction"].isin(DIRECTIONS)]


def swept(lines: pd.DataFrame, sweep: str) -> pd.DataFrame:
    """The lines of a sweep. Of density only head_dims measured up to half of all blocks: fewer show no break-even."""
    found = select(lines, bench=sweep)
    if sweep == "density":
        reached = found[(found["pattern"] != "dense") & (found["density"] >= 0.5)]
        found = found[found["head_dim"].isin(reached["head_dim"])]
    return found


def _setting(lines: pd.DataFrame) -> str:
    text = "One {device}, {dtype}, {n:,} tokens, batch {batch}, hidden size {hidden}"
    return text.format_map(lines.iloc[0])


def caption(lines: pd.DataFrame) -> str:
    bench = lines["bench"].iloc[0]
    sweep = "" if bench == "attention" else f" --sweep {bench}"
    versions = measurements.versions(lines, "torch", "triton")
    commits = measurements.commits(lines)
    return f"{_setting(lines)}, `python -m benchmarks.run.attention{sweep}`, {commits}, {versions}."


def short_ms(value: float) -> str:
    """1,510 or 71 or 1.0: few digits."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def speed_table(lines: pd.DataFrame) -> str:
    """TFLOP/s, forward / backward, a column for each provider; the largest head_dim first."""
    columns, case = providers(lines), ["pattern", "density", "head_dim"]
    rows = []
    lines = lines.sort_values("head_dim", ascending=False, kind="stable")
    for (pattern, density, head_dim), found in lines.groupby(case, sort=False):
        rates = {(line.by, line.direction): f"{line.tflops:.0f}" for line in found.itertuples()}
        cells = [" / ".join(rates.get((by, direction), "-") for direction in DIRECTIONS) for by in columns]
        rows.append([pattern, f"{density:.3g}", str(head_dim), *(cell.replace("- / -", "-") for cell in cells)])
    return table([*case, *columns], rows)


def speed_section(lines: pd.DataFrame) -> str:
    """Caption, table and speed-ups of the main benchmark on one GPU."""
    shown = main_lines(lines)
    rate = measurements.matmul_rate(lines, shown)
    product = "" if rate is None else f" A matrix product of 8192 x 8192 x 8192 ran at {rate:.0f} TFLOP/s."
    return joined(
        f"{caption(shown)} TFLOP/s, counting only the operations of stored 128 x 128 blocks, forward / backward; `-`: "
        f"unsupported or not measured. {measurements.order_of_timing(shown)}{product}",
        speed_table(shown),
        "Speed-up: time of the baseline divided by our time, over forward and backward and both head dimensions. The "
        "mean is geometric; `slower` counts the cases in which ours takes longer.",
        ranges(summaries.speedups(shown), "backend", "baseline"),
    )


def cost_table(lines: pd.DataFrame, rate: float | None) -> str:
    """Times with percentiles, memory, and the times of making the mask and of the first call."""
    keys = ["by", "pattern", "head_dim"]
    masks = select(lines, direction="mask")[[*keys, "ms"]]
    shown = lines[lines["direction"].isin(DIRECTIONS)].merge(masks, "left", on=keys, suffixes=("", "_mask"))
    shown["mask"] = ["-" if pd.isna(ms) else short_ms(ms) for ms in shown["ms_mask"]]
    shown["setup"] = shown["setup_ms"].map(short_ms)
    shown["share"] = ["-" if rate is None else f"{tflops / rate:.0%}" for tflops in shown["tflops"]]
    shown["peak_mb"] = shown["peak_bytes"] / 1e6
    columns = {
        "pattern": "{pattern}", "head_dim": "{head_dim}", "library, backend": "{by}", "direction": "{direction}",
        "ms (p20 to p80)": "{ms:.3f} ({ms_p20:.3f} to {ms_p80:.3f})", "TFLOP/s": "{tflops:.0f}",
        "share of matmul throughput": "{share}", "peak MB": "{peak_mb:,.0f}", "mask ms": "{mask}",
        "first call ms": "{setup}",
    }  # fmt: skip
    return listing(shown, columns)


def _settings(lines: pd.DataFrame) -> list[pd.DataFrame]:
    """The lines of one benchmark by setting, the largest first; of --sweep length by device and length."""
    found = groups(lines, SETTING)
    if (lines["bench"] != "length").any():
        return found
    devices = [group["device"].iloc[0] for group in found]
    return sorted(found, key=lambda group: (devices.index(group["device"].iloc[0]), group["n"].iloc[0]))


def everything(lines: pd.DataFrame) -> str:
    """The text of results/attention.md: every setting, every sweep."""
    parts = [
        "# Attention, all measurements",
        (
            'Written by `python -m benchmarks.report` from attention.jsonl. "Share of matmul throughput" is the '
            "throughput divided by that of a large matrix multiplication on the same GPU. Peak memory is what a call "
            'allocates, without its inputs; for a backward it includes the gradients. "Mask ms" is the time to turn a '
            "boolean tensor with one entry per block on the host into the library's mask on the device. "
            f"{FIRST_CALL} `-`: not measured."
        ),
    ]
    for bench in lines["bench"][lines["bench"] != "matmul"].unique():
        for shown in _settings(select(lines, bench=bench)):
            first = shown.iloc[0]
            name = NAMES.get(bench, bench)
            parts.append(f"## {name}, {first['n']:,} tokens, batch {first['batch']}, {first['device']}")
            if bench == "change":
                parts.append(change_section(shown))
            else:
                parts += [caption(shown), cost_table(shown, measurements.matmul_rate(lines, shown))]
    return "\n\n".join(parts) + "\n"


def change_section(lines: pd.DataFrame) -> str:
    """Wall-clock milliseconds of a step with one mask and with new masks: the tables of each setting."""
    parts = [
        (
            'p20 and p80 are percentiles. "Ms for the change" is the difference between a step with a new mask and one '
            f"with the same mask. {STEPS} {FIRST_CALL}"
        ),
        FLEX_MASKS if (lines["provider"] == "flex").any() else "",
    ]
    columns = {
        "library": "{by}", "mask": "{pattern}", "head_dim": "{head_dim}",
        "ms per step (p20 to p80)": "{ms:.2f} ({ms_p20:.2f} to {ms_p80:.2f})", "ms for the change": "{cost}",
        "first call ms": "{setup}",
    }  # fmt: skip
    for found in groups(lines, SETTING):
        parts.append(caption(found))
        for direction, name in TIMED.items():
            shown = select(found, direction=direction)
            if len(shown):
                shown = shown.assign(cost=summaries.change_costs(shown), setup=shown["setup_ms"].map(short_ms))
                parts += [f"{name[0].upper()}{name[1:]}:", listing(shown, columns)]
    return joined(*parts)


def fine_section(lines: pd.DataFrame) -> str:
    """TFLOP/s and speed-ups of random small blocks, for each length; "" without lines."""
    parts = []
    for shown in groups(lines[lines["direction"].isin(DIRECTIONS)], SETTING):
        text = (
            f"{caption(shown)} TFLOP/s, counting only the operations of stored blocks, forward / backward; the first "
            "number in a pattern's name is the block size, the second the density. "
            f"{measurements.order_of_timing(shown)}"
        )
        speedups = ranges(summaries.speedups(shown), "backend", "baseline", "direction")
        parts += [text, speed_table(shown), SPEEDUPS if speedups else "", speedups]
    return joined(*parts)


def sweeps_section(lines: pd.DataFrame) -> str:
    """The pictures and tables of the sweeps that were run."""
    by = ("measurement", "backend", "baseline")
    tables = {
        "length": lambda shown: ranges(summaries.growth(shown), "measurement", "backend", "direction"),
        "density": lambda shown: ranges(summaries.break_evens(shown), *by, "direction"),
        "block-size": lambda shown: joined(
            ranges(summaries.small_blocks(shown), *by), ranges(summaries.small_block_speedups(shown), *by)
        ),
        "change": change_section,
    }
    parts = []
    for name, (heading, title) in SWEEPS.items():
        shown = swept(lines, name)
        if len(shown):
            parts += [f"### {heading}", f"![{title}](benchmarks/results/{name}.png)", tables[name](shown)]
    fine = select(lines, bench="fine")
    if len(fine):
        parts += ["### Random blocks of 16 to 64", fine_section(fine)]
    costs = summaries.deterministic(select(lines, bench="deterministic"))
    if costs:
        parts += ["### Deterministic backward", ranges(costs, *by, "head_dim")]
    return joined(*parts)


# ---- other GPUs ----


def _other_gpus(lines: pd.DataFrame) -> list[pd.DataFrame]:
    """The lines of each GPU but the first on which the main benchmark ran."""
    return [found for found in groups(lines, "device")[1:] if (found["bench"] == "attention").any()]


def other_gpus_values(lines: pd.DataFrame) -> list[Value]:
    """Speed-ups on other GPUs than the first one."""
    return [
        value
        for shown in map(main_lines, _other_gpus(lines))
        for value in summaries.speedups(shown, f"{summaries.SPEEDUP} on {shown['device'].iloc[0]}")
    ]


def other_gpus_section(lines: pd.DataFrame) -> str:
    """The tables of the main benchmark on other GPUs; "" without any."""
    return joined(*map(speed_section, _other_gpus(lines)))


# ---- the speed section of README.md ----

HOPPER, TRITON, FLEX, FLASH_4, CUDNN = (
    measurements.LABELS[by]
    for by in (
        ("blocksparse_flash", "hopper"),
        ("blocksparse_flash", "triton"),
        ("flex", "triton"),
        ("flash_attention_4", "cute"),
        ("cudnn", "cudnn"),
    )
)
# the mask of the second sentence
SPARSE = "bigbird"


def _speedups(shown: pd.DataFrame, baseline: str, backend: str = HOPPER) -> list[float]:
    """Of a backend of ours over a peer, over all masks of the chart."""
    found = summaries.speedups(shown)
    return [value.value for value in found if (value.backend, value.baseline) == (backend, baseline)]


def _portable(shown: pd.DataFrame) -> str:
    """The sentence on `triton`, which other GPUs run; "" if it was not measured."""
    found = _speedups(shown, FLEX, TRITON)
    if not found:
        return ""
    return (
        f" `triton`, which runs on other GPUs too, is {min(found):.2f} to {max(found):.2f} times as fast here "
        f"({statistics.geometric_mean(found):.2f})."
    )


def _across_runs(shown: pd.DataFrame, baseline: str) -> str:
    """How many of the ratios of `_speedups` compare different commits, as a sentence; "" if none does."""
    commits = shown.pivot_table(
        index=["pattern", "head_dim", "direction"], columns="by", values="commit", aggfunc="first", observed=True
    )
    both = commits[[HOPPER, baseline]].dropna()
    n_across = int((both[HOPPER] != both[baseline]).sum())
    return f" {n_across} of {len(both)} ratios compare runs of different commits." if n_across else ""


def _against_flex(shown: pd.DataFrame) -> str:
    """How many times as fast as FlexAttention, over all masks of the chart; "" if it was not measured."""
    found = _speedups(shown, FLEX)
    if not found:
        return ""
    return (
        f"- Over the {shown['pattern'].nunique()} masks of the chart, the backend for Hopper GPUs, `hopper`, is "
        f"{min(found):.2f} to {max(found):.2f} times as fast as compiled FlexAttention (geometric mean "
        f"{statistics.geometric_mean(found):.2f}).{_portable(shown)} The masks consist of whole blocks of 128 x 128 "
        f"pairs, except on the causal diagonal.{_across_runs(shown, FLEX)}"
    )


def _against_flash_4(shown: pd.DataFrame) -> str:
    """How many times as fast as FlashAttention-4, over all masks of the chart; "" if it was not measured."""
    found = _speedups(shown, FLASH_4)
    if not found:
        return ""
    return (
        f"- Compared with FlashAttention-4 on the same blocks, `hopper` is {min(found):.2f} to {max(found):.2f} times "
        f"as fast (geometric mean {statistics.geometric_mean(found):.2f}); it is slower in "
        f"{sum(value < 1 for value in found)} of {len(found)} cases.{_across_runs(shown, FLASH_4)}"
    )


def _against_dense(shown: pd.DataFrame) -> str:
    """Milliseconds with a sparse mask and with dense attention by cuDNN; "" if either was not measured."""
    head_dim = shown["head_dim"].max()
    sparse, dense = (
        select(shown, by=by, pattern=pattern, head_dim=head_dim) for by, pattern in ((HOPPER, SPARSE), (CUDNN, "dense"))
    )
    if len(sparse) < 2 or len(dense) < 2:
        return ""
    return (
        f"- With a BigBird mask that stores {sparse['density'].iloc[0]:.1%} of the blocks, forward and backward take "
        f"{sparse['ms'].sum():.1f} ms together at head dimension {head_dim}; dense attention with cuDNN takes "
        f"{dense['ms'].sum():.1f} ms."
    )


def _growth(lines: pd.DataFrame) -> str:
    """How time grows with the length; "" if one length was measured."""
    found = [value.value for value in summaries.growth(lines) if value.backend == HOPPER]
    if not found:
        return ""
    lengths = select(lines, pattern="local")["n"]
    first, last = lengths[lengths >= summaries.LINEAR_FROM].min(), lengths.max()
    return (
        f"- With a fixed number of keys per query, {last // first} times as many tokens ({last:,} instead of "
        f"{first:,}) take {min(found):.0f} to {max(found):.0f} times as long."
    )


def front_page(lines: pd.DataFrame) -> str:
    """What was measured on, four statements and the chart; statements about what was not measured are left out.

    lines  all lines of one GPU
    """
    shown = main_lines(lines)
    length = select(lines, bench="length")
    sentences = [_against_flex(shown), _against_flash_4(shown), _against_dense(shown), _growth(length)]
    versions = measurements.versions(shown, "torch", "triton").replace("torch", "PyTorch").replace("triton", "Triton")
    # without the CUDA version of the wheel: 2.11.0+cu130
    versions = re.sub(r"\+\w+", "", versions)
    return joined(CHART, f"{_setting(shown)}, {versions}:", "\n".join(filter(None, sentences)))
