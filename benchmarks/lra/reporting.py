"""Writes the report: tables and plots of result lines and of Lightning's CSV logs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..run import measure
from . import tables
from .data import Rules
from .published import DEVICE, LENGTHS, MEMORY_MB, RUNTIME_MS
from .scoring import TEST, trained_steps
from .tables import Line, Unfinished
from .tasks import LRA

RUNS = Path("out/lra/runs")
CONFIGS = {
    f"{group}/{path.stem}": path
    for group in ("ours", "ablation")
    for path in sorted((Path(__file__).parent / "configs" / group).iterdir())
}
# the checkpoint from which a run continues
LAST = "last.ckpt"


def tests_of(runs: Path) -> list[Line]:
    """The last test of every run under a folder on each test set, sorted by the run's name.

    Lines get the keys run, its name, and tests, the number of the run's tests on this set.
    """
    found = []
    for path in sorted(runs.rglob(TEST)):
        lines = {(line["n"], line["test_seed"]): line for line in measure.read(path)}
        counts = Counter((line["n"], line["test_seed"]) for line in measure.read(path))
        run = path.parent.relative_to(runs).as_posix()
        found += [{**line, "run": run, "tests": counts[key]} for key, line in lines.items()]
    return found


def unfinished(runs: Path, tests: Sequence[Line]) -> list[Unfinished]:
    """The runs under a folder that have a log or a checkpoint, but no test; without whole stages of other runs."""
    traces = (*runs.rglob("version_*/metrics.csv"), *runs.rglob(f"checkpoints/{LAST}"))
    tested, ends, found = {line["run"] for line in tests}, _ends(), []
    for folder in sorted({path.parents[1] for path in traces}):
        run = folder.relative_to(runs).as_posix()
        name, seed = seed_of(run)
        config = CONFIGS.get(name) or _saved_config(folder)
        settings = {} if config is None else _read(config)
        # Lightning's default is -1
        steps = settings.get("trainer", {}).get("max_steps", -1)
        steps = steps if steps >= 0 else None
        checkpoint = trained_steps(folder / "checkpoints" / LAST)
        step = max(checkpoint, _logged_steps(folder))
        is_whole = steps is not None and checkpoint >= steps
        if run in tested or (is_whole and name not in ends):
            continue
        command = ""
        if name in CONFIGS:
            command = f"recipe {name.removeprefix('ours/')}" + (f' --seeds "[{seed}]"' if seed else "")
        elif config is not None:
            # a saved configuration has the time limit of its call
            limit = " --minutes null" if settings.get("minutes") else ""
            command = f"fit --config {config}{' --ckpt_path last' if checkpoint else ''}{limit}"
        found.append(Unfinished(run, step, steps, checkpoint, command))
    return found


def seed_of(run: str) -> tuple[str, int]:
    """The configuration of a run of `recipe`, and its seed."""
    found = re.fullmatch(r"(.*)/seed-(\d+)", run)
    return (run, 0) if found is None else (found[1], int(found[2]))


def _read(config: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError):
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"{config} is not a configuration: copy it again, or remove it")
    return settings


def _read_log(path: Path) -> pd.DataFrame:
    """The lines of a log. Of a run that was killed when it began, or found a full disk, it is empty."""
    try:
        return pd.read_csv(path)
    except pd.errors.EmptyDataError:
        return pd.DataFrame()
    except ValueError as error:
        raise ValueError(f"{path} is not a log ({str(error).strip()}): copy it again, or remove it") from None


def _saved_config(folder: Path) -> Path | None:
    """The configuration of a run's last training, if it lies beside its log."""
    logs = [path for path in reversed(_logs(folder)) if "loss" in _read_log(path).columns]
    return next((each for path in logs if (each := path.with_name("config.yaml")).exists()), None)


def _logged_steps(folder: Path) -> int:
    """Steps in the logs of a run, which count them from 0."""
    logs = [_read_log(path).reindex(columns=["step"]).dropna() for path in _logs(folder)]
    return max((int(log["step"].max()) + 1 for log in logs if len(log)), default=0)


def _ends() -> list[str]:
    """Our configurations, except those that are only earlier stages of others."""
    settings = {name: _read(path) for name, path in CONFIGS.items()}
    starts = {Path(each["model"].get("start", "")).parent.parent for each in settings.values()}
    return [name for name, each in settings.items() if Path(each["trainer"]["default_root_dir"]) not in starts]


def not_run(tests: Sequence[Line], begun: Sequence[Unfinished]) -> list[str]:
    """Our configurations without a run of any seed, except those that are only earlier stages of others."""
    known = {seed_of(run)[0] for run in (*(line["run"] for line in tests), *(each.run for each in begun))}
    return [name for name in _ends() if name not in known]


class Curve(NamedTuple):
    """A run, its task and data, whether they are Long Range Arena's, and its validation accuracy by step."""

    run: str
    what: str
    is_lra: bool
    accuracy: dict[int, float]


def _logs(folder: Path) -> list[Path]:
    """The logs of a run, in the order in which they were written."""
    return sorted(folder.glob("version_*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1]))


def validations(folder: Path, column: str) -> dict[int, float]:
    """A column of a run's validations by step, where later logs replace earlier ones."""
    found: dict[int, float] = {}
    for path in _logs(folder):
        log = _read_log(path).reindex(columns=["step", column]).dropna()
        found |= dict(zip(log["step"].astype(int), log[column], strict=True))
    return dict(sorted(found.items()))


def curve_of(folder: Path, run: str) -> Curve | None:
    """The curve from a run's logs; None without a validation."""
    accuracy = validations(folder, "validation_accuracy")
    what, is_lra = "unknown task", False
    for path in _logs(folder):
        config = path.parent / "config.yaml"
        if "validation_accuracy" in _read_log(path).columns and config.exists():
            data = _read(config)["data"]
            source, rules = data.get("source", "generated"), data.get("rules") or {}
            known = {name: rules[name] for name in ("contour_length", "changes") if name in rules}
            what = f"{data['task']}, {source} data"
            is_lra = data["task"] in LRA and source != "stand-in" and Rules(**known).are_published
    return Curve(run, what, is_lra, accuracy) if accuracy else None


def curves_of(runs: Path) -> list[Curve]:
    """The learning curves of the runs under a folder."""
    folders = sorted({path.parents[1] for path in runs.rglob("version_*/metrics.csv")})
    curves = [curve_of(folder, folder.relative_to(runs).as_posix()) for folder in folders]
    return [curve for curve in curves if curve is not None]


def learning_curves(curves: Sequence[Curve], tests: Sequence[Line]) -> Figure:
    """A panel per task and kind of data, with the floor of the last test of its runs."""
    panels = list(dict.fromkeys((curve.what, curve.is_lra) for curve in curves))
    figure = Figure(figsize=(6, 3.6 * len(panels)), layout="constrained")
    for axes, (what, is_lra) in zip(figure.subplots(len(panels), squeeze=False).flat, panels, strict=True):
        shown = [curve for curve in curves if (curve.what, curve.is_lra) == (what, is_lra)]
        for curve in shown:
            axes.plot([*curve.accuracy], [*curve.accuracy.values()], marker=".", label=curve.run)
        floors = [line["floor"] for line in tests if line["run"] in {curve.run for curve in shown}]
        for floor in floors[-1:]:
            axes.axhline(floor, color="#6b705c", linestyle="--", linewidth=1, label=f"floor {floor:.1%}")
        axes.set_title(what if is_lra else f"{what}: NOT Long Range Arena")
        axes.set_xlabel("steps")
        axes.set_ylabel("validation accuracy")
        axes.legend(fontsize=8)
    return figure


def accuracies(tests: Sequence[Line]) -> Figure:
    """Accuracy, accuracies of the shortcuts, and balanced accuracy of each test."""
    labels = {"floor": "floor", "one_deep": "one operator deep", "accuracy": "accuracy", "balanced": "balanced"}
    figure = Figure(figsize=(8, 1 + 0.5 * len(tests)), layout="constrained")
    axes = figure.add_subplot()
    for place, line in enumerate(tests):
        bars = {"floor": "#b9c9cf", "one_deep": "#6b705c", "accuracy": "#1f6f8b", "balanced": "#c1121f"}
        known = [key for key in bars if line[key] is not None]
        for offset, key in enumerate(known):
            error = line["standard_error"] if key == "accuracy" else None
            height = 0.8 / len(known)
            center = place + height * (offset - (len(known) - 1) / 2)
            axes.barh(center, line[key], 0.9 * height, xerr=error, color=bars[key], label=labels.pop(key, None))
    names = [
        f"{line['run']}: {line['task']}, {line['n']:,} samples{'' if line['is_lra'] else ', NOT Long Range Arena'}"
        for line in tests
    ]
    axes.set_yticks(range(len(tests)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.margins(y=0.01)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _against_length(axes: Axes, lines: pd.DataFrame, column: str, published: dict[str, list[float]]) -> None:
    for name in ("PyTorch", "FlashAttention", "Block-sparse FlashAttention") if tables.is_paper_size(lines) else ():
        known = published[name]
        axes.plot(LENGTHS[: len(known)], known, ":", linewidth=1, label=f"{name}, {DEVICE} (paper)")
    for label, mine in lines.groupby("label", sort=False):
        shown = mine.dropna(subset=column).drop_duplicates("n", keep="last").sort_values("n")
        axes.plot(shown["n"], shown[column], marker=".", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens")


def lengths(lines: pd.DataFrame) -> Figure:
    """Time and memory of forward and backward over length, on one device at one size; both axes logarithmic."""
    both = lines[lines["direction"] == "fwd+bwd"]
    names = both[["provider", "backend", "pattern"]].to_numpy()
    labels = [", ".join(name for name in parts if isinstance(name, str)) for parts in names]
    both = both.assign(label=labels, mib=both["peak_bytes"] / 2**20)
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    time, memory = figure.subplots(1, 2)
    title = "forward and backward on {device}, batch {batch}, {heads} heads, head_dim {head_dim}"
    figure.suptitle(title.format_map(lines.iloc[0]))
    _against_length(time, both, "ms", RUNTIME_MS["fwd+bwd"])
    time.set_ylabel("ms")
    _against_length(memory, both, "mib", MEMORY_MB)
    memory.set_ylabel("MiB")
    # both panels share colors and labels
    figure.legend(*time.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7)
    return figure


def report(
    *,
    runs: Path = RUNS,
    speed: Path | None = Path("benchmarks/results/lra_speed.jsonl"),
    out: Path = Path("benchmarks/lra/report"),
) -> None:
    """Tables and plots of accuracies, learning curves, times and memory.

    Args:
        runs: folder with a folder for each run
        speed: lines of `speed`; None leaves them out
        out: folder of report.md and its pictures
    """
    # the default need not exist: lines of `speed` alone can be reported
    if runs != RUNS and not runs.is_dir():
        raise ValueError(f"runs must be a folder, got {runs}, which is none")
    tests, curves = tests_of(runs), curves_of(runs)
    begun = unfinished(runs, tests)
    lines = measure.read(speed) if speed is not None and speed.exists() else []
    if not (tests or curves or begun or lines):
        raise ValueError(f"nothing to report: no {TEST}, metrics.csv or {LAST} under {runs}, and no {speed}")
    figures: dict[str, Any] = {}
    alt_texts: list[str] = []
    if tests:
        figures["accuracy"] = accuracies(tests)
        alt_texts.append("Accuracy beside its floor")
    if curves:
        figures["learning-curves"] = learning_curves(curves, tests)
        alt_texts.append("Validation accuracy against steps")
    speeds = tables.frame(line for line in lines if line["bench"] == "lra_runtime")
    for size, alone in speeds.groupby(tables.ALONE, sort=False) if len(speeds) else ():
        name = re.sub("[^a-z0-9]+", "-", " ".join(map(str, size)).lower())
        figures[f"length-{name}"] = lengths(alone)
        where = "one {device} (batch {batch}, {heads} heads, head_dim {head_dim})".format_map(alone.iloc[0])
        alt_texts.append(f"Time and memory against length on {where}")
    out.mkdir(parents=True, exist_ok=True)
    written = [out / f"{name}.png" for name in figures]
    for path, figure in zip(written, figures.values(), strict=True):
        figure.savefig(path, dpi=120)
    sections = [
        "# Long Range Arena: results",
        (
            "Written by `python -m benchmarks.lra report`. The floor is the accuracy of the task's shortcuts on the "
            'same samples. "Points above" is the distance to the better shortcut, or **no** if it is below two '
            'standard errors. "Balanced" is the accuracy with the samples weighted so that the first shortcut is only '
            'as good as chance. "Pairs" is the accuracy on pairs of Pathfinder images that differ only in their '
            'markers. "Steps x batch" is that of the last stage. "Device hours" is the time of the training, times '
            'the number of GPUs. "Best published" are results on the released files, in percent. '
            "A run that was tested several times on the same set shows its last test, and their number."
        ),
        *tables.accuracy_sections(tests, begun, not_run(tests, begun)),
        *tables.speed_sections(lines),
        *(f"![{text}]({path.name})" for text, path in zip(alt_texts, written, strict=True)),
    ]
    page = out / "report.md"
    page.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    print(*written, page, sep="\n")
