"""Training with Lightning, which resumes exactly after an interruption."""

from __future__ import annotations

import logging
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.utils.data import DataLoader

from ..run import measure
from .corpus import Corpus
from .curves import Point, point_of, write_points, write_run
from .model import MAX_NORM, LanguageModel, Settings, optimizer_of

# seconds of training on a CPU that deserve a warning
SLOW = 300


class Training(lightning.LightningModule):
    """An epoch is `validate_every` steps and a validation, after which a checkpoint is written."""

    def __init__(self, settings: Settings, corpus: Corpus, folder: Path) -> None:
        super().__init__()
        self.settings, self.corpus, self.folder = settings, corpus, folder
        self.identity = {**asdict(settings), "corpus_sha256": corpus.sha256}
        self.model = LanguageModel(settings)
        self.points: list[Point] = []
        self.train_losses: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.seconds, self._begin = 0.0, 0.0

    def train_dataloader(self) -> DataLoader[Tensor]:
        size, count = self.settings.batch_size, self.settings.validate_every
        first = self.trainer.current_epoch * count
        steps = self.corpus.training_batches(size, seed=self.settings.seed, first_step=first, n_steps=count)
        return DataLoader([*steps], batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Tensor]:
        batches = self.corpus.validation_batches(self.settings.batch_size, self.settings.n_validation)
        return DataLoader([*batches], batch_size=None)  # type: ignore[arg-type]

    def on_train_epoch_start(self) -> None:
        measure.synchronize()
        self._begin = time.perf_counter()

    def training_step(self, window: Tensor) -> Tensor:
        loss = self.model(window).mean()
        self.train_losses.append(loss.detach())
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_validation_start(self) -> None:
        measure.synchronize()
        self.seconds += time.perf_counter() - self._begin

    def validation_step(self, window: Tensor) -> None:
        self.losses.append(self.model(window))

    def on_validation_epoch_end(self) -> None:
        figures: dict[str, Any] = {"train_loss": torch.stack(self.train_losses).mean().item(), "losses": self.losses}
        self.points.append(point_of(self.settings, step=self.global_step, seconds=self.seconds, **figures))
        self.train_losses, self.losses = [], []
        write_points(self.folder, self.points)
        self.log("validation_loss", self.points[-1]["validation_loss"], prog_bar=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {"identity": self.identity, "points": list(self.points), "seconds": self.seconds}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.points, self.seconds = list(checkpoint["points"]), checkpoint["seconds"]

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer, schedule = optimizer_of(self.model, self.settings)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def print_duration(settings: Settings, corpus: Corpus, device: torch.device, n_steps: int) -> None:
    """Times a step, which compiles the kernels too, and prints how long the training will take."""
    model, window = LanguageModel(settings).to(device), corpus.train[: settings.batch_size].to(device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(window).mean()
        loss.backward()

    seconds = n_steps * measure.wall_milliseconds(step, runs=2)["ms"] / 1000
    tokens = n_steps * settings.batch_size * settings.length
    print(f"{settings.arm}: {n_steps} steps, {tokens:,} tokens, about {seconds:,.0f} s", flush=True)
    if device.type == "cpu" and seconds > SLOW:
        print("   warning: this takes a GPU; --tiny takes about a minute on a CPU", flush=True)


def train(settings: Settings, corpus: Corpus, folder: Path) -> None:
    """Trains or resumes; writes run.json, metrics.csv and a checkpoint to the folder.

    raises  ValueError if the folder has a run with other settings or another corpus
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # batches are in memory; the files beside the checkpoint are the results
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", "Checkpoint directory .* is not empty")
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, path, n_done = Training(settings, corpus, folder), folder / "last.ckpt", 0
    if path.exists():
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["identity"] != training.identity:
            raise ValueError(f"{folder} has a run with other settings or another corpus: choose another --out")
        n_done = checkpoint["global_step"]
        print(f"{settings.arm}: going on from step {n_done} of {settings.steps}", flush=True)
    write_run(folder, settings, training.model, corpus.sha256, device)
    print_duration(settings, corpus, device, settings.steps - n_done)
    keeper = ModelCheckpoint(folder, path.stem, enable_version_counter=False, save_on_train_epoch_end=True)
    trainer = lightning.Trainer(
        accelerator=device.type, devices=1, precision="bf16-mixed" if device.type == "cuda" else "32-true",
        max_steps=settings.steps, max_epochs=-1, gradient_clip_val=MAX_NORM, num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1, logger=False, enable_model_summary=False,
        callbacks=[keeper, TQDMProgressBar(refresh_rate=max(1, settings.validate_every // 10))],
    )  # fmt: skip
    trainer.fit(training, ckpt_path=path if n_done else None)
    last = training.points[-1]
    rate = last["tokens"] / last["seconds"]
    print(f"{settings.arm}: validation loss {last['validation_loss']:.4f} nats a byte, {rate:,.0f} tokens/s")
