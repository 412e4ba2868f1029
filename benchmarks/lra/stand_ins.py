"""Synthetic stand-ins for Text, Retrieval and Image where their files are missing.

They are NOT Long Range Arena: they show that a model runs and learns, and their accuracies are not comparable with
published ones. Sample n of a split is a function of (seed, split, n).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

import numpy as np

from .released import Example
from .tasks import Task

WARNING = "synthetic stand-in, not Long Range Arena"
# symbols of the synthetic language, and the order of its Markov chains
ALPHABET, ORDER = 16, 3
FIRST_LETTER = ord("a") + 1
N_SHAPES, SIDE = 10, 32


def _generator(*names: object) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(str(name).encode()) for name in names])


def _chain(language: int, seed: int) -> np.ndarray:
    """float64 (ALPHABET ** ORDER, ALPHABET): cumulative probabilities of the next symbol of a language."""
    weights = _generator("chain", seed, language).dirichlet(np.full(ALPHABET, 0.3), size=ALPHABET**ORDER)
    return weights.cumsum(axis=1)


def _document(chain: np.ndarray, length: int, generator: np.random.Generator) -> np.ndarray:
    state, letters = int(generator.integers(ALPHABET**ORDER)), np.empty(length, dtype=np.int16)
    for place, draw in enumerate(generator.random(length).tolist()):
        letter = min(int(np.searchsorted(chain[state], draw, side="right")), ALPHABET - 1)
        letters[place] = FIRST_LETTER + letter
        state = (state * ALPHABET + letter) % ALPHABET**ORDER
    return letters


def _text(chains: list[np.ndarray], length: int, generator: np.random.Generator) -> Example:
    """The label is the Markov chain, of two, that generated the document."""
    label = int(generator.integers(2))
    n_letters = int(generator.integers(length // 2, length + 1))
    return Example((_document(chains[label], n_letters, generator),), label)


def _retrieval(chains: list[np.ndarray], length: int, generator: np.random.Generator) -> Example:
    """Label 1 if one Markov chain of four generated both documents, which then share a key."""
    label = int(generator.integers(2))
    first = int(generator.integers(4))
    second = first if label else (first + int(generator.integers(1, 4))) % 4
    documents = [_document(chains[language], length, generator) for language in (first, second)]
    keys = generator.integers(0, 256, (2, 8)).astype(np.int16) + 1
    for document, key in zip(documents, keys[[0, 0]] if label else keys, strict=True):
        begin = int(generator.integers(length - len(key) + 1))
        document[begin : begin + len(key)] = key
    return Example(tuple(documents), label)


def _image(generator: np.random.Generator) -> Example:
    """uint8 (1024,): one of ten outlines r(angle), moved, scaled, turned and noisy."""
    y, x = np.mgrid[:SIDE, :SIDE]
    label = int(generator.integers(N_SHAPES))
    # labels 0 .. 4 have round lobes, 5 .. 9 pointed ones; their number is 2 .. 6
    lobes, is_pointed = label % 5 + 2, label >= 5
    center, turn = generator.uniform(12, 20, size=2), generator.uniform(0, 2 * np.pi)
    angle = np.arctan2(y - center[0], x - center[1]) * lobes + turn
    wave = 2 * np.abs((angle / (2 * np.pi)) % 1 - 0.5) if is_pointed else (1 + np.cos(angle)) / 2
    radius = generator.uniform(7, 11) * (0.4 + 0.6 * wave)
    is_inside = np.hypot(y - center[0], x - center[1]) < radius
    dark, bright = generator.uniform(20, 90), generator.uniform(150, 230)
    pixels = np.where(is_inside, bright, dark) + generator.normal(0, 12, size=(SIDE, SIDE))
    return Example((np.clip(pixels, 0, 255).astype(np.uint8).reshape(-1),), label)


def load(task: Task, split: str, count: int, *, seed: int = 0) -> list[Example]:
    """The stand-in for a split of Text, Retrieval or Image."""
    kind = task.name.removesuffix("-4096")
    draw: Callable[[np.random.Generator], Example]
    if kind == "text":
        draw = functools.partial(_text, [_chain(language, seed) for language in range(2)], task.length)
    elif kind == "retrieval":
        draw = functools.partial(_retrieval, [_chain(language, seed) for language in range(4)], task.length)
    elif kind == "image":
        draw = _image
    else:
        raise ValueError(f'task {task.name!r} has no stand-in: source="generated" makes it by its rules')
    return [draw(_generator(kind, seed, split, place)) for place in range(count)]
