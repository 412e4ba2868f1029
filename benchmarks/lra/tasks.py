"""Tasks of Long Range Arena: vocabularies, classes, lengths, grids and split sizes."""

from __future__ import annotations

from dataclasses import dataclass

from . import listops, pathfinder


@dataclass(frozen=True)
class Sizes:
    """Samples of each split. pairs: images of Pathfinder that are also tested with all four pairs of markers."""

    train: int
    validation: int
    test: int
    pairs: int = 0


@dataclass(frozen=True)
class Task:
    """A task of Long Range Arena.

    name        as on the command line
    n_tokens    vocabulary, including padding
    n_classes   labels
    length      tokens of a document, after padding
    n_documents  1; 2 for Retrieval
    sizes       in Long Range Arena
    grid        (height, width) of an image, or None
    """

    name: str
    n_tokens: int
    n_classes: int
    length: int
    sizes: Sizes
    n_documents: int = 1
    grid: tuple[int, int] | None = None


_IMAGES = Sizes(160_000, 20_000, 20_000, pairs=1_000)
TASKS = {
    task.name: task
    for task in (
        Task("listops", listops.N_TOKENS, listops.N_CLASSES, 2000, Sizes(96_000, 2_000, 2_000)),
        # not Long Range Arena's: shorter expressions, for trials
        Task("listops-small", listops.N_TOKENS, listops.N_CLASSES, 257, Sizes(20_000, 1_000, 1_000)),
        # 1000 bytes in the official configuration, 4096 in the paper
        Task("text", 257, 2, 1000, Sizes(25_000, 25_000, 25_000)),
        Task("text-4096", 257, 2, 4096, Sizes(25_000, 25_000, 25_000)),
        Task("retrieval", 257, 2, 4000, Sizes(147_086, 18_090, 17_437), n_documents=2),
        Task("image", 256, 10, 1024, Sizes(45_000, 5_000, 10_000), grid=(32, 32)),
        Task("pathfinder32", 256, pathfinder.N_CLASSES, 32 * 32, _IMAGES, grid=(32, 32)),
        Task("pathfinder64", 256, pathfinder.N_CLASSES, 64 * 64, _IMAGES, grid=(64, 64)),
        Task("pathx", 256, pathfinder.N_CLASSES, 128 * 128, _IMAGES, grid=(128, 128)),
        Task("path256", 256, pathfinder.N_CLASSES, 256 * 256, _IMAGES, grid=(256, 256)),
    )
}


# the tasks with published numbers, and Path-256, which FlashAttention added
LRA = ("listops", "text", "text-4096", "retrieval", "image", "pathfinder32", "pathx", "path256")


def find(name: str) -> Task:
    """The task of that name, or a ValueError that lists the names."""
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]


def check_seed(name: str, seed: int) -> None:
    """ValueError unless NumPy and PyTorch take the seed."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"{name} must be from 0 to 2**32 - 1, got {seed}")
