"""Initializes a model with the weights of another resolution, length or head."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Classifier

POSITIONS = "positions.weight"
Growth = Literal["tile", "interpolate"]


def grown(weight: Tensor, old: tuple[int, int], new: tuple[int, int], growth: Growth) -> Tensor:
    """Learned positions of a grid, (height * width, embed_dim), extended to the larger grid `new`.

    growth  "tile": the grid is repeated, as FlashAttention grows Path-64 into Path-X; "interpolate": bilinearly
    """
    grid = weight.unflatten(0, old)
    if growth == "tile":
        repeats = [-(-large // small) for large, small in zip(new, old, strict=True)]
        return grid.repeat(*repeats, 1)[: new[0], : new[1]].flatten(0, 1)
    stretched = F.interpolate(grid.permute(2, 0, 1)[None], size=new, mode="bilinear", align_corners=False)
    return stretched[0].permute(1, 2, 0).flatten(0, 1)


def _fitted_positions(weight: Tensor, model: Classifier, old: tuple[int, int] | None, growth: Growth) -> Tensor:
    new = model.task.grid
    if old is None or new is None:
        raise ValueError(
            f"positions for {len(weight)} tokens do not fit {model.task.name!r}, and only those of images can grow"
        )
    n_extra = len(weight) - old[0] * old[1]
    if n_extra != (model.cls is not None):
        raise ValueError("a class token of one model and none of the other: pooling must be cls in both or neither")
    return torch.cat([weight[:n_extra], grown(weight[n_extra:], old, new, growth)])


def carry_over(
    model: Classifier, weights: dict[str, Tensor], *, grid: tuple[int, int] | None, growth: Growth = "tile"
) -> list[str]:
    """Loads the weights that fit into `model`; returns the names of those that keep their initial values.

    weights  the state dict of a Classifier
    grid     of that model's task
    raises   ValueError for a weight of the encoder with another shape: another architecture
    """
    own = model.state_dict()
    fitting = {name: weight for name, weight in weights.items() if name in own}
    if POSITIONS in fitting and fitting[POSITIONS].shape != own[POSITIONS].shape:
        fitting[POSITIONS] = _fitted_positions(fitting[POSITIONS], model, grid, growth)
    for name, weight in list(fitting.items()):
        if weight.shape == own[name].shape:
            continue
        if name.split(".")[0] not in ("head", "guess", "tokens"):
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, but {tuple(own[name].shape)} is needed")
        # labels and symbols differ between tasks
        del fitting[name]
    model.load_state_dict(fitting, strict=False)
    return sorted(own.keys() - fitting.keys())
