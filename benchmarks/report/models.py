"""Tables of the shapes of models, selection by token, training steps, memory, and self-attention on video."""

from __future__ import annotations

import pandas as pd

from ..lra import published
from . import lines as measurements
from .lines import LABELS, select
from .markdown import code, joined, listing, table

OURS = "blocksparse_flash"
VIDEO_PATTERNS = {
    "dense": "dense",
    "sliding_tile": "`sliding_tile`",
    "sliding_tile, in order": "`sliding_tile`, without reordering",
    "top_blocks": "`top_blocks(0.2)`",
    "top_p": "`top_p(0.5)`",
}


def _named(lines: pd.DataFrame) -> pd.DataFrame:
    """Lines in which all our backends have one name."""
    return lines.assign(by=lines["by"].astype(str).where(~lines["is_ours"], OURS))


def _ordered(names: pd.Series) -> list[str]:
    """Names of providers, ours first, then in the order of LABELS."""
    known = [OURS, *LABELS.values()]
    return [name for name in known if name in set(names)]


def _cell(values: dict[str, float], text: str) -> str:
    """Forward / backward; `-` for what is missing."""
    cells = [text.format(values[way]) if way in values else "-" for way in ("fwd", "bwd")]
    return "-" if cells == ["-", "-"] else " / ".join(cells)


# a column of `shapes`
JOULES = "joules, ours / least of the others"


def shapes(lines: pd.DataFrame) -> str:
    """Speed in the shapes of models: for each GPU and commit a row for each case, a column for each library."""
    shown = _named(select(lines, bench="shapes"))
    plans = select(shown, direction="plan")
    runs = shown[shown["direction"] != "plan"].groupby(["device", "commit"], sort=False)
    named = zip(plans["pattern"].str.removesuffix(", causal"), plans["ms"], strict=True)
    times = ", ".join(f"{ms:.2f} ms ({case})" for case, ms in named)
    commits = ", ".join(plans["commit"].unique())
    word = "commits" if "," in commits else "commit"
    where = "" if plans.empty else f"{plans['device'].iloc[0]}, {word} {commits}"
    return joined(
        *(_shapes_of_run(lines, found) for _, found in runs),
        "Making the layout and plan of packed documents on the GPU, from their boundaries there, took the GPU "
        f"{times}: {where}."
        if times
        else "",
    )


def _shapes_of_run(lines: pd.DataFrame, shown: pd.DataFrame) -> str:
    columns, rows = _ordered(shown["by"]), []
    has_energy = "joules" in shown and shown["joules"].notna().any()
    for case, found in shown.groupby("pattern", sort=False):
        rates = {by: dict(zip(of["direction"], of["tflops"], strict=True)) for by, of in found.groupby("by")}
        if OURS not in rates:
            # a later run has this library's lines of the case
            continue
        others = [rate for by, rate in rates.items() if by != OURS]
        best = {way: max((rate[way] for rate in others if way in rate), default=None) for way in ("fwd", "bwd")}
        ratios = {way: rate / peak for way, rate in rates.get(OURS, {}).items() if (peak := best[way])}
        backends = sorted(found.loc[found["is_ours"], "backend"].unique())
        cells = [_cell(rates.get(by, {}), "{:.0f}") for by in columns]
        rows.append([str(case), ", ".join(f"`{name}`" for name in backends), *cells, _cell(ratios, "{:.2f}")])
        if has_energy:
            rows[-1].append(_cell(_energy_ratios(found), "{:.2f}"))
    if not rows:
        return ""
    rate = measurements.matmul_rate(lines, shown)
    return joined(
        f"One {shown['device'].iloc[0]}, bf16, `python -m benchmarks.run.shapes`, commit {shown['commit'].iloc[0]}, "
        f"{measurements.versions(shown, 'torch', 'triton')}. TFLOP/s of the pairs that attend, forward / backward; "
        "`-`: unsupported, wrong, or not measured. Timing was interleaved across libraries."
        + (f" A matrix product of 8192 x 8192 x 8192 ran at {rate:.0f} TFLOP/s." if rate else "")
        + (" Joules: energy of the GPU per call in a loop of calls, read from NVML." if has_energy else ""),
        table(
            ["case", "our backend", *columns, "ours / best of the others", *([JOULES] if has_energy else [])],
            rows,
        ),
    )


def _energy_ratios(found: pd.DataFrame) -> dict[str, float]:
    """Our joules over the least of the others', by direction."""
    measured = found.dropna(subset="joules")
    ours = measured[measured["by"] == OURS].set_index("direction")["joules"]
    least = measured[measured["by"] != OURS].groupby("direction")["joules"].min()
    return (ours / least).dropna().to_dict()


def selection(lines: pd.DataFrame) -> str:
    """Blocks selected by token: a row for each case, and one for the layers of each length; "" without lines."""
    if lines.empty:
        return ""
    is_layer = lines["direction"] == "layer"
    return joined(
        f"One {' and '.join(sorted(lines['device'].unique()))}, bf16, `python -m benchmarks.run.selection`, commits "
        f"{', '.join(lines['commit'].unique())}, {measurements.versions(lines, 'torch', 'triton')}. Causal calls; "
        "pairs of numbers are forward / backward; `-`: not measured. Timing was interleaved.",
        _selection_calls(lines[~is_layer]),
        _selection_layers(lines[is_layer]),
    )


def _selection_calls(lines: pd.DataFrame) -> str:
    keys, rows = ["n", "heads", "kv_heads", "head_dim", "block_size", "pattern"], []
    for (n, heads, kv_heads, head_dim, block_size, choice), found in lines.groupby(keys):
        values: dict[tuple[str, str], dict[str, float]] = {
            (provider, key): dict(zip(of["direction"], of[key] / unit, strict=True))
            for provider, of in found.groupby("provider")
            for key, unit in (("ms", 1), ("tflops", 1), ("peak_bytes", 1e9), ("host_us", 1))
        }
        tiles = f"{OURS} tiles"
        times, in_tiles, dense, fla = (values.get((name, "ms"), {}) for name in (OURS, tiles, "dense", "fla"))
        plan = f"{times['plan']:.2f} ({values[OURS, 'host_us']['plan']:.0f} us)" if "plan" in times else "-"
        rows.append([
            f"{n:,}", f"{heads}/{kv_heads:.0f}", str(head_dim), f"{block_size:.0f}", str(choice),
            ", ".join(select(found, provider=OURS)["plan"].unique()),
            _cell(times, "{:.1f}"), _cell(in_tiles, "{:.1f}"), _cell(dense, "{:.1f}"), _cell(fla, "{:.1f}"),
            _cell(values.get((OURS, "tflops"), {}), "{:.0f}"), _cell(values.get((OURS, "peak_bytes"), {}), "{:.1f}"),
            _cell(values.get((tiles, "peak_bytes"), {}), "{:.1f}"), plan,
        ])  # fmt: skip
    if not rows:
        return ""
    header = [
        "tokens", "query/KV heads", "head_dim", "block", "selection", "plan", "ms", "in tiles, ms", "dense, ms",
        "fla, ms", "TFLOP/s", "GB", "in tiles, GB", "plan, ms (host)",
    ]  # fmt: skip
    return joined(
        "`selected_attention` with 16 blocks for each token and KV head, its own and earlier ones. `random`: each "
        "token chooses alone; `alike`: 64 neighbors share 70% of their blocks. `in tiles`: the same call without plans "
        "by key block; `-` where the call itself has none. `dense`: causal attention of all pairs. `fla`: the selected "
        "branch of flash-linear-attention's NSA. TFLOP/s count the selected pairs. GB: memory that a call adds. The "
        "last column is the layout and plan alone: the time on the GPU, and until the host has launched them. The "
        "forward includes them.",
        table(header, rows),
    )


def _selection_layers(lines: pd.DataFrame) -> str:
    names, rows = [*lines["pattern"].unique()], []
    for n, found in lines.groupby("n"):
        times = dict(zip(found["pattern"], found["ms"], strict=True))
        dense = times.get("SelfAttention")
        cells = [f"{times[name]:.1f}" if name in times else "-" for name in names]
        ratios = [
            f" ({dense / times[name]:.2f})" if dense and name in times and name != "SelfAttention" else ""
            for name in names
        ]
        rows.append([f"{n:,}", *map("".join, zip(cells, ratios, strict=True))])
    if not rows:
        return ""
    first = lines.iloc[0]
    return joined(
        f"Layers with {first['heads']} query and {first['kv_heads']:.0f} KV heads of dimension {first['head_dim']}, "
        "width 2,048 and rotary positions: milliseconds of forward and backward, in brackets the speed-up over "
        "`SelfAttention`, which is dense and causal. A token selects 16 blocks of 64 and has a window of 512 (NSA), 8 "
        "blocks of 256 (MoBA), or 16 blocks of 128, with the loss of the indexer (shared index).",
        table(["tokens", *map(code, names)], rows),
    )


def video(lines: pd.DataFrame) -> str:
    """Self-attention of a video transformer: a row for each pattern, a column for each case; "" without lines."""
    shown = _named(lines)
    if shown.empty:
        return ""
    cases = [*dict.fromkeys(zip(shown["n"], shown["heads"], strict=True))]
    peers = shown.loc[shown["by"] != OURS, ["by", "pattern"]].drop_duplicates().itertuples(index=False)
    rows = []
    for by, pattern in [*peers, *((OURS, pattern) for pattern in VIDEO_PATTERNS)]:
        cells = []
        for n, heads in cases:
            found = select(shown, by=by, pattern=pattern, n=n, heads=heads)
            dense = select(shown, by=LABELS["cudnn", "cudnn"], n=n, heads=heads)["ms"]
            if found.empty:
                cells.append("-")
                continue
            ms = found["ms"].iloc[0]
            cells.append(f"{ms:.1f} ({dense.iloc[0] / ms:.1f})" if len(dense) else f"{ms:.1f}")
        densities = select(shown, by=by, pattern=pattern)["density"]
        shares = sorted({f"{density:.0%}" for density in densities})
        stored = " to ".join(dict.fromkeys([shares[0], shares[-1]])) if shares else "-"
        rows.append([by, VIDEO_PATTERNS.get(pattern, pattern), stored, *cells])
    return joined(
        f"One {' and '.join(sorted(shown['device'].unique()))}, bf16, heads of dimension "
        f"{shown['head_dim'].iloc[0]}, `python -m benchmarks.run.video`, "
        f"{measurements.versions(shown, 'torch', 'triton')}. Milliseconds of one forward, in brackets the speed-up "
        "over dense attention by cuDNN. The time includes choosing the blocks, if there are any to choose, and "
        "reordering the tokens, except in the row without. Timing was interleaved across libraries.",
        table(["library", "mask", "pairs computed", *(f"{n:,} tokens, {heads} heads" for n, heads in cases)], rows),
    )


def pipelines(lines: pd.DataFrame) -> str:
    """Denoising steps of whole pipelines: a row for each library and mask, a column for each model; "" if empty."""
    if lines.empty:
        return ""
    rows = []
    for (provider, pattern), found in lines.groupby(["provider", "pattern"], sort=False):
        cells = [provider, VIDEO_PATTERNS.get(pattern, pattern)]
        for model, of_model in lines.groupby("model", sort=False):
            own = select(of_model, provider="diffusers")["ms"].iloc[0]
            ms = select(found, model=model)["ms"]
            cells.append(f"{ms.iloc[0]:,.0f} ({own / ms.iloc[0]:.2f})" if len(ms) else "-")
        rows.append(cells)
    sizes = lines.drop_duplicates("model").to_dict("records")
    return joined(
        "Denoising loops of pipelines with random weights, without text encoders and VAEs, in calls of two steps: "
        f"`wan` has the sizes of Wan 2.1 1.3B, `flux` those of FLUX.1. One "
        f"{' and '.join(sorted(lines['device'].unique()))}, bf16, `python -m benchmarks.run.pipelines`, "
        f"{measurements.versions(lines, 'torch', 'triton', 'diffusers')}. Milliseconds of a denoising step, in "
        "brackets the speed-up over the model's own attention, `scaled_dot_product_attention`. A step of `wan` is two "
        "forwards. About a fifth of the pairs of video or image is computed; in `flux`, text attends to everything. "
        "Timing was interleaved.",
        table(["attention", "mask", *(f"{size['model']}, {size['n']:,} tokens" for size in sizes)], rows),
    )


def packed_steps(lines: pd.DataFrame) -> str:
    """Training steps on packed documents: a row for each library, a column for each number; "" if empty."""
    packed = lines[lines["pattern"].str.startswith("packed", na=False)]
    if packed.empty:
        return ""
    columns = {name: found.set_index("provider")["ms"] for name, found in packed.groupby("pattern", sort=False)}
    rows = [
        [
            name,
            *(
                f"{times[name]:.1f} ({times[name] / times[OURS]:.2f})" if name in times else "-"
                for times in columns.values()
            ),
        ]
        for name in packed["provider"].unique()
    ]
    first = packed.iloc[0]
    baselines = ("transformers flex_attention", "transformers flash_attention_2", "torch varlen_attn")
    missing = [name for name in baselines if name not in set(packed["provider"])]
    return joined(
        "Training steps of a model shaped like Llama (8 layers of width 2,048, 16 query and 4 KV heads) on "
        f"{first['n']:,} tokens of packed documents of unequal lengths, bf16, one {first['device']}, commit "
        f"{first['commit']}, {measurements.versions(packed, 'torch', 'transformers')}. Milliseconds, in brackets the "
        "time divided by ours. `sdpa` gets a dense mask. Timing was interleaved.",
        f"Not run: {', '.join(f'`{name}`' for name in missing)}." if missing else "",
        table(["attention", *(name.removeprefix("packed, ") for name in columns)], rows),
    )


def training_steps(lines: pd.DataFrame) -> str:
    """Training steps of GPT-2 and BERT-large: a row for each case and mask; "" without lines."""
    lines = lines[~lines["pattern"].str.startswith("packed", na=False)]
    if lines.empty:
        return ""
    peers, rows = {"sdpa": "transformers sdpa", "eager": "transformers eager"}, []
    of_dense = lines[lines["pattern"].isin(["causal", "dense"]) & (lines["provider"] == peers["sdpa"])]
    dense = of_dense.set_index(["model", "n"])["ms"]
    for (model, n, batch, pattern), found in lines.groupby(["model", "n", "batch", "pattern"], sort=False):
        by = found.set_index("provider")
        if OURS not in by.index:
            continue
        ours = by.loc[OURS]
        cells = {"model": model, "tokens": f"{n:,}", "batch": str(batch), "mask": code(pattern)}
        cells |= {"density": f"{ours['density']:.3g}", "ms": f"{ours['ms']:.1f}"}
        cells["GB"] = f"{ours['peak_bytes'] / 1e9:.1f}"
        for name, provider in peers.items():
            peer = by.loc[provider] if provider in by.index else None
            cells[f"{name}, ms"] = "-" if peer is None else f"{peer['ms']:.1f}"
            cells[f"over {name}"] = "-" if peer is None else f"{peer['ms'] / ours['ms']:.2f}"
            cells[f"{name}, GB"] = "-" if peer is None else f"{peer['peak_bytes'] / 1e9:.1f}"
        rows.append({**cells, "over dense sdpa": f"{dense[model, n] / ours['ms']:.2f}"})
    paper = " and ".join(
        f"{facts['speedup']}x for {model} at {facts['n']:,} tokens over {facts['over']}"
        for model, facts in published.TRAINING.items()
    )
    return joined(
        "Training steps (forward, loss, backward, AdamW) of models of transformers, bf16 autocast, one "
        f"{' and '.join(sorted(lines['device'].unique()))}, `python -m benchmarks.run.huggingface`, "
        f"{measurements.versions(lines, 'torch', 'transformers')}, commits "
        f"{' and '.join(sorted(lines['commit'].unique()))}. The libraries were timed one after another, not in turns. "
        "The columns `over` are speed-ups: the time of the baseline divided by ours. `sdpa` and `eager` are given the "
        "same mask as a dense mask; `over dense sdpa` compares with the model's own attention (causal for GPT-2, dense "
        "for BERT). GB: peak memory, weights included. `-`: no result, for example because memory ran out.",
        table(rows[0], [row.values() for row in rows]),
        f"The FlashAttention paper reports {paper}, on A100 GPUs. What was Hugging Face's attention then is called "
        "`eager` today.",
    )


def memory(lines: pd.DataFrame) -> str:
    """Peak memory of dense attention alone, compared with standard attention, by length; "" without lines."""
    rows = []
    alone = lines[lines["task"].isna()]
    alone = select(alone[alone["status"] == "ok"], pattern="dense", direction="fwd+bwd")
    for n, found in alone.groupby("n"):
        of_standard, ours = select(found, provider="materialized")["peak_bytes"], select(found, is_ours=True)
        if len(of_standard) and n in published.LENGTHS:
            standard, place = of_standard.iloc[0], published.LENGTHS.index(n)
            in_paper = [published.MEMORY_MB[name][place : place + 1] for name in ("PyTorch", "FlashAttention")]
            rows.append(
                {
                    "tokens": f"{n:,}", "standard, MB": f"{standard / 1e6:,.0f}",
                    **{
                        f"{line.backend}, MB (ratio)": f"{line.peak_bytes / 1e6:,.0f} "
                        f"({standard / line.peak_bytes:.1f})" for line in ours.itertuples()
                    },
                    "ratio in the paper": f"{in_paper[0][0] / in_paper[1][0]:.1f}" if in_paper[0] else "-",
                }
            )  # fmt: skip
    if not rows:
        return ""
    first = alone.iloc[0]
    return joined(
        f"Peak memory of forward and backward of dense attention alone, batch {first['batch']}, {first['heads']} heads "
        f"of dimension {first['head_dim']}, {first['device']}, `python -m benchmarks.lra speed`, commit "
        f"{first['commit']}. `standard` keeps the score matrix in memory. In parentheses: memory of `standard` divided "
        "by ours. The last column has this ratio from table 21 of the FlashAttention paper, in fp16 on "
        "an A100 with 40 GB (`-`: `standard` ran out of memory).",
        listing(pd.DataFrame(rows), {name: f"{{{name}}}" for name in rows[0]}),
    )
