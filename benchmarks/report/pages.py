"""Tables and plots of all measurements: `python -m benchmarks.report`.

Reads benchmarks/results/attention.jsonl, masks.jsonl and, if they exist, small.jsonl, decode.jsonl, io.jsonl,
context_parallel.jsonl, shapes.jsonl, selection.jsonl, video.jsonl, pipelines.jsonl, huggingface.jsonl, lra_speed.jsonl,
lm_steps.jsonl, lm/ and lra/, and the errors of explain's predictions. Replaces the sections between markers of the
pages in PAGES, writes every measurement to results/attention.md, small.md, io.md and context_parallel.md, and draws the
plots in results/.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from blocksparse_flash.explanation import prediction

from ..lm import report as language_model
from ..lm import steps
from ..run import saved
from . import attention, context_parallel, io, models, plots, summaries, tables
from . import lines as measurements
from .attention import most
from .lines import LABELS, select
from .markdown import joined, listing, replaced

BENCHMARKS = Path(__file__).parents[1]
RESULTS = BENCHMARKS / "results"
ROOT = BENCHMARKS.parent

Lines = dict[str, pd.DataFrame]
# results/<name>.jsonl -> whether it must exist
FILES = {
    "attention": True, "masks": True, "small": False, "decode": False, "io": False, "context_parallel": False,
    "shapes": False, "video": False, "huggingface": False, "lra_speed": False, "lm_steps": False,
    "pipelines": False, "selection": False,
}  # fmt: skip


def prediction_section() -> str:
    """Errors of explain's predictions on the measurements that they were fitted to."""
    columns = {
        "GPU": "{device.name}", "backend": "{backend}", "direction": "{direction}", "head_dim": "{head_dim}",
        "measurements": "{n_lines}", "median error": "{median_error:.1%}", "largest error": "{worst_error:.1%}",
        "largest error in cross-validation": "{cross_validation_error:.1%}",
    }  # fmt: skip
    return listing(pd.DataFrame([one._asdict() for one in prediction.calibrations()]), columns)


def language_models(results: Path) -> dict[str, dict[str, language_model.Runs]]:
    """The runs of each figure of benchmarks.lm; none if no folder."""
    folders = [path for path in sorted((results / "lm").glob("*")) if path.is_dir()]
    return {folder.name: language_model.read(folder) for folder in folders}


def language_model_section(results: Path) -> str:
    """Tables and curves of each figure."""
    return joined(
        *(
            joined(
                f"### Runs `{name}`",
                language_model.tables(found),
                f"![Validation loss against tokens, seconds and position](benchmarks/results/lm-{name}.png)",
            )
            for name, found in language_models(results).items()
        )
    )


def read(results: Path) -> Lines:
    """The lines of each result file; none where nothing was measured."""
    found = {}
    for name, must_exist in FILES.items():
        path = results / f"{name}.jsonl"
        found[name] = measurements.read(path) if must_exist or path.exists() else measurements.frame([])
    found["lra"] = tables.read_long_range(results / "lra")
    return found


def highlights(lines: Lines) -> str:
    """One table of the sweeps, small calls and other GPUs, and one of changing masks; "" without measurements."""
    shown = most(lines["attention"])
    values = [
        *summaries.growth(select(shown, bench="length")),
        *summaries.break_evens(attention.swept(shown, "density")),
        *summaries.small_blocks(select(shown, bench="block-size")),
        *summaries.small_block_speedups(select(shown, bench="block-size")),
        *summaries.deterministic(select(shown, bench="deterministic")),
        *(value for value in tables.small_values(lines["small"]) if value.baseline == LABELS["flex", "triton"]),
        *attention.other_gpus_values(lines["attention"]),
    ]
    changes = summaries.changes(select(shown, bench="change"))
    head = (
        "Time of a step (mask, forward and backward) with a new mask minus that with an unchanged mask, in "
        "milliseconds. `-`: not measured. "
        f"{attention.STEPS} {attention.FLEX_MASKS}"
    )
    return joined(summaries.ranges(values, "measurement", "backend", "baseline"), head if changes else "", changes)


# page -> marker -> text; links are relative to the top folder
PAGES: dict[str, dict[str, Callable[[Lines], str]]] = {
    "README.md": {"speed": lambda lines: attention.front_page(most(lines["attention"]))},
    "docs/performance.md": {
        "attention": lambda lines: attention.speed_section(most(lines["attention"])),
        "highlights": highlights,
        "masks": lambda lines: tables.mask_building(lines["masks"]),
        "huggingface": lambda lines: models.training_steps(lines["huggingface"]),
        "packed": lambda lines: models.packed_steps(lines["huggingface"]) or "Not run yet.",
        "selection": lambda lines: models.selection(lines["selection"]) or "Not run yet.",
        "memory": lambda lines: models.memory(lines["lra_speed"]),
    },
    "docs/does_it_help.md": {
        "lm": lambda _: language_model_section(RESULTS),
        "pairs": lambda lines: tables.sparse_against_dense(lines["lra"]),
        "lm_steps": lambda lines: steps.section(lines["lm_steps"]) or "Not run yet.",
    },
    "docs/cost.md": {"prediction": lambda _: prediction_section()},
    "docs/diffusers.md": {
        "video": lambda lines: models.video(lines["video"]),
        "pipelines": lambda lines: models.pipelines(lines["pipelines"]),
    },
    "docs/decoding.md": {"decode": lambda lines: tables.decoding(lines["decode"])},
    "docs/lra.md": {"lra": lambda lines: tables.long_range(lines["lra"])},
    "docs/distributed.md": {"context": lambda lines: context_parallel.summary(lines["context_parallel"])},
    "benchmarks/lra/README.md": {"steps": lambda lines: tables.long_range_steps(lines["lra_speed"])},
    "benchmarks/README.md": {
        "sweeps": lambda lines: attention.sweeps_section(most(lines["attention"])),
        "elsewhere": lambda lines: attention.other_gpus_section(lines["attention"]),
        "shapes": lambda lines: models.shapes(lines["shapes"]),
        "small": lambda lines: tables.small_calls(lines["small"]),
        "context": lambda lines: context_parallel.section(lines["context_parallel"]),
        "io": lambda lines: io.section(lines["io"]),
    },
}


def linked_from(page: str, section: str) -> str:
    """A section with its links into benchmarks/ relative to a page.

    >>> linked_from("docs/performance.md", "![](benchmarks/results/speed.png)")
    '![](../benchmarks/results/speed.png)'
    """
    folder = page.rpartition("/")[0]
    prefix = {"": "benchmarks/", "benchmarks": "", "benchmarks/lra": "../"}.get(folder, "../benchmarks/")
    return section.replace("](benchmarks/", f"]({prefix}")


def written(root: Path, lines: Lines) -> dict[str, str]:
    """Page -> its text with every section as measured. root: the top folder of the pages."""
    return {
        page: replaced(
            (root / page).read_text(encoding="utf-8"),
            {name: linked_from(page, write(lines)) for name, write in sections.items()},
        )
        for page, sections in PAGES.items()
    }


def result_pages(lines: Lines) -> dict[str, str]:
    """The files of results/ with every measurement, by name; none for what was not measured."""
    writers = {
        "attention": attention.everything, "small": tables.all_small_calls, "io": io.everything,
        "context_parallel": context_parallel.everything,
    }  # fmt: skip
    return {f"{name}.md": write(lines[name]) for name, write in writers.items() if len(lines[name])}


def main() -> None:
    lines = read(RESULTS)
    texts = {ROOT / page: text for page, text in written(ROOT, lines).items()}
    texts |= {RESULTS / name: text for name, text in result_pages(lines).items()}
    for path, text in texts.items():
        with saved.replacing(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    curves = {f"lm-{name}": language_model.curves(found) for name, found in language_models(RESULTS).items()}
    for name, figure in {**plots.figures(lines), **curves}.items():
        # no date and no version: equal lines give equal files
        figure.savefig(RESULTS / f"{name}.png", dpi=100, metadata={"Software": None})
        print(RESULTS / f"{name}.png")
