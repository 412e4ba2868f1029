"""Demo: `python -m benchmarks.lra.demo` trains a block-sparse Transformer on ListOps in minutes, on any device.

`make demo` runs it through first_result.py, which shows a mask, times and gradients before this file is imported.

A pre-norm encoder reads expressions of 16 to 256 tokens, padded to 256, through butterfly | local | global_tokens with
16-token blocks, and answers at the first token, the root operator. Rotary positions encode the index of a token, an
embedding the number of brackets around it. Every expression is seen once. The accuracy is compared with the best guess
from the first token alone (the floor, which the run must exceed) and from looking one operator deep.

Writes out/layout.png, out/learning_curve.png, out/results.json and the weights, out/model.ckpt. The same command
resumes an interrupted run from its last checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

import masks
from benchmarks.lra import listops
from benchmarks.lra.first_result import device, first_result
from benchmarks.lra.floors import best_guess
from benchmarks.run import saved
from benchmarks.run.checkpoints import WholeCheckpoints, locked
from benchmarks.run.measure import wall_milliseconds
from blocksparse_flash import BlockLayout
from blocksparse_flash import nn as layers
from blocksparse_flash.nn import SelfAttention

LENGTH, BLOCK_SIZE = 256, 16
# accuracy above the floor that the run must reach
MARGIN = 0.05
# seconds of training after which a slow machine stops and tests
PATIENCE = 220


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of a run: equal settings on one machine give equal numbers."""

    seed: int = 0
    steps: int = 800
    batch_size: int = 24
    # steps between validations; a checkpoint follows each
    steps_per_epoch: int = 100
    n_validation: int = 500
    n_test: int = 2000
    embed_dim: int = 64
    num_heads: int = 2
    n_layers: int = 3
    learning_rate: float = 2e-3
    window: int = 16
    global_tokens: int = 16

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("window", "global_tokens") else 1
            if type(value) is int and name != "seed" and value < least:
                raise ValueError(f"{name} must be {least} or more, got {value}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1, got {self.seed}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")


def build_layout(settings: Settings) -> BlockLayout:
    """Blocks at power-of-two distances, the neighbors, and the first block for every query."""
    return (
        masks.butterfly(LENGTH, block_size=BLOCK_SIZE)
        | masks.local(LENGTH, window=settings.window, block_size=BLOCK_SIZE)
        | masks.global_tokens(LENGTH, tokens=settings.global_tokens, block_size=BLOCK_SIZE)
    )


def padded(samples: Sequence[listops.Sample]) -> TensorDataset:
    """tokens uint8 (samples, 256), lengths int32 (samples,), labels int64 (samples,)."""
    tokens = torch.full((len(samples), LENGTH), listops.PAD, dtype=torch.uint8)
    for row, sample in zip(tokens, samples, strict=True):
        row[: len(sample.tokens)] = torch.frombuffer(bytearray(sample.tokens), dtype=torch.uint8)
    lengths = torch.tensor([len(sample.tokens) for sample in samples], dtype=torch.int32)
    return TensorDataset(tokens, lengths, torch.tensor([sample.label for sample in samples]))


class Encoder(nn.Module):
    """tokens (batch, 256) and lengths (batch,) to the logits of the ten answers (batch, 10)."""

    def __init__(self, settings: Settings, layout: BlockLayout) -> None:
        super().__init__()
        self.symbols = nn.Embedding(listops.N_TOKENS, settings.embed_dim)
        self.nesting = nn.Embedding(listops.PRESETS["small"].max_depth + 1, settings.embed_dim)
        width = settings.embed_dim
        attentions = (SelfAttention(width, settings.num_heads, layout, rope=10_000.0) for _ in range(settings.n_layers))
        self.layers = layers.Encoder(layers.EncoderBlock(each, hidden_dim=2 * width) for each in attentions)
        self.answer = nn.Linear(settings.embed_dim, listops.N_CLASSES)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        tokens = tokens.int()
        x = self.symbols(tokens) + self.nesting(nesting_depths(tokens))
        # every expression starts with its root operator
        return self.answer(self.layers(x, lengths)[:, 0])


def nesting_depths(tokens: Tensor) -> Tensor:
    """Number of brackets around each token: 0 for the root, 1 for its children."""
    opens = (tokens >= listops.FIRST_OPERATOR) & (tokens < listops.CLOSE)
    closes = tokens == listops.CLOSE
    return opens.cumsum(dim=1) - closes.cumsum(dim=1) - opens.long()


class Task(lightning.LightningModule):
    """Samples, loss, accuracy, optimizer, and the learning curve.

    Each epoch is the next part of the training set, which is seen once, in order.
    """

    metrics: Any

    def __init__(self, settings: Settings, layout: BlockLayout) -> None:
        super().__init__()
        self.settings = settings
        n_train = settings.steps * settings.batch_size
        sizes = {"n_train": n_train, "n_validation": settings.n_validation, "n_test": settings.n_test}
        self.splits = listops.splits(listops.PRESETS["small"], **sizes, seed=settings.seed)
        self.encoder = Encoder(settings, layout)
        names = ("train_accuracy", "validation_accuracy", "test_accuracy")
        accuracies = {name: MulticlassAccuracy(listops.N_CLASSES, average="micro") for name in names}
        self.metrics = nn.ModuleDict({"loss": MeanMetric(), **accuracies})
        # step, loss and accuracy of the training samples since the last point, validation accuracy
        self.curve: list[dict[str, float]] = []

    def train_dataloader(self) -> DataLoader[Any]:
        n_samples = self.settings.steps_per_epoch * self.settings.batch_size
        begin = self.trainer.current_epoch * n_samples
        part = padded(self.splits.train[begin : begin + n_samples])
        return DataLoader(part, self.settings.batch_size, pin_memory=torch.cuda.is_available())

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(padded(self.splits.validation), 50, pin_memory=torch.cuda.is_available())

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(padded(self.splits.test), 50, pin_memory=torch.cuda.is_available())

    def _logits(self, batch: list[Tensor], accuracy: str) -> Tensor:
        tokens, lengths, labels = batch
        logits = self.encoder(tokens, lengths)
        self.metrics[accuracy].update(logits, labels)
        return logits

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = F.cross_entropy(self._logits(batch, "train_accuracy"), batch[-1])
        self.metrics["loss"].update(loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self._logits(batch, "validation_accuracy")

    def on_validation_epoch_end(self) -> None:
        point: dict[str, float] = {"step": self.global_step}
        for name in ("loss", "train_accuracy", "validation_accuracy"):
            point[name] = self.metrics[name].compute().item()
            self.metrics[name].reset()
        self.curve.append(point)
        self.log("validation_accuracy", point["validation_accuracy"], prog_bar=True)

    def test_step(self, batch: list[Tensor]) -> None:
        self._logits(batch, "test_accuracy")
        self.log("test_accuracy", self.metrics["test_accuracy"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["settings"] = dataclasses.asdict(self.settings)
        checkpoint["curve"] = list(self.curve)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.curve = list(checkpoint["curve"])

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        rate, steps = self.settings.learning_rate, self.settings.steps
        optimizer = torch.optim.AdamW(self.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=rate, total_steps=steps, pct_start=0.1, anneal_strategy="linear", cycle_momentum=False
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def draw_curve(results: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.add_subplot()
    curve = results["curve"]
    steps = [point["step"] for point in curve]
    axes.plot(steps, [point["train_accuracy"] for point in curve], color="#b9c9cf", label="training samples, seen once")
    axes.plot(steps, [point["validation_accuracy"] for point in curve], color="#1f6f8b", label="validation")
    last = results["samples"] / results["settings"]["batch_size"]
    axes.plot([last], [results["test_accuracy"]], "o", color="#c1121f", label=f"test {results['test_accuracy']:.1%}")
    for name, label in (("floor", "root operator alone"), ("second_level", "one operator deep")):
        axes.axhline(results[name], color="#6b705c", linestyle="--", linewidth=1)
        axes.text(0.99 * last, results[name], f"{label} {results[name]:.1%}", ha="right", va="bottom", fontsize=9)
    axes.set_xlabel(f"steps of {results['settings']['batch_size']} expressions")
    axes.set_ylabel("accuracy")
    axes.set_xlim(0, 1.02 * last)
    axes.set_ylim(0, 1)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def warn_if_slow(settings: Settings, layout: BlockLayout, n_steps: int) -> None:
    """Times one step, and says before the training if all will not fit into its time limit."""
    with torch.random.fork_rng():
        encoder = Encoder(settings, layout).to(device())
        tokens = torch.zeros(settings.batch_size, LENGTH, dtype=torch.uint8, device=device())
        lengths = torch.full((settings.batch_size,), LENGTH, dtype=torch.int32, device=device())
        step_ms = wall_milliseconds(lambda: encoder(tokens, lengths).sum().backward(), runs=2)["ms"]
    needed = n_steps * step_ms / 1000
    print(f"training: {n_steps} steps, about {needed:.0f} s; it stops after {PATIENCE} s")
    if needed > PATIENCE:
        print(
            "   warning: this machine is slow or busy. Training may stop after about "
            f"{n_steps * PATIENCE / needed:.0f} steps and miss the required accuracy"
        )


def finished_steps(path: Path, settings: Settings) -> int:
    """Steps in the checkpoint of an interrupted run with these settings; 0 without one."""
    if not path.exists():
        return 0
    checkpoint = saved.load(path, ("settings", "global_step"))
    if checkpoint["settings"] != dataclasses.asdict(settings):
        print(f"{path} was left by a run with other settings: starting afresh")
        return 0
    print(f"going on from step {checkpoint['global_step']} of {settings.steps}")
    return int(checkpoint["global_step"])


def run(settings: Settings, out: Path) -> dict[str, Any]:
    """Trains or resumes, tests and writes everything under `out`. Returns the contents of results.json."""
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    lightning.seed_everything(settings.seed, verbose=False)
    layout = build_layout(settings)
    layout.plot().savefig(out / "layout.png", dpi=120)
    print(
        f"layout: butterfly | local | global_tokens, {LENGTH} tokens, block {BLOCK_SIZE}, density {layout.density:.3f}"
    )
    path = out / "unfinished.ckpt"
    task = Task(settings, layout)
    n_finished = finished_steps(path, settings)
    warn_if_slow(settings, layout, settings.steps - n_finished)
    trainer = lightning.Trainer(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=1,
        max_steps=settings.steps,
        max_epochs=-1,
        max_time={"seconds": PATIENCE},
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_model_summary=False,
        plugins=[WholeCheckpoints()],
        callbacks=[
            ModelCheckpoint(
                dirpath=out, filename=path.stem, enable_version_counter=False, save_on_train_epoch_end=True
            ),
            TQDMProgressBar(refresh_rate=10),
        ],
    )
    try:
        trainer.fit(task, ckpt_path=path if n_finished else None)
        trained = time.perf_counter()
        accuracy = float(trainer.test(task, verbose=False)[0]["test_accuracy"])
    except SystemExit:
        # Lightning's answer to Ctrl-C
        raise KeyboardInterrupt from None
    test = task.splits.test
    roots, labels = np.array([(sample.tokens[0], sample.label) for sample in test]).T
    floor, _ = best_guess(roots, labels)
    results = {
        "test_accuracy": accuracy,
        "floor": floor,
        "second_level": listops.oracle_accuracy(test, depth=1),
        "required": floor + MARGIN,
        "density": layout.density,
        "samples": task.global_step * settings.batch_size,
        "parameters": sum(parameter.numel() for parameter in task.encoder.parameters()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "seconds": {"training": trained - started, "total": time.perf_counter() - started},
        "torch": torch.__version__,
        "data": "generated by the published rules of ListOps at a smaller size, not the released files",
        "settings": dataclasses.asdict(settings),
        "curve": task.curve,
    }
    draw_curve(results, out / "learning_curve.png")
    with saved.replacing(out / "results.json") as unfinished:
        unfinished.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    trainer.save_checkpoint(out / "model.ckpt")
    path.unlink(missing_ok=True)
    return results


def main(arguments: Sequence[str] | None = None, *, agree: bool | None = None) -> int:
    """Exit code: 0 if gradients agree and the test accuracy exceeds the floor by 5 points, else 1.

    agree  what first_result returned; None calls it
    """
    started = time.perf_counter()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lra.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for pictures, results and checkpoints")
    for field in dataclasses.fields(Settings):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default, help=f"default {field.default}")
    options = vars(parser.parse_args(arguments))
    out = options.pop("out")
    try:
        settings = Settings(**options)
        # these check how the sizes fit together
        Encoder(settings, build_layout(settings))
    except ValueError as error:
        parser.error(str(error))
    # Lightning warns about loader processes (not needed for 256 bytes a sample), about files beside the checkpoint, and
    # about a name that PyTorch deprecates
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", "Checkpoint directory .* is not empty")
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
    # steps are hundreds of small operations: more threads gain little, and one gives equal numbers on any machine
    torch.set_num_threads(1)
    agree = first_result() if agree is None else agree
    try:
        with locked(out):
            results = run(settings, out)
    except (OSError, ValueError) as error:
        sys.exit(f"the demo: {error}")
    except KeyboardInterrupt:
        print(f"\ninterrupted; run the same command to continue from the last checkpoint in {out}", file=sys.stderr)
        return 130
    accuracy, floor = results["test_accuracy"], results["floor"]
    deeper = results["second_level"]
    print(f"   {out}/layout.png, {out}/learning_curve.png, {out}/results.json")
    print(f"   {results['samples']} samples in {time.perf_counter() - started:.0f} s on {results['device']}")
    if results["samples"] < results["settings"]["steps"] * results["settings"]["batch_size"]:
        print(f"   stopped after {PATIENCE} s of training, before its last step: this machine is slow or busy")
    print(
        f"   best guess from the root operator alone (the floor): {floor:.1%}; from one operator deeper: {deeper:.1%}"
    )
    passed = accuracy >= results["required"] and agree
    print(
        f"{'PASSED' if passed else 'FAILED'}: test accuracy {accuracy:.1%} on {results['settings']['n_test']:,} "
        f"generated expressions; {results['required']:.1%} was required, {100 * MARGIN:.0f} points above the floor"
        + ("" if agree else "; gradients differ from plain PyTorch")
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
