"""Accuracy of each task's shortcut (its floor), and accuracies corrected for it.

In Pathfinder the two snakes begin near each other and near the center, so the positions of the markers alone predict
the label better than chance. Results therefore have the floor, the accuracy of the best reader of the shortcut on the
same test set, and a balanced accuracy, with weights under which the shortcut has only chance accuracy.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import paddles

# training of the marker reader
WIDTH, EPOCHS, BATCH, LEARNING_RATE = 128, 60, 512, 3e-3
# minimum of training steps
MIN_STEPS = 500


def best_guess(groups: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """The best accuracy from the group alone, and weights under which every pair of group and label weighs the same.

    groups, labels  whole numbers (n,), such as the root operators of expressions and their values
    """
    counts = np.zeros((groups.max() + 1, labels.max() + 1))
    np.add.at(counts, (groups, labels), 1)
    return float(counts.max(axis=1).sum() / len(labels)), 1 / counts[groups, labels]


class MarkerReader(nn.Sequential):
    """Logit of label 1, (n,), from two positions, (n, 2, 2); it is trained with either position first."""

    def __init__(self, size: int) -> None:
        super().__init__(nn.Linear(7, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        self.size = size

    def forward(self, markers: Tensor) -> Tensor:
        """From positions, differences and distance relative to the image."""
        places = markers / self.size
        between = places[:, 1] - places[:, 0]
        features = torch.cat([places.flatten(1), between, between.norm(dim=1, keepdim=True)], dim=1)
        return super().forward(features).squeeze(1)


def fit_marker_reader(markers: np.ndarray, labels: np.ndarray, *, size: int, seed: int = 0) -> MarkerReader:
    """A MarkerReader trained on int (n, 2, 2) and labels (n,); tens of thousands of samples take half a minute."""
    # called from tests, which disable gradients
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        places, truth = torch.as_tensor(markers.astype(np.float32)), torch.as_tensor(labels.astype(np.float32))
        reader = MarkerReader(size)
        n_batches = max(1, len(places) // BATCH)
        epochs = max(EPOCHS, -(-MIN_STEPS // n_batches))
        optimizer = torch.optim.Adam(reader.parameters(), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * n_batches)
        for _ in range(epochs):
            for batch in torch.randperm(len(places)).tensor_split(n_batches):
                is_swapped = torch.rand(len(batch), 1, 1) < 0.5
                seen = torch.where(is_swapped, places[batch].flip(1), places[batch])
                loss = F.binary_cross_entropy_with_logits(reader(seen), truth[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return reader.eval()


@torch.no_grad()
def marker_probabilities(reader: MarkerReader, markers: np.ndarray) -> np.ndarray:
    """float64 (n,): the reader's probability of label 1, the mean of both orders of the positions."""
    places = torch.as_tensor(markers.astype(np.float32))
    return torch.sigmoid((reader(places) + reader(places.flip(1))) / 2).double().numpy()


def marker_weights(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """float64 (n,), 0 to 1: min(1, (1 - p) / p), with p the reader's probability of the true label.

    Among samples with equal markers both labels have equal weight, so the markers have chance accuracy.
    """
    truth = np.where(labels == 1, probabilities, 1 - probabilities)
    return np.minimum(1.0, (1 - truth) / np.maximum(truth, 1e-12))


def find_markers(images: np.ndarray, *, radius: float) -> np.ndarray:
    """int16 (n, 2, 2): positions (y, x) of the markers in images uint8 (n, H, W), the better match first.

    radius  of a marker, see pathfinder.PRESETS
    """
    disc = torch.from_numpy(paddles.marker(radius))
    is_ink, half = (disc > 0.5).float(), disc.shape[0] // 2
    # an even kernel, whose center is pixel (half, half); outside the image is black
    padded = F.pad(torch.from_numpy(images)[:, None] / 255, (half, half - 1, half, half - 1))
    squares = F.conv2d(padded**2, is_ink[None, None])
    products = F.conv2d(padded, (is_ink * disc)[None, None])
    # mean squared difference to the disc at each pixel
    misfit = ((squares - 2 * products + (is_ink * disc**2).sum()) / is_ink.sum())[:, 0]
    height, width = misfit.shape[1:]
    y, x = torch.arange(height)[:, None], torch.arange(width)
    found = []
    for _ in range(2):
        best = misfit.flatten(1).argmin(dim=1)
        place = torch.stack([best // width, best % width], dim=1)
        found.append(place)
        # excludes shifted matches of the same disc
        distance = (y - place[:, 0, None, None]) ** 2 + (x - place[:, 1, None, None]) ** 2
        misfit = misfit.masked_fill(distance <= (half - 4) ** 2, torch.inf)
    return torch.stack(found, dim=1).short().numpy()


def pair_accuracy(scores: np.ndarray) -> float:
    """How often a positive version scores higher than a negative one of the same image; a tie counts half.

    scores  (n, 4): scores of label 1, in the order of pathfinder.generate(is_counterfactual=True)
    """
    positive, negative = scores[:, [0, 3]][:, :, None], scores[:, [1, 2]][:, None, :]
    return float(((positive > negative) + 0.5 * (positive == negative)).mean())
