"""Report: `python -m benchmarks.report` writes the tables of README.md, docs/, benchmarks/ and results/, and draws the
plots. It reads benchmarks/results/attention.jsonl, masks.jsonl and, if they exist, small.jsonl, decode.jsonl, io.jsonl,
context_parallel.jsonl and lra/, and the errors of explain's predictions. It replaces the sections between markers of
the pages in PAGES, and writes every measurement to results/attention.md, small.md, io.md and context_parallel.md.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from blocksparse_flash.explanation import prediction

from ..run import bounds
from . import context_parallel, decode, front_page, long_range, plots, small, summaries
from . import lines as measurements
from .lines import DIRECTIONS, Line, Setting, label, measured, provider_of, select
from .markdown import table
from .summaries import Value, ranges

BENCHMARKS = Path(__file__).parents[1]
RESULTS = BENCHMARKS / "results"
ROOT = BENCHMARKS.parent

# result files -> the keys that identify a measurement
FILES = {
    "attention": measurements.IDENTITY,
    "masks": measurements.IDENTITY,
    "small": small.IDENTITY,
    "decode": decode.IDENTITY,
    "io": measurements.IDENTITY,
    "context_parallel": context_parallel.IDENTITY,
}
# files that must exist
ALWAYS = ("attention", "masks")
MASK_COLUMNS = {
    "blocksparse_flash": "blocksparse_flash",
    "flex, compiled": "`create_block_mask`, compiled (first call)",
    "flex": "`create_block_mask`",
    "dense": "dense boolean mask, then blocks",
}


# ---- Markdown ----


def replaced(text: str, sections: dict[str, str]) -> str:
    """The text with each section replaced between `<!-- begin NAME: ... -->` and `<!-- end NAME -->`."""
    for name, section in sections.items():
        pattern = rf"(<!-- begin {name}:[^\n]*-->\n).*?(<!-- end {name} -->)"
        found = [*re.finditer(pattern, text, flags=re.DOTALL)]
        if len(found) != 1:
            raise ValueError(
                f"the text must have one pair of markers `<!-- begin {name}: ... -->`, it has {len(found)}"
            )
        body = f"{section}\n" if section else ""
        text = text[: found[0].end(1)] + body + text[found[0].start(2) :]
    return text


def _joined(*parts: str) -> str:
    return "\n\n".join(filter(None, parts))


def _ms(value: float) -> str:
    """1,510 or 71 or 1.0: few digits."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


# ---- attention ----


def caption(setting: Setting, lines: Sequence[Line]) -> str:
    bench = lines[0]["bench"]
    sweep = "" if bench == "attention" else f" --sweep {bench}"
    return (
        f"One {setting.device}, {setting.dtype}, {setting.n:,} tokens, batch {setting.batch}, hidden size "
        f"{setting.hidden}, `python -m benchmarks.run.attention{sweep}`, "
        f"{measurements.versions(lines, 'torch', 'triton')}."
    )


def speed_table(lines: Sequence[Line]) -> str:
    """TFLOP/s, forward / backward, a column for each provider."""
    providers = measured(lines)
    rates = {
        (provider_of(line), line["pattern"], line["head_dim"], line["direction"]): f"{line['tflops']:.0f}"
        for line in lines
        if line["direction"] in DIRECTIONS
    }
    densities = {(line["pattern"], line["head_dim"]): line["density"] for line in lines}
    rows = [["pattern", "density", "head_dim", *map(label, providers)]]
    for case, density in sorted(densities.items(), key=lambda item: -item[0][1]):
        cells = [" / ".join(rates.get((by, *case, each), "-") for each in DIRECTIONS) for by in providers]
        rows.append([case[0], f"{density:.3g}", str(case[1]), *(cell.replace("- / -", "-") for cell in cells)])
    return table(rows)


def main_setting(lines: Sequence[Line]) -> tuple[Setting, list[Line]]:
    """The setting of the main benchmark with the most measurements, and its forwards and backwards."""
    setting, shown = next(iter(measurements.settings(select(lines, bench="attention")).items()))
    return setting, [line for line in shown if line["direction"] in DIRECTIONS]


def speed_section(lines: Sequence[Line]) -> str:
    """Caption, table and speed-ups of the main benchmark on one GPU."""
    setting, shown = main_setting(lines)
    rate = measurements.matmul_rate(lines, shown)
    beside = "" if rate is None else f" A matrix product of 8192 x 8192 x 8192 ran at {rate:.0f} TFLOP/s."
    return _joined(
        f"{caption(setting, shown)} TFLOP/s of stored 128 x 128 blocks, forward / backward; `-`: unsupported or not "
        f"measured.{beside}",
        speed_table(shown),
        "Speed-up: time of the baseline divided by our time, over forward and backward and both head dimensions. The "
        "mean is geometric; `slower` counts the cases in which ours takes longer.",
        ranges(summaries.speedups(shown), "backend", "baseline"),
    )


def cost_table(lines: Sequence[Line], rate: float | None) -> str:
    """Times with percentiles, memory, and the times of making the mask and of the first call."""
    rows = [
        ["pattern", "head_dim", "by", "direction", "ms (p20 to p80)", "TFLOP/s", "of a matrix product", "peak MB",
         "mask ms", "first call ms"]
    ]  # fmt: skip
    masks = {(provider_of(line), line["pattern"], line["head_dim"]): line for line in select(lines, direction="mask")}
    for line in (line for line in lines if line["direction"] in DIRECTIONS):
        mask = masks.get((provider_of(line), line["pattern"], line["head_dim"]))
        rows.append(
            [
                line["pattern"], str(line["head_dim"]), label(provider_of(line)), line["direction"],
                f"{line['ms']:.3f} ({line['ms_p20']:.3f} to {line['ms_p80']:.3f})", f"{line['tflops']:.0f}",
                "-" if rate is None else f"{line['tflops'] / rate:.0%}", f"{line['peak_bytes'] / 1e6:,.0f}",
                "-" if mask is None else _ms(mask["ms"]), _ms(line["setup_ms"]),
            ]
        )  # fmt: skip
    return table(rows)


def everything(lines: Sequence[Line]) -> str:
    """The text of results/attention.md: every setting, every sweep."""
    parts = [
        "# Attention, all measurements",
        (
            "Written by `python -m benchmarks.report` from attention.jsonl. Peak memory is what a call allocates, "
            "without "
            "its inputs; for a backward it includes the gradients. The first call compiles, unless an earlier "
            "pattern has "
            "compiled the same kernel. Mask ms: from a bool per block on the host to the mask on the device. "
            "`-`: not measured."
        ),
    ]
    for bench in dict.fromkeys(line["bench"] for line in lines if line["bench"] != "matmul"):
        for setting, shown in measurements.settings(select(lines, bench=bench)).items():
            parts.append(f"## {bench}, {setting.n:,} tokens, batch {setting.batch}")
            if bench == "change":
                parts.append(change_section(shown))
            else:
                parts += [caption(setting, shown), cost_table(shown, measurements.matmul_rate(lines, shown))]
    return "\n\n".join(parts) + "\n"


def change_table(lines: Sequence[Line]) -> str:
    """Wall-clock milliseconds of a step with one mask and with a new mask; lines of one setting and direction."""
    rows = [["library", "mask", "head_dim", "ms per step (p20 to p80)", "ms for the change", "first call ms"]]
    rows += [
        [
            label(provider_of(line)), line["pattern"], str(line["head_dim"]),
            f"{line['ms']:.2f} ({line['ms_p20']:.2f} to {line['ms_p80']:.2f})", summaries.change_cost(lines, line),
            _ms(line["setup_ms"]),
        ]
        for line in lines
    ]  # fmt: skip
    return table(rows)


def change_section(lines: Sequence[Line]) -> str:
    """The tables of each setting, under its caption."""
    parts = ["p20 and p80 are percentiles. `< x`: the change costs less than x, the variation between steps."]
    if any(line["provider"] == "flex" for line in lines):
        parts.append(
            "`create_block_mask` is the usual way to make a mask for FlexAttention. It evaluates a mask function at "
            "every pair. The other new masks of FlexAttention are `BlockMask.from_kv_blocks` of block lists prepared "
            "in advance."
        )
    for setting, found in measurements.settings(lines).items():
        parts.append(caption(setting, found))
        for direction, name in measurements.TIMED.items():
            if shown := select(found, direction=direction):
                parts += [f"{name[0].upper()}{name[1:]}:", change_table(shown)]
    return _joined(*parts)


def sweeps_section(lines: Sequence[Line]) -> str:
    """The pictures and tables of the sweeps that were run."""
    by = ("measurement", "backend", "baseline")
    tables = {
        "length": lambda shown: ranges(summaries.growth(shown), "measurement", "backend", "direction"),
        "density": lambda shown: ranges(summaries.break_evens(shown), *by, "direction"),
        "block-size": lambda shown: ranges(summaries.small_blocks(shown), *by),
        "change": change_section,
    }
    parts = []
    for name, title in plots.SWEEPS.items():
        if shown := plots.swept(lines, name):
            parts += [f"![{title}](benchmarks/results/{name}.png)", tables[name](shown)]
    equal = summaries.deterministic(select(lines, bench="deterministic"))
    return _joined(*parts, ranges(equal, *by, "head_dim"))


# ---- one GPU, and others ----


def most(lines: Sequence[Line]) -> list[Line]:
    """The lines of the GPU with the most measurements, which tables and pictures show."""
    return next(iter(measurements.by_device(lines).values()), [])


def _elsewhere(lines: Sequence[Line]) -> list[list[Line]]:
    """The lines of each other GPU on which the main benchmark ran."""
    return [found for found in [*measurements.by_device(lines).values()][1:] if select(found, bench="attention")]


def elsewhere_values(lines: Sequence[Line]) -> list[Value]:
    """Rates on other GPUs relative to the first one, and speed-ups there."""
    keys = [key for key in measurements.IDENTITY if key != "device"]
    first = most(lines)
    rates = {tuple(line.get(key) for key in keys): line["tflops"] for line in first}
    found = []
    for each in _elsewhere(lines):
        setting, shown = main_setting(each)
        for line in (line for backend in measurements.ours(shown) for line in select(shown, backend)):
            rate = rates.get(tuple(line.get(key) for key in keys))
            if rate is not None:
                name = label(provider_of(line))
                ratio = line["tflops"] / rate
                found.append(
                    Value(f"TFLOP/s on {setting.device}", name, first[0]["device"], line["direction"], "", ratio)
                )
        found += summaries.speedups(shown, f"{summaries.SPEEDUP} on {setting.device}")
    return found


def elsewhere_section(lines: Sequence[Line]) -> str:
    """The tables of the main benchmark on other GPUs; empty without any."""
    return _joined(*map(speed_section, _elsewhere(lines)))


# ---- masks ----


def _mask_cell(lines: Sequence[Line], provider: str) -> str:
    found = {line["provider"]: line for line in lines}
    if provider not in found:
        return "-"
    first = found.get(f"{provider}, first call")
    inside = found[provider]["peak_bytes"] / 1e6 if first is None else first["ms"]
    return f"{_ms(found[provider]['ms'])} ({inside:,.0f})"


def _mask_name(pattern: str) -> str:
    """`documents, 10000, causal` -> `documents`, 10,000, causal; | would end a cell."""
    name, *rest = pattern.split(", ")
    rest = [f"{int(word):,}" if word.isdecimal() else word for word in rest]
    return ", ".join(["`" + name.replace("|", "\\|") + "`", *rest])


def masks_section(lines: Sequence[Line]) -> str:
    """Masks at the greatest length that peers can build, and at the greatest of all."""
    longest = max(line["n"] for line in lines)
    shared = max(line["n"] for line in lines if line["provider"] != "blocksparse_flash")
    rows = [["mask", "tokens", *MASK_COLUMNS.values()]]
    for n in (shared, longest):
        for pattern in dict.fromkeys(line["pattern"] for line in select(lines, n=n)):
            found = select(lines, n=n, pattern=pattern)
            rows.append([_mask_name(pattern), f"{n:,}", *(_mask_cell(found, provider) for provider in MASK_COLUMNS)])
    shown = [line for line in lines if line["n"] in (shared, longest)]
    return _joined(
        f"Building a mask, milliseconds of one CPU core (`python -m benchmarks.run.masks`, "
        f"{' and '.join(sorted({line['device'] for line in shown}))}, {measurements.versions(shown, 'torch')}, "
        f"blocks of "
        "128):",
        table(rows),
        "In brackets: peak memory in MB, or for the compiled function the milliseconds of the first call, which "
        "compiles. `-`: not measured, since time and memory grow with the square of the length.",
        "![Time to build a mask against its length](benchmarks/results/masks.png)",
    )


# ---- bytes ----


def _io_groups(lines: Sequence[Line]) -> list[list[Line]]:
    """The lines of each call, over densities."""
    found: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        key = tuple(line[name] for name in ("device", "backend", "n", "batch", "heads", "head_dim", "direction"))
        found.setdefault(key, []).append(line)
    return [sorted(group, key=lambda line: line["density"]) for group in found.values()]


def io_section(lines: Sequence[Line]) -> str:
    """Bytes moved over density, with the bound; empty without measurements."""
    groups = [group for group in _io_groups(lines) if len(group) > 1]
    if not groups:
        return ""
    rows = [
        ["backend", "direction", "heads", "head_dim", "L2 to SMs", "L2 to SMs / bound", "L2 to SMs / tile loads",
         "device memory"]
    ]  # fmt: skip
    for group in groups:
        moved = bounds.linear(group, bounds.on_chip)
        times, share = ([bounds.on_chip(line) / of(line) for line in group] for of in (bounds.theorem, bounds.of_tiles))
        memory = [(line["dram_read_bytes"] + line["dram_write_bytes"]) / 1e6 for line in (group[0], group[-1])]
        rows.append(
            [
                *(str(group[0][key]) for key in ("backend", "direction", "heads", "head_dim")),
                f"{moved.at_zero / 1e6:,.0f} + {moved.slope / 1e6:,.0f} s MB, R^2 {moved.fit:.4f}",
                f"{min(times):.2f} to {max(times):.2f}", f"{min(share):.2f} to {max(share):.2f}",
                f"{memory[0]:,.0f} to {memory[1]:,.0f} MB",
            ]
        )  # fmt: skip
    first, last = groups[0][0], groups[0][-1]
    return _joined(
        f"Bytes moved at {first['n']:,} tokens, as the density s grows from {first['density']:.2g} to "
        f"{last['density']:.2g} (`python -m benchmarks.run.io`, {first['device']}, "
        f"{measurements.versions(lines, 'torch', 'triton')}). [All measurements](benchmarks/results/io.md).",
        "- `L2 to SMs` is a linear fit in s.\n"
        "- `bound` is N d + s N^2 d^2 / M numbers ([FlashAttention](https://arxiv.org/abs/2205.14135), Proposition 4, "
        "constant 1), where M is how many numbers fit in the shared memory of a program.\n"
        "- `tile loads` are the bytes loaded and stored if each program loads all of its tiles.\n"
        "- The ratios are the smallest and the largest over s. `device memory` has the bytes read and written at the "
        "smallest and at the largest s.",
        table(rows),
        "![Bytes moved against density](benchmarks/results/io.png)",
    )


def every_byte(lines: Sequence[Line]) -> str:
    """The text of results/io.md: every measurement of benchmarks.run.io."""
    rows = [
        ["backend", "direction", "heads", "head_dim", "density", "bound MB", "tiles load MB", "L2 to SMs MB",
         "all of L2 MB", "device memory, read MB", "written MB", "kernels"]
    ]  # fmt: skip
    for line in (line for group in _io_groups(lines) for line in group):
        counted = (line[key] for key in ("sm_bytes", "l2_bytes", "dram_read_bytes", "dram_write_bytes"))
        moved = (bounds.theorem(line), bounds.of_tiles(line), *counted)
        rows.append(
            [
                *(str(line[key]) for key in ("backend", "direction", "heads", "head_dim")), f"{line['density']:.4g}",
                *("-" if value is None else f"{value / 1e6:,.1f}" for value in moved), str(line["n_kernels"]),
            ]
        )  # fmt: skip
    said = (
        "Written by `python -m benchmarks.report` from io.jsonl. The bound is that of FlashAttention's Proposition 4 "
        "with "
        "constant 1. `tiles load` assumes that every program reads each of its tiles from L2 once. On a GPU with a "
        "two-part "
        "L2, `all of L2` includes the traffic between the parts. `-`: not counted."
    )
    return _joined("# Bytes moved, all measurements", said, table(rows)) + "\n"


# ---- the whole ----


def prediction_section(calibrations: Sequence[prediction.Calibration]) -> str:
    """Errors of explain's predictions on the measurements that they were fitted to."""
    rows = [
        ["GPU", "backend", "direction", "head_dim", "measurements", "median error", "largest error",
         "largest error, left out of the fit"]
    ]  # fmt: skip
    rows += [
        [
            one.device.name, one.backend, one.direction, str(one.head_dim), str(one.n_lines),
            *(f"{error:.1%}" for error in (one.median_error, one.worst_error, one.unseen_error)),
        ]
        for one in calibrations
    ]  # fmt: skip
    return table(rows)


def read(results: Path) -> dict[str, list[Line]]:
    """The lines of each result file; none where nothing was measured."""
    found = {}
    for name, identity in FILES.items():
        path = results / f"{name}.jsonl"
        found[name] = measurements.read(path, identity) if path.exists() or name in ALWAYS else []
    found["lra"] = long_range.read(results / "lra")
    return found


def highlights(lines: dict[str, list[Line]]) -> str:
    """One table of the sweeps, small calls and other GPUs, and one of changing masks; empty without measurements."""
    attention = most(lines["attention"])
    values = [
        *summaries.growth(select(attention, bench="length")),
        *summaries.break_evens(plots.swept(attention, "density")),
        *summaries.small_blocks(select(attention, bench="block-size")),
        *summaries.deterministic(select(attention, bench="deterministic")),
        *(value for value in small.values(lines["small"]) if value.baseline == measurements.LABELS["flex", "triton"]),
        *elsewhere_values(lines["attention"]),
    ]
    changes = summaries.changes(select(attention, bench="change"))
    head = (
        "Milliseconds that a new mask adds to a step (mask, forward and backward). `< x`: less than x, the variation "
        "between steps. `-`: not measured."
    )
    return _joined(ranges(values, "measurement", "backend", "baseline"), *([head, changes] if changes else []))


def _speed(lines: dict[str, list[Line]]) -> str:
    shown = most(lines["attention"])
    return front_page.section(*main_setting(shown), shown)


# page -> marker -> text; links are relative to the top folder
PAGES: dict[str, dict[str, Callable[[dict[str, list[Line]]], str]]] = {
    "README.md": {"speed": _speed},
    "docs/performance.md": {
        "attention": lambda lines: speed_section(most(lines["attention"])),
        "highlights": highlights,
        "masks": lambda lines: masks_section(lines["masks"]),
    },
    "docs/cost.md": {"prediction": lambda _: prediction_section(prediction.calibrations())},
    "docs/decoding.md": {"decode": lambda lines: decode.section(lines["decode"])},
    "docs/lra.md": {"lra": lambda lines: long_range.section(lines["lra"])},
    "docs/distributed.md": {"context": lambda lines: context_parallel.summary(lines["context_parallel"])},
    "benchmarks/README.md": {
        "sweeps": lambda lines: sweeps_section(most(lines["attention"])),
        "elsewhere": lambda lines: elsewhere_section(lines["attention"]),
        "small": lambda lines: small.section(lines["small"]),
        "context": lambda lines: context_parallel.section(lines["context_parallel"]),
        "io": lambda lines: io_section(lines["io"]),
    },
}


def linked_from(page: str, section: str) -> str:
    """A section with its links into benchmarks/ relative to a page.

    >>> linked_from("docs/performance.md", "![](benchmarks/results/speed.png)")
    '![](../benchmarks/results/speed.png)'
    """
    folder = page.rpartition("/")[0]
    prefix = {"": "benchmarks/", "benchmarks": ""}.get(folder, "../benchmarks/")
    return section.replace("](benchmarks/", f"]({prefix}")


def written(root: Path, lines: dict[str, list[Line]]) -> dict[str, str]:
    """Page -> its text with every section as measured. root: the top folder of the pages."""
    return {
        page: replaced(
            (root / page).read_text(encoding="utf-8"),
            {name: linked_from(page, write(lines)) for name, write in sections.items()},
        )
        for page, sections in PAGES.items()
    }


def result_pages(lines: dict[str, list[Line]]) -> dict[str, str]:
    """The files of results/ with every measurement, by name; none for what was not measured."""
    writers = {
        "attention": everything,
        "small": small.everything,
        "io": every_byte,
        "context_parallel": context_parallel.everything,
    }
    return {f"{name}.md": write(lines[name]) for name, write in writers.items() if lines[name]}


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result lines, tables and pictures")
    parser.add_argument("--root", type=Path, default=ROOT, help="top folder of the pages whose sections are written")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    lines = read(options.results)
    for page, text in written(options.root, lines).items():
        (options.root / page).write_text(text, encoding="utf-8")
    for name, text in result_pages(lines).items():
        (options.results / name).write_text(text, encoding="utf-8")
    figures = plots.figures(most(lines["attention"]), lines["masks"], lines["context_parallel"])
    if lines["io"]:
        expected = {"bound": bounds.theorem, "what tiles load": bounds.of_tiles}
        figures["io"] = plots.io(lines["io"], expected, bounds.on_chip)
    for name, figure in figures.items():
        # no date and no version: equal lines give equal files
        figure.savefig(options.results / f"{name}.png", dpi=100, metadata={"Software": None})
        print(options.results / f"{name}.png")
