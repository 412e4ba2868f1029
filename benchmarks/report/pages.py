"""What do the measurements say? `python -m benchmarks.report` writes the tables of two pages and draws the pictures.

It reads benchmarks/results/attention.jsonl, masks.jsonl and, if they are there, small.jsonl, io.jsonl and context_parallel.jsonl, and
the table behind explain's predictions, and replaces what stands between the markers of the README, which has the main table and what
the others come to, and of benchmarks/README.md, which has those; everything measured goes to results/attention.md, small.md, io.md and
context_parallel.md. Knows Markdown. Must not know how anything is measured or drawn.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from blocksparse_flash.explanation import prediction

from ..run import bounds
from . import context_parallel, findings, plots, small
from . import lines as measurements
from .lines import Line, Setting
from .markdown import table

BENCHMARKS = Path(__file__).parents[1]
RESULTS = BENCHMARKS / "results"
README = BENCHMARKS.parent / "README.md"
PAGE = BENCHMARKS / "README.md"

# files of results -> what makes two of their lines measurements of the same thing
FILES = {
    "attention": measurements.IDENTITY,
    "masks": measurements.IDENTITY,
    "small": small.IDENTITY,
    "io": measurements.IDENTITY,
    "context_parallel": context_parallel.IDENTITY,
}
# those that must be there
ALWAYS = ("attention", "masks")
MASK_COLUMNS = {
    "blocksparse_flash": "blocksparse_flash",
    "flex, compiled": "`create_block_mask`, compiled (first call)",
    "flex": "`create_block_mask`",
    "dense": "dense bools, then blocks",
}


# ---- Markdown ----


def replaced(text: str, sections: dict[str, str]) -> str:
    """The text with each section between its markers, `<!-- begin NAME: ... -->` and `<!-- end NAME -->`, exchanged."""
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


def _both(forward: Line | None, backward: Line | None) -> str:
    said = [f"{line['tflops']:.0f}" if line is not None else "-" for line in (forward, backward)]
    return "-" if forward is None and backward is None else " / ".join(said)


def _ms(value: float) -> str:
    """1,510 or 71 or 1.0: no more digits than the eye wants."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


# ---- attention ----


def _cases(lines: Sequence[Line]) -> list[tuple[str, int]]:
    """(pattern, head_dim): the largest head_dim first, patterns in the order in which they were measured."""
    found = dict.fromkeys((line["pattern"], line["head_dim"]) for line in lines)
    return sorted(found, key=lambda case: -case[1])


def _find(lines: Sequence[Line], provider: tuple[str, str], case: tuple[str, int], direction: str) -> Line | None:
    wanted = (provider, *case, direction)
    found = ((measurements.who(line), line["pattern"], line["head_dim"], line["direction"]) for line in lines)
    return next((line for line, key in zip(lines, found, strict=True) if key == wanted), None)


def caption(setting: Setting, lines: Sequence[Line]) -> str:
    bench = lines[0]["bench"]
    sweep = "" if bench == "attention" else f" --sweep {bench}"
    return (
        f"One {setting.device}, {setting.dtype}, {setting.n:,} tokens, batch {setting.batch}, hidden size {setting.hidden}, "
        f"`python -m benchmarks.run.attention{sweep}`, {measurements.versions(lines, 'torch', 'triton')}."
    )


def speed_table(lines: Sequence[Line]) -> str:
    """TFLOP/s, forward / backward, a column for each provider."""
    providers = measurements.measured(lines)
    rows = [["pattern", "density", "head_dim", *map(measurements.label, providers)]]
    for case in _cases(lines):
        density = next(line["density"] for line in lines if line["pattern"] == case[0])
        cells = [_both(_find(lines, one, case, "fwd"), _find(lines, one, case, "bwd")) for one in providers]
        rows.append([case[0], f"{density:.3g}", str(case[1]), *cells])
    return table(rows)


def comparisons(lines: Sequence[Line]) -> str:
    """A sentence for each of our backends: how many times faster than each peer."""
    providers = measurements.measured(lines)
    sentences = []
    for ours in filter(measurements.is_ours, providers):
        said = []
        for peer in providers:
            ratio = None if measurements.is_ours(peer) else measurements.speedup(lines, ours, peer)
            if ratio is not None:
                said.append(
                    f"{ratio.least:.2f} to {ratio.most:.2f} times as fast as {measurements.label(peer)}, "
                    f"{ratio.mean:.2f} in the geometric mean of {ratio.n_cases} measurements"
                )
        if said:
            sentences.append(f"`{ours[1]}` is {'; '.join(said)}.")
    return " ".join(sentences)


def attention_section(lines: Sequence[Line]) -> str:
    """The README's table, and its picture."""
    return "\n\n".join(
        [*speed_parts(lines), "![TFLOP/s by pattern, forward and backward](benchmarks/results/speed.png)"]
    )


def speed_parts(lines: Sequence[Line]) -> list[str]:
    """Caption, table and comparisons of the main benchmark on one GPU: of the setting with the most measurements."""
    setting, shown = main_setting(lines)
    rate = measurements.matmul_rate(lines, shown)
    beside = "" if rate is None else f" A matrix product of 8192 x 8192 x 8192 ran at {rate:.0f}."
    said = (
        f"{caption(setting, shown)} TFLOP/s of stored 128 x 128 blocks, forward / backward; `-`: has no such mask, or "
        f"was not measured.{beside}"
    )
    return [said, speed_table(shown), comparisons(shown)]


def main_setting(lines: Sequence[Line]) -> tuple[Setting, list[Line]]:
    """Of the main benchmark the setting with the most measurements, and what was timed of a forward or a backward there."""
    setting, shown = next(iter(measurements.settings(measurements.of_bench(lines, "attention")).items()))
    return setting, [line for line in shown if line["direction"] in findings.DIRECTIONS]


def cost_table(lines: Sequence[Line], rate: float | None) -> str:
    """Everything else that was measured: times with percentiles, memory, what comes before the first call."""
    rows = [
        ["pattern", "head_dim", "by", "direction", "ms (p20 to p80)", "TFLOP/s", "of a matrix product", "peak MB",
         "mask ms", "first call ms"]
    ]  # fmt: skip
    for line in (line for line in lines if line["direction"] in ("fwd", "bwd")):
        provider, case = measurements.who(line), (line["pattern"], line["head_dim"])
        mask = _find(lines, provider, case, "mask")
        rows.append(
            [
                line["pattern"],
                str(line["head_dim"]),
                measurements.label(provider),
                line["direction"],
                f"{line['ms']:.3f} ({line['ms_p20']:.3f} to {line['ms_p80']:.3f})",
                f"{line['tflops']:.0f}",
                "-" if rate is None else f"{line['tflops'] / rate:.0%}",
                f"{line['peak_bytes'] / 1e6:,.0f}",
                "-" if mask is None else _ms(mask["ms"]),
                _ms(line["setup_ms"]),
            ]
        )
    return table(rows)


def everything(lines: Sequence[Line]) -> str:
    """The text of results/attention.md: every setting, every sweep."""
    parts = [
        "# Attention, all measurements",
        (
            "Written by `python -m benchmarks.report` from attention.jsonl. Peak memory is what a call allocates over what was "
            "there before; the backward's counts with its gradients. The first call compiles, unless an earlier pattern has "
            "compiled the same kernel; making a mask from a bool for each block, and bringing it to the device, is timed apart. `-`: not measured."
        ),
    ]
    for bench in dict.fromkeys(line["bench"] for line in lines if line["bench"] != "matmul"):
        for setting, shown in measurements.settings(measurements.of_bench(lines, bench)).items():
            parts.append(f"## {bench}, {setting.n:,} tokens, batch {setting.batch}")
            if bench == "change":
                parts.append(change_section(shown))
            else:
                parts += [caption(setting, shown), cost_table(shown, measurements.matmul_rate(lines, shown))]
    return "\n\n".join(parts) + "\n"


def change_table(lines: Sequence[Line]) -> str:
    """Milliseconds of a step, wall clock, with one mask for all steps and with a new one each step; lines of one setting and direction."""
    costs = measurements.change_costs(lines)
    rows = [["by", "pattern", "head_dim", "ms a step (p20 to p80)", "ms for the change", "first call ms"]]
    for line in lines:
        cost = costs.get((measurements.who(line), line["pattern"], line["head_dim"]))
        rows.append(
            [
                measurements.label(measurements.who(line)),
                line["pattern"],
                str(line["head_dim"]),
                f"{line['ms']:.2f} ({line['ms_p20']:.2f} to {line['ms_p80']:.2f})",
                "-" if cost is None else f"{cost:.2f}",
                _ms(line["setup_ms"]),
            ]
        )
    return table(rows)


def change_ratios(lines: Sequence[Line]) -> str:
    """How many times what a change costs ours it costs the peers: a point for each way to make a new mask of ours."""
    costs, noise, points = measurements.change_costs(lines), measurements.change_noise(lines), []
    for (provider, way, head_dim), mine in costs.items():
        if not measurements.is_ours(provider):
            continue
        name = f"- {measurements.label(provider)}, head_dim {head_dim}, {way}: {mine:.2f} ms for the change"
        # within the noise of the clock there is no ratio
        if mine <= noise[provider, way, head_dim]:
            points.append(f"{name}, less than the {noise[provider, way, head_dim]:.2f} ms by which its steps vary.")
            continue
        others = [
            f"{measurements.label(peer)}, {other}, takes {theirs:.2f} ms, {_beside(theirs, mine, noise[peer, other, dim])}"
            for (peer, other, dim), theirs in costs.items()
            if dim == head_dim and theirs > 0 and not measurements.is_ours(peer)
        ]
        if others:
            points.append(f"{name}; {'; '.join(others)}.")
    return "\n".join(points)


def _beside(theirs: float, mine: float, noise: float) -> str:
    return (
        f"{theirs / mine:.3g} times as much"
        if theirs > noise
        else f"less than the {noise:.2f} ms by which its steps vary"
    )


def change_section(lines: Sequence[Line]) -> str:
    """The table and the ratios of each setting, under its caption."""
    parts = []
    if any(line["provider"] == "flex" for line in lines):
        parts.append(
            "FlexAttention's users make a mask with `create_block_mask`, which asks a mask function about every pair. Its other "
            "new masks here are `BlockMask.from_kv_blocks` of block lists that the benchmark has ready."
        )
    for setting, found in measurements.settings(lines).items():
        parts.append(caption(setting, found))
        for direction, said in measurements.TIMED.items():
            shown = measurements.of_direction(found, direction)
            if shown:
                parts += [f"{said[0].upper()}{said[1:]}:", change_table(shown), change_ratios(shown)]
    return "\n\n".join(filter(None, parts))


def sweeps_section(lines: Sequence[Line]) -> str:
    """The pictures of the sweeps that were run, and what they say in numbers."""
    said = []
    for name, title in plots.SWEEPS.items():
        shown = plots.swept(lines, name)
        if shown:
            said.append(f"![{title}](benchmarks/results/{name}.png)")
        if name == "density":
            said.append("\n".join(f"- {found}" for found in findings.break_evens(shown)))
        if name == "length":
            said.append(findings.growth(shown))
        if name == "block-size":
            said.append(findings.small_blocks(shown))
        if name == "change" and shown:
            said.append(change_section(shown))
    said.append(findings.equal_bits(measurements.of_bench(lines, "deterministic")))
    return "\n\n".join(filter(None, said))


# ---- one GPU, and others ----


def most(lines: Sequence[Line]) -> list[Line]:
    """Those of the GPU with the most measurements, which is the one that tables and pictures are of."""
    return next(iter(measurements.by_device(lines).values()), [])


def _elsewhere(lines: Sequence[Line]) -> list[list[Line]]:
    """The lines of each other GPU than that with the most measurements, if the main benchmark ran there."""
    others = [*measurements.by_device(lines).values()][1:]
    return [found for found in others if measurements.of_bench(found, "attention")]


def _beside_first(shown: Sequence[Line], first: Sequence[Line]) -> str:
    """`` `hopper` runs at 0.94 to 1.05 of its rate on an NVIDIA H200 ``, of each backend of ours; first: the lines of that GPU."""
    keys = [key for key in measurements.IDENTITY if key != "device"]
    rates = {tuple(line.get(key) for key in keys): line["tflops"] for line in first}
    said = []
    for ours in filter(measurements.is_ours, measurements.measured(shown)):
        ratios = [
            line["tflops"] / rates[case]
            for line in shown
            if measurements.who(line) == ours and (case := tuple(line.get(key) for key in keys)) in rates
        ]
        if ratios:
            said.append(
                f"`{ours[1]}` runs at {min(ratios):.2f} to {max(ratios):.2f} of its rate on an {first[0]['device']}"
            )
    return "; ".join(said)


def elsewhere_points(lines: Sequence[Line]) -> list[str]:
    """What the main benchmark says on each other GPU, a point each."""
    points = []
    for found in _elsewhere(lines):
        setting, shown = main_setting(found)
        points.append(f"- On an {setting.device} {_beside_first(shown, most(lines))}. {comparisons(shown)}")
    return points


def elsewhere_section(lines: Sequence[Line]) -> str:
    """The tables of the main benchmark on other GPUs than that with the most measurements; empty without any."""
    return "\n\n".join(part for found in _elsewhere(lines) for part in speed_parts(found))


# ---- masks ----


def _mask_cell(lines: Sequence[Line], provider: str) -> str:
    line = next((line for line in lines if line["provider"] == provider), None)
    if line is None:
        return "-"
    first = next((one["ms"] for one in lines if one["provider"] == f"{provider}, first call"), None)
    inside = line["peak_bytes"] / 1e6 if first is None else first
    return f"{_ms(line['ms'])} ({inside:,.0f})"


def _mask_name(pattern: str) -> str:
    """`documents, 10000, causal` -> `documents`, 10,000, causal; | would end a cell."""
    name, *rest = pattern.split(", ")
    rest = [f"{int(word):,}" if word.isdecimal() else word for word in rest]
    return ", ".join(["`" + name.replace("|", "\\|") + "`", *rest])


def masks_section(lines: Sequence[Line]) -> str:
    """Masks at the greatest length that peers survive, and at the greatest of all."""
    longest = max(line["n"] for line in lines)
    shared = max(line["n"] for line in lines if line["provider"] != "blocksparse_flash")
    rows = [["mask", "tokens", *MASK_COLUMNS.values()]]
    for n in (shared, longest):
        for pattern in dict.fromkeys(line["pattern"] for line in lines if line["n"] == n):
            found = [line for line in lines if line["n"] == n and line["pattern"] == pattern]
            rows.append([_mask_name(pattern), f"{n:,}", *(_mask_cell(found, provider) for provider in MASK_COLUMNS)])
    shown = [line for line in lines if line["n"] in (shared, longest)]
    where = " and ".join(sorted({line["device"] for line in shown}))
    return "\n\n".join(
        [
            (
                f"Building a mask, milliseconds of one CPU core (`python -m benchmarks.run.masks`, {where}, "
                f"{measurements.versions(shown, 'torch')}, blocks of 128):"
            ),
            table(rows),
            (
                "In brackets: peak memory in MB, but for the compiled one the milliseconds of the first call, which compiles. "
                "`-`: not measured, as time and memory grow with the square of the length."
            ),
            "![Time to build a mask against its length](benchmarks/results/masks.png)",
        ]
    )


# ---- bytes ----


def _io_groups(lines: Sequence[Line]) -> list[list[Line]]:
    """The lines of one call each, over densities."""
    found: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        key = tuple(line[name] for name in ("device", "backend", "n", "batch", "heads", "head_dim", "direction"))
        found.setdefault(key, []).append(line)
    return [sorted(group, key=lambda line: line["density"]) for group in found.values()]


def io_section(lines: Sequence[Line]) -> str:
    """How the bytes that a call moves grow with density, beside the bound; empty without measurements."""
    groups = [group for group in _io_groups(lines) if len(group) > 1]
    if not groups:
        return ""
    rows = [
        ["backend", "direction", "heads", "head_dim", "L2 to multiprocessors", "times the bound", "of what tiles load", "device memory"]
    ]  # fmt: skip
    for group in groups:
        first, last = group[0], group[-1]
        moved = bounds.linear(group, bounds.on_chip)
        times, share = ([of(line) for line in group] for of in (_times_the_bound, _share_of_tiles))
        memory = [(line["dram_read_bytes"] + line["dram_write_bytes"]) / 1e6 for line in (first, last)]
        rows.append(
            [
                first["backend"], first["direction"], str(first["heads"]), str(first["head_dim"]),
                f"{moved.at_zero / 1e6:,.0f} + {moved.slope / 1e6:,.0f} s MB, R^2 {moved.fit:.4f}",
                f"{min(times):.2f} to {max(times):.2f}", f"{min(share):.2f} to {max(share):.2f}",
                f"{memory[0]:,.0f} to {memory[1]:,.0f} MB",
            ]
        )  # fmt: skip
    of = groups[0][0]
    return "\n\n".join(
        [
            (
                f"Bytes moved at {of['n']:,} tokens and a share s of stored blocks, {groups[0][0]['density']:.2g} to "
                f"{groups[0][-1]['density']:.2g} (`python -m benchmarks.run.io`, {of['device']}, "
                f"{measurements.versions(lines, 'torch', 'triton')}). The bound is N d + s N^2 d^2 / M numbers "
                "([FlashAttention](https://arxiv.org/abs/2205.14135), Proposition 4, constant 1), M those that the shared memory of a "
                "program holds. [All of them](benchmarks/results/io.md)."
            ),
            table(rows),
            _io_finding([line for group in groups for line in group]),
            "![Bytes moved against density](benchmarks/results/io.png)",
        ]
    )


def _io_finding(lines: Sequence[Line]) -> str:
    """A sentence: how far from the bound each direction is, and from what its tiles load."""
    said = []
    for direction, name in findings.DIRECTIONS.items():
        found = [line for line in lines if line["direction"] == direction]
        if found:
            times, share = ([of(line) for line in found] for of in (_times_the_bound, _share_of_tiles))
            said.append(
                f"{name} {min(times):.1f} to {max(times):.1f} times the bound and {min(share):.2f} to {max(share):.2f} of what tiles load"
            )
    return f"Bytes that the multiprocessors ask of L2: {'; '.join(said)}."


def _times_the_bound(line: Line) -> float:
    return bounds.on_chip(line) / bounds.theorem(line)


def _share_of_tiles(line: Line) -> float:
    return bounds.on_chip(line) / bounds.of_tiles(line)


def every_byte(lines: Sequence[Line]) -> str:
    """The text of results/io.md: every measurement of benchmarks.run.io."""
    rows = [
        ["backend", "direction", "heads", "head_dim", "density", "bound MB", "tiles load MB", "L2 to multiprocessors MB", "all of L2 MB",
         "device memory, read MB", "written MB", "kernels"]
    ]  # fmt: skip
    for line in (line for group in _io_groups(lines) for line in group):
        told = (
            bounds.theorem(line), bounds.of_tiles(line), line["sm_bytes"], line["l2_bytes"], line["dram_read_bytes"],
            line["dram_write_bytes"],
        )  # fmt: skip
        rows.append(
            [
                line["backend"], line["direction"], str(line["heads"]), str(line["head_dim"]), f"{line['density']:.4g}",
                *("-" if value is None else f"{value / 1e6:,.1f}" for value in told), str(line["n_kernels"]),
            ]
        )  # fmt: skip
    return (
        "\n\n".join(
            [
                "# Bytes moved, all measurements",
                (
                    "Written by `python -m benchmarks.report` from io.jsonl. The bound is that of FlashAttention's Proposition 4 with "
                    "constant 1; what tiles load is counted, as if each tile were read from L2 once by each program that computes it. "
                    "On a GPU whose L2 has two halves, all of L2's bytes count what these ask of each other. `-`: not counted."
                ),
                table(rows),
            ]
        )
        + "\n"
    )


# ---- predictions ----


def prediction_section(calibrations: Sequence[prediction.Calibration]) -> str:
    """How well explain predicts the measurements that it was fitted to."""
    rows = [
        [
            "GPU",
            "backend",
            "direction",
            "head_dim",
            "measurements",
            "median error",
            "worst",
            "worst of those left out of a fit",
        ]
    ]
    rows += [
        [
            one.device.name, one.backend, one.direction, str(one.head_dim), str(one.n_lines), f"{one.median_error:.1%}",
            f"{one.worst_error:.1%}", f"{one.unseen_error:.1%}",
        ]
        for one in calibrations
    ]  # fmt: skip
    return table(rows)


# ---- the whole ----


def read(results: Path) -> dict[str, list[Line]]:
    """The lines of each file of results; none of what was never measured."""
    found = {}
    for name, identity in FILES.items():
        path = results / f"{name}.jsonl"
        found[name] = measurements.read(path, identity) if path.exists() or name in ALWAYS else []
    return found


def highlights(lines: dict[str, list[Line]]) -> str:
    """What the sweeps and the other benchmarks come to: a point each, empty without any of them."""
    attention = most(lines["attention"])
    of = {name: measurements.of_bench(attention, name) for name in ("length", "block-size", "change", "deterministic")}
    points = [
        findings.growth_of_all(of["length"]),
        findings.break_even(plots.swept(attention, "density")),
        *findings.small_blocks(of["block-size"]).split("\n"),
        *findings.changes(of["change"]),
        findings.equal_bits_of_all(of["deterministic"]),
        small.summary(lines["small"]),
        *elsewhere_points(lines["attention"]),
    ]
    return "\n".join(filter(None, points))


def sections(lines: dict[str, list[Line]]) -> dict[str, str]:
    """What stands between which markers of the README."""
    return {
        "prediction": prediction_section(prediction.calibrations()),
        "context": context_parallel.summary(lines["context_parallel"]),
        "attention": attention_section(most(lines["attention"])),
        "highlights": highlights(lines),
        "masks": masks_section(lines["masks"]),
    }


def page_sections(lines: dict[str, list[Line]]) -> dict[str, str]:
    """What stands between which markers of benchmarks/README.md, whose links begin there."""
    found = {
        "sweeps": sweeps_section(most(lines["attention"])),
        "elsewhere": elsewhere_section(lines["attention"]),
        "small": small.section(lines["small"]),
        "context": context_parallel.section(lines["context_parallel"]),
        "io": io_section(lines["io"]),
    }
    return {name: section.replace("](benchmarks/", "](") for name, section in found.items()}


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result lines, and of what is drawn")
    parser.add_argument("--readme", type=Path, default=README, help="whose sections are written")
    parser.add_argument("--page", type=Path, default=PAGE, help="whose sections are written too")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    lines = read(options.results)
    context = lines["context_parallel"]
    for path, written in ((options.readme, sections(lines)), (options.page, page_sections(lines))):
        path.write_text(replaced(path.read_text(encoding="utf-8"), written), encoding="utf-8")
    (options.results / "attention.md").write_text(everything(lines["attention"]), encoding="utf-8")
    if lines["small"]:
        (options.results / "small.md").write_text(small.everything(lines["small"]), encoding="utf-8")
    if context:
        (options.results / "context_parallel.md").write_text(context_parallel.everything(context), encoding="utf-8")
    figures = plots.figures(most(lines["attention"]), lines["masks"], context)
    if lines["io"]:
        (options.results / "io.md").write_text(every_byte(lines["io"]), encoding="utf-8")
        figures["io"] = plots.io(
            lines["io"], {"bound": bounds.theorem, "what tiles load": bounds.of_tiles}, bounds.on_chip
        )
    for name, figure in figures.items():
        # no date and no version: the same lines give the same file
        figure.savefig(options.results / f"{name}.png", dpi=100, metadata={"Software": None})
        print(options.results / f"{name}.png")
