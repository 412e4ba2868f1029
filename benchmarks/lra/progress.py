"""Lightning callbacks: progress lines, a deadline, and a profile of training steps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor


class Deadline(Callback):
    """Stops training at a time of the clock, with a last validation and a checkpoint.

    Lightning's max_time also counts the time before an interruption.

    at  seconds as in time.time(); several processes check it every 16 steps
    """

    STEPS = 16

    def __init__(self, at: float) -> None:
        self.at = at

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # gradients of the first pieces of a step are in no checkpoint
        if (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
            return
        # all processes use the clock of the first, to stop at the same step; the broadcast waits for the GPU
        if trainer.world_size > 1 and trainer.global_step % self.STEPS:
            return
        if trainer.strategy.broadcast(time.time() >= self.at):
            trainer.should_stop = True


class Progress(Callback):
    """Prints a line every few seconds and appends it to progress.jsonl in the folder of the run.

    every  seconds between lines
    floor  accuracy of the task's shortcut, to compare with validation accuracy
    """

    def __init__(self, every: float = 20.0, floor: float | None = None) -> None:
        self.every, self.floor = every, floor
        self.samples = 0
        self._begun = self._waiting_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._since, self._batches, self._samples, self._tokens, self._waited = time.perf_counter(), 0, 0, 0, 0.0
        self._loss: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples + self._samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begun = self._waiting_since = time.perf_counter()
        self._reset()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._waited += time.perf_counter() - self._waiting_since

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # excludes the time of validation
        self._waiting_since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning divides the loss by accumulate_grad_batches
        loss = outputs["loss"].detach() * trainer.accumulate_grad_batches
        self._loss = loss if self._loss is None else self._loss + loss
        self._batches, self._samples = self._batches + 1, self._samples + len(batch.labels) * trainer.world_size
        self._tokens += batch.tokens.numel() * trainer.world_size
        if time.perf_counter() - self._since >= self.every:
            self._say(trainer)
        self._waiting_since = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._say(trainer)

    def _say(self, trainer: Trainer) -> None:
        if self._loss is None:
            return
        # item() waits for the device, so that launched work is counted
        loss = self._loss.item() / self._batches
        now = time.perf_counter()
        took, pieces = now - self._since, trainer.accumulate_grad_batches
        self.samples += self._samples
        names: tuple[str, ...] = ("validation_accuracy", "validation_loss")
        validated = {
            name: round(float(trainer.callback_metrics[name]), 4) for name in names if name in trainer.callback_metrics
        }
        line: dict[str, Any] = {
            "step": trainer.global_step,
            "samples": self.samples,
            "loss": round(loss, 4),
            **validated,
            "floor": self.floor,
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
            "samples_per_s": round(self._samples / took, 1),
            "tokens_per_s": round(self._tokens / took),
            "ms_per_step": round(1e3 * took / self._batches * pieces, 2),
            "ms_waited": round(1e3 * self._waited / self._batches * pieces, 2),
            "seconds": round(now - self._begun, 1),
        }
        if trainer.is_global_zero:
            print(json.dumps(line), flush=True)
            path = Path(trainer.default_root_dir) / "progress.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        self._reset()


class Profile(Callback):
    """Prints a profile of training steps, once.

    at     first profiled step, counted since the start or resumption
    steps  profiled steps
    rows   operations in the table
    """

    def __init__(self, at: int = 60, steps: int = 5, rows: int = 14) -> None:
        self.at, self.steps, self.rows = at, steps, rows
        self._seen, self._begun = 0, 0.0
        self._profiler: torch.profiler.profile | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        if self._seen == self.at:
            self._profiler = torch.profiler.profile()
            self._synchronize(pl_module)
            self._profiler.start()
            self._begun = time.perf_counter()
        self._seen += 1

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        if self._profiler is None or self._seen < self.at + self.steps:
            return
        queued = time.perf_counter() - self._begun
        self._synchronize(pl_module)
        took = time.perf_counter() - self._begun
        self._profiler.stop()
        print(self._said(took, queued), flush=True)
        self._profiler = None
        self.at = -1

    @staticmethod
    def _synchronize(pl_module: LightningModule) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)

    def _said(self, took: float, queued: float) -> str:
        assert self._profiler is not None
        events = [each for each in self._profiler.key_averages() if not each.is_user_annotation]
        on_device = [each for each in events if each.device_type.name != "CPU"]
        is_cuda = bool(on_device)

        def spent(event: Any) -> float:
            return event.self_device_time_total if is_cuda else event.self_cpu_time_total

        found = sorted(on_device if is_cuda else events, key=spent, reverse=True)
        busy = sum(map(spent, found))
        per_step = 1e-3 / self.steps
        count = sum(each.count for each in found) // self.steps
        head = (
            f"a step takes {1e3 * took / self.steps:.2f} ms under the profiler: {1e3 * queued / self.steps:.2f} ms "
            f"until the "
            f"host has asked for it, {busy * per_step:.2f} ms of {count} {'kernels' if is_cuda else 'operations'}"
        )
        lines = [
            f"{spent(each) * per_step:8.3f} ms {100 * spent(each) / busy:5.1f}% {each.count // self.steps:5d} x "
            f"{each.key[:90]}"
            for each in found[: self.rows]
        ]
        return "\n".join([head, *lines])
