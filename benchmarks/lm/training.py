"""Training with Lightning, which resumes exactly after an interruption, and all runs of a figure."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.utils.data import DataLoader

from ..run import measure, saved
from ..run.checkpoints import WholeCheckpoints, locked
from .corpus import Corpus
from .curves import Point, identity_of, point_of, read_run, write_points, write_run
from .model import MAX_NORM, LanguageModel, Settings, optimizer_of

# seconds of training on a CPU that deserve a warning
SLOW = 300
# state of AdamW for each weight
MOMENTS = ("exp_avg", "exp_avg_sq")


class Training(lightning.LightningModule):
    """An epoch is `validate_every` steps and a validation, after which a checkpoint is written.

    deadline  a time of time.monotonic(): training ends after the last epoch that is expected to end before it
    """

    # seconds that the latest run of this process took to compile
    set_up = 0.0

    def __init__(self, settings: Settings, corpus: Corpus, folder: Path, deadline: float = math.inf) -> None:
        super().__init__()
        self.settings, self.corpus, self.folder, self.deadline = settings, corpus, folder, deadline
        self.identity = identity_of(settings, corpus.sha256)
        self.model = LanguageModel(settings)
        if settings.start:
            load_start(self.model, Path(settings.start))
        self.points: list[Point] = []
        self.train_losses: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.seconds, self._begin, self.peak_bytes = 0.0, 0.0, 0

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
        if self.device.type == "cuda":
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())

    def validation_step(self, window: Tensor) -> None:
        self.losses.append(self.model(window))

    def on_validation_epoch_end(self) -> None:
        figures: dict[str, Any] = {"train_loss": torch.stack(self.train_losses).mean().item(), "losses": self.losses}
        figures |= {"seconds": self.seconds, "peak_bytes": self.peak_bytes}
        self.points.append(point_of(self.settings, step=self.global_step, **figures))
        self.train_losses, self.losses = [], []
        write_points(self.folder, self.points)
        self.log("validation_loss", self.points[-1]["validation_loss"], prog_bar=True)

    def on_train_epoch_end(self) -> None:
        # Lightning also ends the checkpoint's epoch when it resumes, before an epoch has begun
        if not self._begin:
            return
        # with the validation, and a second for the checkpoint
        took = time.perf_counter() - self._begin + 1
        self.trainer.should_stop = time.monotonic() + took > self.deadline

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Rounds AdamW's state to bfloat16, in memory too, so that resuming is exact: 8 bytes per weight, not 12."""
        checkpoint |= {"identity": self.identity, "points": list(self.points)}
        checkpoint |= {"seconds": self.seconds, "peak_bytes": self.peak_bytes}
        states = checkpoint["optimizer_states"][0]["state"]
        for index, state in states.items():
            rounded = {name: state[name].bfloat16() for name in MOMENTS}
            for name in MOMENTS:
                state[name].copy_(rounded[name])
            states[index] = {**state, **rounded}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.points, self.seconds = list(checkpoint["points"]), checkpoint["seconds"]
        self.peak_bytes = checkpoint["peak_bytes"]

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer, schedule = optimizer_of(self.model, self.settings)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def load_start(model: LanguageModel, folder: Path) -> None:
    """Replaces the weights by those of a finished run; ValueError if they are those of another model."""
    weights = saved.load(folder / "weights.pt")
    shapes = [{name: weight.shape for name, weight in each.items()} for each in (weights, model.state_dict())]
    if shapes[0] != shapes[1]:
        raise ValueError(f"start {folder} has weights of other sizes or of nsa: train it with the same model")
    model.load_state_dict(weights)


def print_duration(training: Training, device: torch.device, n_steps: int) -> float:
    """Times a step, which also compiles the kernels; prints and returns how many seconds the training will take."""
    model, settings = training.model.to(device), training.settings
    window = training.corpus.train[: settings.batch_size].to(device)

    def step() -> None:
        # as Lightning's, or the training would compile the model again
        options: dict[str, Any] = {"dtype": torch.bfloat16, "cache_enabled": False}
        with torch.autocast(device.type, enabled=device.type == "cuda", **options):
            loss = model(window).mean()
        loss.backward()
        model.zero_grad()

    seconds = n_steps * measure.wall_milliseconds(step, runs=2)["ms"] / 1000
    tokens = n_steps * settings.batch_size * settings.length
    print(f"{settings.name}: {n_steps} steps, {tokens:,} tokens, about {seconds:,.0f} s", flush=True)
    if device.type == "cpu" and seconds > SLOW:
        print("   warning: this takes a GPU; --tiny takes about a minute on a CPU", flush=True)
    return seconds


def train(settings: Settings, corpus: Corpus, folder: Path, deadline: float = math.inf) -> bool:
    """Trains or resumes; writes run.json, metrics.csv and a checkpoint to the folder. Returns whether it has finished.

    A finished run keeps its weights in bfloat16, weights.pt, and no checkpoint.

    deadline  a time of time.monotonic(): saves and returns before it
    raises    ValueError if the folder has a run with other settings, another corpus or another start, if another
              process trains in it, or if settings.start has no weights for this model
    """
    with locked(folder):
        return _train(settings, corpus, folder, deadline)


def _train(settings: Settings, corpus: Corpus, folder: Path, deadline: float) -> bool:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # batches are in memory; the files beside the checkpoint are the results
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", "Checkpoint directory .* is not empty")
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path, weights, n_done, where = folder / "last.ckpt", folder / "weights.pt", 0, f"{settings.name}, {folder}"
    training = Training(settings, corpus, folder, deadline)
    if path.exists() or weights.exists():
        # weights beside a checkpoint: a kill came before its removal
        is_finished = not path.exists()
        checkpoint = {} if is_finished else saved.load(path, ("identity", "global_step"))
        facts = read_run(folder)[0] if is_finished else checkpoint["identity"]
        odd = [name for name in ("start", *training.identity) if facts.get(name) != training.identity.get(name)]
        if odd:
            raise ValueError(
                f"{folder} has a run with other settings, another corpus or other weights to start with (other: "
                f"{', '.join(dict.fromkeys(odd))}): choose another --out, or remove it to begin anew"
            )
        if is_finished:
            print(f"{where}: finished before", flush=True)
            return True
        n_done = checkpoint["global_step"]
        print(f"{where}: continues from step {n_done} of {settings.steps}", flush=True)
    # compiled functions of an earlier run count toward PyTorch's limit
    torch.compiler.reset()
    if device.type == "cuda":
        training.model.compiled()
        torch.cuda.reset_peak_memory_stats()
    write_run(folder, training.identity, training.model, device)
    epoch = 0.0
    # with all steps in the checkpoint, only the weights are missing
    if n_done < settings.steps:
        begin = time.monotonic()
        if begin + Training.set_up > deadline:
            print(f"{where}: too little time to compile, {Training.set_up:,.0f} s", flush=True)
            return False
        seconds = print_duration(training, device, settings.steps - n_done)
        Training.set_up = time.monotonic() - begin
        # the validation compiles too
        epoch = seconds * settings.validate_every / (settings.steps - n_done) + Training.set_up
    if time.monotonic() + epoch > deadline:
        print(f"{where}: too little time for {settings.validate_every} steps, {epoch:,.0f} s", flush=True)
        return False
    keeper = ModelCheckpoint(folder, path.stem, enable_version_counter=False, save_on_train_epoch_end=True)
    trainer = lightning.Trainer(
        accelerator=device.type, devices=1, precision="bf16-mixed" if device.type == "cuda" else "32-true",
        max_steps=settings.steps, max_epochs=-1, gradient_clip_val=MAX_NORM, num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1, logger=False, enable_model_summary=False, plugins=[WholeCheckpoints()],
        callbacks=[keeper, TQDMProgressBar(refresh_rate=max(1, settings.validate_every // 10))],
    )  # fmt: skip
    trainer.fit(training, ckpt_path=path if n_done else None)
    last = training.points[-1]
    rate, loss = last["tokens"] / last["seconds"], f"validation loss {last['validation_loss']:.4f} nats a byte"
    print(f"{where}: {loss}, {rate:,.0f} tokens/s, step {training.global_step} of {settings.steps}", flush=True)
    if training.global_step < settings.steps:
        return False
    with saved.replacing(weights) as unfinished:
        torch.save({name: weight.bfloat16() for name, weight in training.model.state_dict().items()}, unfinished)
    path.unlink()
    return True


def train_all(runs: Iterable[Settings], corpus: Corpus, folder: Path, deadline: float = math.inf) -> int:
    """Trains every run in a folder of its own, skipping those that have finished. Returns how many have."""
    return sum(
        time.monotonic() < deadline and train(run, corpus, folder / f"{run.name}-seed{run.seed}", deadline)
        for run in runs
    )
