"""Accuracy of each task's shortcut (its floor), and accuracies corrected for it.
In Pathfinder the two snakes begin near each other and near the centre, so the positions of the markers alone predict
the label better than chance. Results therefore have the floor, the accuracy of the best reader of the shortcut on the
same test set, and a balanced accuracy, with weights under which the shortcut has only chance accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import listops
from .pathfinder import N_CLASSES

# training of the marker reader
WIDTH, EPOCHS, BATCH, LEARNING_RATE = 128, 60, 512, 3e-3
# minimum of training steps
LEAST_STEPS = 500


@dataclass(frozen=True)
class Result:
    """Result of a test; accuracies are shares of 1.

    floor     accuracy of the shortcut on the same samples
    balanced  accuracy with weights under which the shortcut has accuracy `chance`
    n         samples
    data      their origin
    pair_accuracy  on counterfactual pairs, or None
    """

    task: str
    accuracy: float
    floor: float
    floor_name: str
    balanced: float
    chance: float
    n: int
    data: str
    pair_accuracy: float | None = None

    @property
    def standard_error(self) -> float:
        return (self.accuracy * (1 - self.accuracy) / self.n) ** 0.5

    def __str__(self) -> str:
        pairs = "" if self.pair_accuracy is None else f", pairs {self.pair_accuracy:.1%}"
        return (
            f"{self.task}: accuracy {self.accuracy:.1%} (+- {self.standard_error:.1%}), "
            f"floor {self.floor:.1%} ({self.floor_name}), "
            f"balanced accuracy {self.balanced:.1%} (chance {self.chance:.0%}){pairs}; {self.n} samples, {self.data}"
        )


def weighted_accuracy(is_right: np.ndarray, weights: np.ndarray) -> float:
    """Share of the weight of right answers. is_right bool (n,), weights (n,)."""
    return float((is_right * weights).sum() / weights.sum())


def root_operator_weights(roots: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """float64 (n,): equal weight for every pair of root operator and label, so that the root has chance accuracy.

    roots  first token of each sample (n,); labels (n,)
    """
    cells = roots.astype(np.int64) * listops.N_CLASSES + labels
    _, cell, counts = np.unique(cells, return_inverse=True, return_counts=True)
    return 1.0 / counts[cell]


def marker_features(markers: Tensor, size: int) -> Tensor:
    """Positions, differences and distance of two markers relative to the image: (n, 2, 2) to float32 (n, 7)."""
    places = markers.float() / size
    between = places[:, 1] - places[:, 0]
    return torch.cat([places.flatten(1), between, between.norm(dim=1, keepdim=True)], dim=1)


class MarkerReader(nn.Module):
    """Probability of label 1, (n,), from two unordered positions, (n, 2, 2)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.layers = nn.Sequential(
            nn.Linear(7, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, N_CLASSES - 1)
        )

    def logits(self, markers: Tensor) -> Tensor:
        return self.layers(marker_features(markers, self.size)).squeeze(1)

    def forward(self, markers: Tensor) -> Tensor:
        return torch.sigmoid((self.logits(markers) + self.logits(markers.flip(1))) / 2)


def fit_marker_reader(markers: np.ndarray, labels: np.ndarray, *, size: int, seed: int = 0) -> MarkerReader:
    """A MarkerReader trained on int (n, 2, 2) and labels (n,); tens of thousands of samples take half a minute."""
    # called from tests, which disable gradients
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        places, truth = torch.as_tensor(markers.astype(np.float32)), torch.as_tensor(labels.astype(np.float32))
        reader = MarkerReader(size)
        n_batches = max(1, len(places) // BATCH)
        epochs = max(EPOCHS, -(-LEAST_STEPS // n_batches))
        optimizer = torch.optim.Adam(reader.parameters(), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * n_batches)
        for _ in range(epochs):
            for batch in torch.randperm(len(places)).tensor_split(n_batches):
                is_swapped = torch.rand(len(batch), 1, 1) < 0.5
                seen = torch.where(is_swapped, places[batch].flip(1), places[batch])
                loss = F.binary_cross_entropy_with_logits(reader.logits(seen), truth[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return reader.eval()


@torch.no_grad()
def marker_probabilities(reader: MarkerReader, markers: np.ndarray) -> np.ndarray:
    """float64 (n,): the reader's probability of label 1."""
    return reader(torch.as_tensor(markers.astype(np.float32))).double().numpy()


def marker_floor(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The reader's accuracy."""
    return float(((probabilities > 0.5) == labels).mean())


def marker_weights(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """float64 (n,), 0 to 1: min(1, (1 - p) / p), with p the reader's probability of the true label.

    Among samples with equal markers both labels have equal weight, so the markers have chance accuracy.
    """
    truth = np.where(labels == 1, probabilities, 1 - probabilities)
    return np.minimum(1.0, (1 - truth) / np.maximum(truth, 1e-12))


def pair_accuracy(scores: np.ndarray) -> float:
    """How often a positive version scores higher than a negative one of the same image; a tie counts half.

    scores  (n, 4): scores of label 1, in the order of pathfinder.generate(is_counterfactual=True)
    """
    positive, negative = scores[:, [0, 3]][:, :, None], scores[:, [1, 2]][:, None, :]
    return float(((positive > negative) + 0.5 * (positive == negative)).mean())
