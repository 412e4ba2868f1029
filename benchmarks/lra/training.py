"""Training and testing with Lightning: objectives, learning rates, and checkpoints that resume exactly."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.utilities.data import dim_zero_cat

from blocksparse_flash.nn import EncoderBlock

from ..run import measure
from .batches import Batch
from .compiling import compile_around_attention, compile_whole
from .floors import Result, pair_accuracy
from .model import Architecture, Classifier
from .scoring import belongs, score
from .tasks import find
from .transfer import Growth, carry_over


@dataclass(frozen=True)
class Recipe:
    """How the weights are found.

    schedule      after a linear warm-up of `warmup` steps: "cosine" or "linear" to 0 at the trainer's last step, "rsqrt"
                  (the rate is learning_rate / sqrt(step), as in Long Range Arena), "constant", or "trapezoid", which is
                  constant, then linear to 0 during the last `cooldown` steps
    hidden_share  of the tokens hidden from self-pretraining, objective="guess"
    """

    learning_rate: float = 1e-3
    schedule: Literal["cosine", "linear", "rsqrt", "constant", "trapezoid"] = "cosine"
    warmup: int = 500
    cooldown: int = 0
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


class Answers(Metric):
    """The logits of each sample of a test, (n, labels), in the order of the samples, gathered from all processes."""

    places: list[Tensor]
    logits: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("places", default=[], dist_reduce_fx="cat")
        self.add_state("logits", default=[], dist_reduce_fx="cat")

    def update(self, places: Tensor, logits: Tensor) -> None:
        self.places.append(places)
        self.logits.append(logits.float())

    def compute(self) -> Tensor:
        # synchronised lists are one tensor already
        return dim_zero_cat(self.logits)[dim_zero_cat(self.places).argsort()]


class Experiment(lightning.LightningModule):
    """A model of a task, and how it is trained.

    task          a name of tasks.TASKS
    architecture  of the model
    recipe        of the training
    start         a checkpoint of another experiment whose weights this one begins with: another resolution, an easier
                  stage, self-pretraining
    growth        of learned positions that come from a smaller image: "tile" or "interpolate"
    is_compiled   whether torch.compile fuses what a layer does around its attention
    """

    def __init__(
        self,
        task: str,
        architecture: Architecture | None = None,
        recipe: Recipe | None = None,
        *,
        start: Path | None = None,
        growth: Growth = "tile",
        is_compiled: bool = False,
    ) -> None:
        super().__init__()
        self.task = find(task)
        self.recipe = Recipe() if recipe is None else recipe
        self.start, self.growth, self.is_compiled = start, growth, is_compiled
        self.model = Classifier(self.task, Architecture() if architecture is None else architecture)
        # what the objective does not ask is not trained, and several GPUs do not wait for its gradients
        idle = self.model.guess if self.recipe.objective == "classify" else self.model.head
        idle.requires_grad_(False)
        self.validation_accuracy = MulticlassAccuracy(self.task.n_classes, average="micro")
        self.validation_loss = MeanMetric()
        self.answers, self.pair_answers = Answers(), Answers()
        self.result: Result | None = None
        # of the checkpoint that the weights come from
        self.trained_steps, self._goes_on = 0, False
        self._streams: list[dict[str, Any]] | None = None

    def _hidden(self, batch: Batch) -> Tensor:
        is_real = torch.arange(batch.tokens.shape[2], device=self.device) < batch.lengths[:, :, None]
        return is_real & (torch.rand(batch.tokens.shape, device=self.device) < self.recipe.hidden_share)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The loss, and the logits of the labels if those were asked for."""
        if self.recipe.objective == "guess":
            is_hidden = self._hidden(batch)
            logits = self.model.guess_hidden(batch.tokens, batch.lengths, is_hidden)
            return F.cross_entropy(logits.float(), self.model.hidden_tokens(batch.tokens, is_hidden)), None
        logits = self.model(batch.tokens, batch.lengths)
        return F.cross_entropy(logits.float(), batch.labels), logits

    def training_step(self, batch: Batch) -> Tensor:
        loss, _ = self.loss(batch)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch) -> None:
        # the streams of random numbers belong to training
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
        answers.update(batch.places, self.model(batch.tokens, batch.lengths))

    def on_test_epoch_end(self) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        result = score(data, self.answers.compute().argmax(dim=1).cpu().numpy())
        self.answers.reset()
        if "pairs" in data.rows:
            logits = self.pair_answers.compute()
            scores = (logits[:, 1] - logits[:, 0]).unflatten(0, (-1, 4))
            result = replace(result, pair_accuracy=pair_accuracy(scores.cpu().numpy()))
            self.pair_answers.reset()
        self.result = result
        numbers = {name: getattr(result, name) for name in ("accuracy", "floor", "balanced", "pair_accuracy")}
        self.log_dict({name: number for name, number in numbers.items() if number is not None}, sync_dist=True)
        if self.trainer.is_global_zero:
            print(result)

    def test_facts(self) -> dict[str, Any]:
        """What a line of results says of a test beside its Result: the data, the model, how long it was trained, where."""
        data, architecture = self.trainer.datamodule, self.model.architecture  # type: ignore[attr-defined]
        samples = data.batch_size * self.trainer.accumulate_grad_batches
        # not self.device: after a test the weights are back on the CPU
        device = self.trainer.strategy.root_device
        return {
            "is_lra": belongs(data), "source": data.source, "mask": architecture.mask, "n_layers": architecture.n_layers,
            "embed_dim": architecture.embed_dim, "weights": sum(weight.numel() for weight in self.model.parameters()),
            "steps": self.trained_steps, "batch_size": samples, "device": measure.device_name(device),
        }  # fmt: skip

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        recipe, last_step = self.recipe, self.trainer.max_steps
        if recipe.schedule in ("cosine", "linear", "trapezoid") and last_step < 1:
            raise ValueError(f"schedule={recipe.schedule!r} ends at the last step: set trainer.max_steps")
        optimizer = torch.optim.AdamW(
            [weight for weight in self.parameters() if weight.requires_grad],
            lr=recipe.learning_rate,
            betas=recipe.betas,
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, recipe, last_step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_fit_start(self) -> None:
        if self.is_compiled:
            self._compile()
        # a checkpoint that training goes on from has its own weights; which step it has reached is not known yet
        if self.start is None or self._goes_on:
            return
        found = torch.load(self.start, map_location="cpu", weights_only=True)
        weights = {name.removeprefix("model."): weight for name, weight in found["state_dict"].items()}
        fresh = carry_over(self.model, weights, grid=find(found["task"]).grid, growth=self.growth)
        print(f"weights of {self.start}, of {found['task']}; new: {', '.join(fresh) or 'none'}")

    def _compile(self) -> None:
        # an image has always as many tokens
        fuse = compile_around_attention if self.task.grid is None else compile_whole
        for block in dict.fromkeys(self.model.encoder.blocks):
            assert isinstance(block, EncoderBlock)
            fuse(block)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["task"] = self.task.name
        checkpoint["architecture"] = asdict(self.model.architecture)
        # every process comes here, and one of them writes
        streams = [{"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}]
        if self.trainer.world_size > 1:
            gathered: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(gathered, streams[0])
            streams = gathered
        checkpoint["streams"] = streams

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._streams = checkpoint["streams"]
        self.trained_steps, self._goes_on = checkpoint["global_step"], True

    def on_train_start(self) -> None:
        # the last thing before the first step: dropout and hidden tokens go on where they were
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
        # the last step need not be one after which a checkpoint is due; after this hook averaged weights take the place of
        # those that training goes on with
        is_last = self.trainer.should_stop or self.global_step == self.trainer.max_steps
        keeper = self.trainer.checkpoint_callback
        if is_last and isinstance(keeper, ModelCheckpoint) and keeper.save_last and keeper.dirpath is not None:
            last = Path(keeper.dirpath) / f"{keeper.CHECKPOINT_NAME_LAST}{keeper.FILE_EXTENSION}"
            self.trainer.save_checkpoint(last)
            # a keeper that has saved nothing itself would write the averaged weights over them after the last hook
            keeper._last_checkpoint_saved = str(last)
