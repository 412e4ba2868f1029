"""Training and testing with Lightning: objectives, learning rates, and checkpoints that resume exactly."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from blocksparse_flash.nn import EncoderBlock, RotaryTable

from ..run import measure, saved
from .batches import Batch
from .data import LraData
from .floors import pair_accuracy
from .model import Architecture, Classifier, keys_per_query, load_fitting
from .scoring import Result, belongs, digest, score
from .tasks import find

# seconds within which a second interrupt is the first one, sent to several processes
SAME_INTERRUPT = 1.0
# settings of an architecture that do not matter in a test
ONLY_TRAINED = {"dropout_p", "attention_dropout_p", "first_tokens"}


@dataclass(frozen=True)
class Recipe:
    """Settings of a training.

    schedule      after a linear warm-up of `warmup` steps: "cosine" or "linear" to 0 at the last step, "rsqrt"
                  (learning_rate / sqrt(step), as in Long Range Arena), "constant", or "trapezoid": constant, then
                  linear to 0 over the last `cooldown` steps
    last_step     last step of the schedule; None is trainer.max_steps. Later than that if a time limit ended the run
    hidden_share  share of tokens hidden in self-pretraining, objective="guess"
    """

    learning_rate: float = 1e-3
    schedule: Literal["cosine", "linear", "rsqrt", "constant", "trapezoid"] = "cosine"
    warmup: int = 500
    cooldown: int = 0
    last_step: int | None = None
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    objective: Literal["classify", "guess"] = "classify"
    hidden_share: float = 0.5


def rate_at(step: int, recipe: Recipe, last_step: int) -> float:
    """The share of recipe.learning_rate at a step, counted from 0."""
    warm = min(1.0, (step + 1) / max(1, recipe.warmup))
    if recipe.schedule == "rsqrt":
        return warm / math.sqrt(max(step + 1, recipe.warmup, 1))
    if recipe.schedule == "trapezoid":
        return min(warm, max(0.0, (last_step - step) / max(1, recipe.cooldown)))
    left = 1 - max(0, step - recipe.warmup) / max(1, last_step - recipe.warmup)
    if recipe.schedule == "cosine":
        return warm * (1 - math.cos(math.pi * max(0.0, left))) / 2
    return warm * (max(0.0, left) if recipe.schedule == "linear" else 1.0)


def _differences(known: dict[str, Any], given: dict[str, Any]) -> str:
    """Settings of a checkpoint that differ from the given ones of the same name; "" for none."""
    same = [name for name in given if name in known]
    return "; ".join(f"{name} {known[name]!r}, not {given[name]!r}" for name in same if known[name] != given[name])


def in_order(answers: Tensor) -> Tensor:
    """Logits (n, labels) by the number of their sample, which is the first column of (n, 1 + labels)."""
    return answers[answers[:, 0].argsort()][:, 1:]


def compile_around_attention(block: EncoderBlock) -> None:
    """Compiles a layer before and after its attention, once for all lengths; the layout of attention has one length."""
    attention = block.attention

    def before(x: Tensor, positions: Tensor | RotaryTable | None) -> tuple[Tensor, Tensor, Tensor]:
        return attention.project(block.attention_norm(x), positions)

    def after(x: Tensor, heads: Tensor) -> Tensor:
        x = x + block.dropout(attention.unite(heads))
        return x + block.dropout(block.dense(block.dense_norm(x)))

    fused_before, fused_after = torch.compile(before, dynamic=True), torch.compile(after, dynamic=True)

    def forward(x: Tensor, kv_lengths: Tensor | None = None, positions: Tensor | RotaryTable | None = None) -> Tensor:
        return fused_after(x, attention.attend(*fused_before(x, positions), kv_lengths))

    block.forward = forward  # type: ignore[method-assign]


class EarlyEnd(Callback):
    """Ends the training after a step, which is saved: past a time, and when it is interrupted (Ctrl-C, SIGTERM).

    at  a time of time.monotonic(); math.inf for none

    A second interrupt ends it at once. Lightning would validate first, and compile for that. Only the end of the whole
    training is validated.
    """

    def __init__(self, at: float) -> None:
        self.at, self.interrupted_at = at, math.inf
        self._handler: Any = None
        self._process = os.getpid()

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.at

    @property
    def is_interrupted(self) -> bool:
        return self.interrupted_at < math.inf

    def setup(self, trainer: Any, module: Any, stage: str) -> None:  # noqa: ARG002
        # Python allows handlers in its main thread only
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._interrupt)

    def on_train_start(self, trainer: Any, module: Any) -> None:  # noqa: ARG002
        # Lightning, which has set a handler since, would end without saving, with exit status 0; it resets this one too
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._interrupt)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:  # noqa: ARG002
        if self._handler is not None and signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, self._handler)

    def _interrupt(self, number: int, frame: Any) -> None:
        # a terminal interrupts the workers that load samples too, which inherit this handler
        if os.getpid() != self._process:
            return
        now = time.monotonic()
        if not self.is_interrupted:
            self.interrupted_at = now
            print("\ninterrupted: this step is the last, and is saved; a second time ends it at once", file=sys.stderr)
        # a terminal interrupts `recipe` too, which passes it on
        elif now > self.interrupted_at + SAME_INTERRUPT:
            signal.default_int_handler(number, frame)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        is_whole_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        is_due = self.is_late or self.is_interrupted
        # all processes stop at the same step
        if is_whole_step and trainer.strategy.reduce_boolean_decision(is_due, all=False):
            trainer.should_stop = True
            if trainer.global_step < trainer.max_steps:
                trainer.limit_val_batches = 0


class Experiment(lightning.LightningModule):
    """A model of a task, and how it is trained.

    task          a name in tasks.TASKS
    start         a checkpoint with initial weights: another resolution, an easier stage, self-pretraining
    is_compiled   whether layers are compiled, except their attention
    is_graphed    whether the forward and the backward of a training step are CUDA graphs, each launched by one call:
                  for images, whose batches have one shape, on one GPU
    """

    def __init__(
        self,
        task: str,
        architecture: Architecture | None = None,
        recipe: Recipe | None = None,
        *,
        start: Path | None = None,
        is_compiled: bool = False,
        is_graphed: bool = False,
    ) -> None:
        super().__init__()
        self.task = find(task)
        self.recipe = Recipe() if recipe is None else recipe
        self.start, self.is_compiled, self.is_graphed = start, is_compiled, is_graphed
        self.model = Classifier(self.task, Architecture() if architecture is None else architecture)
        # freezes the unused head, whose gradients several GPUs would wait for
        idle = self.model.guess if self.recipe.objective == "classify" else self.model.head
        idle.requires_grad_(False)
        self.validation_accuracy = MulticlassAccuracy(self.task.n_classes, average="micro")
        self.validation_loss = MeanMetric()
        self.answers, self.pair_answers = CatMetric("disable"), CatMetric("disable")
        self.result: Result | None = None
        # from the loaded checkpoint. record: facts about the training for the line of a test
        self.trained_steps, self._goes_on = 0, False
        self.record: dict[str, Any] = {"start": None, "samples": 0, "device_hours": 0.0}
        self.record |= {"samples_before": 0, "device_hours_before": 0.0}
        self._begin = 0.0
        self._streams: list[dict[str, Any]] | None = None

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The loss, and the logits of the labels for objective="classify"."""
        if self.recipe.objective == "guess":
            is_real = torch.arange(batch.tokens.shape[2], device=self.device) < batch.lengths[:, :, None]
            is_hidden = is_real & (torch.rand(batch.tokens.shape, device=self.device) < self.recipe.hidden_share)
            logits, truth = self.model.guess_hidden(batch.tokens, batch.lengths, is_hidden)
            return F.cross_entropy(logits.float(), truth), None
        logits = self.model(batch.tokens, batch.lengths)
        return F.cross_entropy(logits.float(), batch.labels), logits

    def training_step(self, batch: Batch) -> Tensor:
        loss, _ = self.loss(batch)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch) -> None:
        # leaves the random streams of training unchanged
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(0)
            loss, logits = self.loss(batch)
        self.validation_loss.update(loss, len(batch.labels))
        self.log("validation_loss", self.validation_loss, prog_bar=True)
        if logits is not None:
            self.validation_accuracy.update(logits, batch.labels)
            self.log("validation_accuracy", self.validation_accuracy, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:  # noqa: ARG002 - Lightning's
        answers = self.answers if dataloader_idx == 0 else self.pair_answers
        logits = self.model(batch.tokens, batch.lengths).float()
        answers.update(torch.cat([batch.places[:, None].to(logits), logits], dim=1))

    def on_test_epoch_end(self) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        result = score(data, in_order(self.answers.compute()).argmax(dim=1).cpu().numpy())
        self.answers.reset()
        if "pairs" in data.rows:
            logits = in_order(self.pair_answers.compute())
            scores = (logits[:, 1] - logits[:, 0]).unflatten(0, (-1, 4))
            result = replace(result, pair_accuracy=pair_accuracy(scores.cpu().numpy()))
            self.pair_answers.reset()
        self.result = result
        numbers = {name: getattr(result, name) for name in ("accuracy", "floor", "balanced", "pair_accuracy")}
        self.log_dict({name: number for name, number in numbers.items() if number is not None}, sync_dist=True)
        if self.trainer.is_global_zero:
            print(result)

    def test_facts(self) -> dict[str, Any]:
        """The keys of a test's line that Result lacks: data, model, training and device."""
        data, architecture = self.trainer.datamodule, self.model.architecture  # type: ignore[attr-defined]
        samples = data.batch_size * self.trainer.accumulate_grad_batches
        # not self.device: after a test the weights are back on the CPU
        device, tested = self.trainer.strategy.root_device, self.trainer.ckpt_path
        return {
            **self.record, "checkpoint": None if tested is None else digest(Path(tested)),
            "is_lra": belongs(data), "source": data.source, "test_seed": data.test_seed,
            "mask": architecture.mask, "keys": keys_per_query(architecture, self.task.length),
            "n_layers": architecture.n_layers, "embed_dim": architecture.embed_dim,
            "weights": sum(weight.numel() for weight in self.model.parameters()),
            "steps": self.trained_steps, "batch_size": samples, "device": measure.device_name(device),
        }  # fmt: skip

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        recipe, steps = self.recipe, self.trainer.max_steps
        last_step = steps if recipe.last_step is None else recipe.last_step
        if last_step < steps:
            raise ValueError(f"last_step must be at least trainer.max_steps, {steps}, got {last_step}")
        if recipe.schedule in ("cosine", "linear", "trapezoid") and last_step < 1:
            raise ValueError(f"schedule={recipe.schedule!r} ends at the last step: set trainer.max_steps")
        optimizer = torch.optim.AdamW(
            [weight for weight in self.parameters() if weight.requires_grad], lr=recipe.learning_rate,
            betas=recipe.betas, eps=recipe.eps, weight_decay=recipe.weight_decay,
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, recipe, last_step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_fit_start(self) -> None:
        self._begin = time.monotonic()
        if self.is_graphed:
            self._check_can_be_graphed()
        if self.is_compiled:
            self._compile()
        # a resumed checkpoint has its own weights; global_step is not restored yet
        if self.start is not None and not self._goes_on:
            self._load_start(self.start)
        if self.is_graphed:
            self._capture()

    def _load_start(self, start: Path) -> None:
        found = saved.load(start, ("record", "state_dict", "task"))
        self.record["start"] = digest(start)
        for name in ("samples", "device_hours"):
            self.record[f"{name}_before"] = found["record"][name] + found["record"][f"{name}_before"]
        weights = {name.removeprefix("model."): weight for name, weight in found["state_dict"].items()}
        fresh = load_fitting(self.model, weights)
        print(f"weights of {start}, of {found['task']}; new: {', '.join(fresh) or 'none'}")

    def _compile(self) -> None:
        for block in dict.fromkeys(self.model.encoder.blocks):
            assert isinstance(block, EncoderBlock)
            if self.task.grid is None:
                compile_around_attention(block)
            else:
                # images have a fixed length; equal layers share compiled code
                block.compile(dynamic=False)

    def _check_can_be_graphed(self) -> None:
        stages = self.trainer.datamodule.rules.stages  # type: ignore[attr-defined]
        odd = {
            f"{self.device.type} device": self.device.type != "cuda",
            f"{self.trainer.world_size} GPUs": self.trainer.world_size > 1,
            f"task {self.task.name}, whose batches differ in length": self.task.grid is None,
            "stages with a batch_size of their own": any(stage.batch_size is not None for stage in stages),
            f"objective={self.recipe.objective!r}": self.recipe.objective != "classify",
            # a graph writes its gradients where those of the batch before lie
            "trainer.accumulate_grad_batches > 1": self.trainer.accumulate_grad_batches > 1,
        }
        if found := [what for what, is_odd in odd.items() if is_odd]:
            raise ValueError(
                "is_graphed needs one CUDA GPU, batches of a fixed shape and one batch per step, got "
                f"{', '.join(found)}; set --model.is_graphed false"
            )

    def _capture(self) -> None:
        """Replaces the model's forward in training; in evaluation, which has smaller batches, it stays as it was."""
        shape = self.trainer.datamodule.batch_size, self.task.n_documents  # type: ignore[attr-defined]
        tokens = torch.zeros(*shape, self.task.length, dtype=torch.uint8, device=self.device)
        lengths = torch.full(shape, self.task.length, dtype=torch.int32, device=self.device)
        with self.trainer.precision_plugin.forward_context():
            # copies of weights that autocast keeps would never be made again from the trained weights
            has_autocast = torch.is_autocast_enabled("cuda")
            with torch.autocast("cuda", enabled=has_autocast, cache_enabled=False):
                torch.cuda.make_graphed_callables(self.model, (tokens, lengths))

    def _settings(self, step: int, data: LraData) -> dict[str, Any]:
        """What must not change when a training resumes. samples: in the steps before `step`."""
        recipe = self.recipe
        settings = {**asdict(self.model.architecture), **asdict(recipe)}
        if recipe.schedule not in ("rsqrt", "constant") and recipe.last_step is None:
            settings["last_step"] = self.trainer.max_steps
        settings |= {"task": self.task.name, "source": data.source, "data_seed": data.seed, "rules": asdict(data.rules)}
        if data.source != "fresh":
            settings["training_samples"] = data.sizes.train
        settings |= {"n_together": data.n_together, "gradient_clip_val": self.trainer.gradient_clip_val}
        settings |= {"seed": data.order_seed, "augmentation": data.augmentation}
        # of released files, known once they are read
        if data.source in ("fresh", "generated") or "train" in data.rows:
            settings["samples"] = data.samples(step)
        return settings

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # no further step can change that, and later stages would begin with them
        if not all(weight.isfinite().all() for weight in self.parameters()):
            raise ValueError(
                f"the weights are not finite after step {self.global_step}, and are not saved: a lower "
                "model.recipe.learning_rate or another seed may help; the last checkpoint, if any, is of earlier steps"
            )
        data, hours = self.trainer.datamodule, (time.monotonic() - self._begin) / 3600  # type: ignore[attr-defined]
        checkpoint["task"], checkpoint["settings"] = self.task.name, self._settings(self.global_step, data)
        checkpoint["architecture"] = asdict(self.model.architecture)
        checkpoint["record"] = {
            **self.record, "seed": data.order_seed, "recipe": asdict(self.recipe),
            "samples": checkpoint["settings"]["samples"],
            "device_hours": self.record["device_hours"] + hours * self.trainer.world_size,
        }  # fmt: skip
        # called on every process; one of them writes
        streams = [{"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}]
        if self.trainer.world_size > 1:
            gathered: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(gathered, streams[0])
            streams = gathered
        checkpoint["streams"] = streams

    def check_checkpoint(self, checkpoint: dict[str, Any], data: LraData, stage: TrainerFn | None) -> None:
        """ValueError if a checkpoint cannot be continued (FITTING) or tested (TESTING) with these settings."""
        if stage == TrainerFn.FITTING:
            if "streams" not in checkpoint:
                raise ValueError(
                    "ckpt_path must be the checkpoint of a training, got kept weights, from which none can continue: "
                    "model.start begins with them"
                )
            step = checkpoint["global_step"]
            if odd := _differences(checkpoint.get("settings", {}), self._settings(step, data)):
                raise ValueError(
                    f"the checkpoint to resume was trained with other settings in its {step} steps: {odd}. "
                    "Set these, or choose another trainer.default_root_dir, or remove the checkpoint to begin anew"
                )
        elif stage == TrainerFn.TESTING:
            # the line of the test names those of this model
            known = {"task": checkpoint.get("task", self.task.name), **checkpoint.get("architecture", {})}
            given = {"task": self.task.name, **asdict(self.model.architecture)}
            if odd := _differences(known, {name: value for name, value in given.items() if name not in ONLY_TRAINED}):
                raise ValueError(f"the checkpoint to test was trained with other settings: {odd}. Set these")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        stage = self.trainer.state.fn
        self.check_checkpoint(checkpoint, self.trainer.datamodule, stage)  # type: ignore[attr-defined]
        self._streams = checkpoint["streams"] if stage == TrainerFn.FITTING else None
        self.record = checkpoint["record"]
        self.trained_steps, self._goes_on = checkpoint["global_step"], True

    def on_train_start(self) -> None:
        # restores the random streams of dropout and hidden tokens right before the first step
        if self._streams is None:
            return
        if len(self._streams) != self.trainer.world_size:
            rank_zero_warn(
                f"the checkpoint has the random numbers of {len(self._streams)} processes, but there are "
                f"{self.trainer.world_size}: dropout and hidden tokens will be others than without the interruption"
            )
        else:
            streams = self._streams[self.trainer.global_rank]
            torch.set_rng_state(streams["cpu"].cpu())
            for device, state in enumerate(streams["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state.cpu(), device)
        self._streams = None

    def on_train_epoch_end(self) -> None:
        # saves the last step, before averaged weights replace the training weights
        is_last = self.trainer.should_stop or self.global_step == self.trainer.max_steps
        keeper = self.trainer.checkpoint_callback
        if is_last and isinstance(keeper, ModelCheckpoint) and keeper.save_last and keeper.dirpath is not None:
            last = Path(keeper.dirpath) / f"{keeper.CHECKPOINT_NAME_LAST}{keeper.FILE_EXTENSION}"
            self.trainer.save_checkpoint(last)
            # otherwise the callback would overwrite this checkpoint with the averaged weights
            keeper._last_checkpoint_saved = str(last)
