"""Configurations: every file loads and has the published settings."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("numba", reason="needs the extra [lra]")
pytest.importorskip("lightning", reason="needs the extra [lra]")
pytest.importorskip("jsonargparse", reason="needs the extra [lra]")

import benchmarks.lra
from benchmarks.lra import __main__ as command
from benchmarks.lra import recipe, scoring, tables
from benchmarks.lra.data import LraData, Rules, Stage, generator_of, stage_sources
from benchmarks.lra.model import Architecture, Classifier, keys_per_query
from benchmarks.lra.tasks import find
from benchmarks.lra.training import Recipe
from benchmarks.run import measure

FOLDER = Path(benchmarks.lra.__file__).parent / "configs"
RESULTS = FOLDER.parents[1] / "results" / "lra"
FILES = {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in sorted(FOLDER.rglob("*.yaml"))}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load(FILES[name].read_text())


@pytest.mark.parametrize("name", FILES)
def test_a_configuration_makes_a_model_its_data_and_a_folder_of_its_own(name: str) -> None:
    settings = read(name)
    task = find(settings["data"]["task"])
    with torch.device("meta"):
        Classifier(task, Architecture(**settings["model"]["architecture"]))
    recipe = Recipe(**settings["model"]["recipe"])
    for stage in settings["data"].get("rules", {}).get("stages", []):
        stage_sources(generator_of(task, Rules()), Stage(**stage), task.length)
    # the official Retrieval is still warming up when it ends
    assert recipe.schedule == "rsqrt" or settings["trainer"]["max_steps"] > recipe.warmup
    assert settings["trainer"]["default_root_dir"] == f"out/lra/runs/{name}"


@pytest.mark.parametrize("name", [name for name in FILES if "start" in read(name)["model"]])
def test_weights_come_from_a_configuration_with_the_same_encoder(name: str) -> None:
    settings = read(name)
    before = settings["model"]["start"].removeprefix("out/lra/runs/").removesuffix("/checkpoints/last.ckpt")
    with torch.device("meta"):
        models = [
            Classifier(find(each["data"]["task"]), Architecture(**each["model"]["architecture"]))
            for each in (settings, read(before))
        ]
    shapes = [{key: tuple(weight.shape) for key, weight in model.state_dict().items()} for model in models]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    "name", ["official/listops", "nystromformer/retrieval", "fly/image", "ours/pathx", "ablation/pathx-local"]
)
def test_the_command_reads_a_configuration(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.lra"])
    with pytest.raises(SystemExit) as done:
        command.main(["fit", "--config", str(FILES[name]), "--print_config"])
    assert done.value.code in (0, None)
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["data"]["batch_size"] == read(name)["data"]["batch_size"]
    assert printed["model"]["architecture"]["mask"] == read(name)["model"]["architecture"].get("mask")
    assert printed["trainer"]["devices"] == 1


def is_tested_on_a_generated_set(name: str) -> bool:
    data, recipe = read(name)["data"], read(name)["model"]["recipe"]
    return name.startswith("ours/") and data["source"] in ("generated", "fresh") and "objective" not in recipe


@pytest.mark.parametrize("name", [name for name in FILES if is_tested_on_a_generated_set(name)])
def test_the_size_of_a_generated_test_set_can_be_chosen(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.lra"])
    with pytest.raises(SystemExit) as done:
        command.main(["test", "--config", str(FILES[name]), "--data.sizes.test", "22000", "--print_config"])
    assert done.value.code in (0, None)
    sizes = yaml.safe_load(capsys.readouterr().out)["data"]["sizes"]
    # without the others the command stops
    assert sizes["test"] == 22000 and None not in sizes.values()


def samples_of(name: str) -> int:
    """Samples of a whole training."""
    data, trainer = read(name)["data"], read(name)["trainer"]
    steps = trainer["max_steps"] * trainer.get("accumulate_grad_batches", 1)
    if data["source"] != "fresh":
        return steps * data["batch_size"]
    rules = Rules(stages=[Stage(**each) for each in data.get("rules", {}).get("stages", [])])
    return LraData(data["task"], "fresh", batch_size=data["batch_size"], rules=rules).samples(steps)


@pytest.mark.parametrize("path", sorted(RESULTS.rglob(scoring.TEST)), ids=lambda path: path.parent.name)
def test_a_configuration_reproduces_its_result(path: Path) -> None:
    """Settings, steps and samples of a result are those of its configuration, and of the stages before it."""
    name = re.sub(r"/seed-\d+$", "", path.parent.relative_to(RESULTS).as_posix())
    settings = read(name)
    data, architecture = settings["data"], settings["model"]["architecture"]
    before = [stage.config for stage in recipe.stages(name.removeprefix("ours/"))[:-1]]
    said = {
        "task": data["task"], "source": data["source"], "mask": architecture.get("mask"),
        "keys": pytest.approx(keys_per_query(Architecture(**architecture), find(data["task"]).length), abs=0.01),
        "n_layers": architecture["n_layers"], "embed_dim": architecture["embed_dim"],
        "recipe": json.loads(json.dumps(asdict(Recipe(**settings["model"]["recipe"])))),
        "steps": settings["trainer"]["max_steps"],
        "batch_size": data["batch_size"] * settings["trainer"].get("accumulate_grad_batches", 1),
        "samples": samples_of(name), "samples_before": sum(samples_of(f"ours/{config.stem}") for config in before),
    }  # fmt: skip
    for line in measure.read(path):
        assert [*line] == scoring.TEST_KEYS
        assert {key: line[key] for key in said} == said
        assert line["is_lra"] and line["n"] >= find(data["task"]).sizes.test
        # how the first results began was not recorded
        assert (line["start"] is None) == (not before)


def test_compared_masks_have_as_many_keys_and_the_same_training() -> None:
    names = ["ours/pathx", *(name for name in FILES if name.startswith("ablation/"))]
    assert len(names) == 4
    found, others = [], []
    for name in names:
        settings = read(name)
        architecture = Architecture(**settings["model"]["architecture"])
        found.append(keys_per_query(architecture, 128 * 128))
        del settings["model"]["architecture"]["mask"], settings["trainer"]["default_root_dir"]
        others.append(settings)
    assert max(found) / min(found) - 1 < tables.KEYS_DIFFER
    assert all(settings == others[0] for settings in others)


def test_published_sizes() -> None:
    """Heads, features and steps as they are printed in the repositories."""
    listops = read("official/listops")
    assert listops["model"]["architecture"]["embed_dim"] == 512
    assert listops["trainer"]["max_steps"] == 5000
    image = read("official/image")["model"]["architecture"]
    # 64 features of queries in 8 heads
    assert image["head_dim"] * image["num_heads"] == 64
    for task in ("listops", "text", "retrieval", "image", "pathfinder32"):
        small = read(f"nystromformer/{task}")["model"]["architecture"]
        assert (small["n_layers"], small["embed_dim"], small["num_heads"], small["hidden_dim"]) == (2, 64, 2, 128)
