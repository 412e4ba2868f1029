"""Readers of Long Range Arena's released files, in every layout in which copies are passed on."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from .listops import parse
from .tasks import Task

# the archive unpacks into a folder of its own name that holds another one
NESTS = ("", "lra_release", "lra_release/lra_release")
CIFAR_FOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-py", "cifar")
CIFAR_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
CIFAR_PIXELS = 32 * 32
# ten-thousandths of red, green and blue in a gray, as in TensorFlow; whole numbers make rounding down exact
GRAY = np.array([2989, 5870, 1140])
# globals needed to unpickle an array, in Python 2, NumPy 1 and NumPy 2
HARMLESS = {
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *(("numpy", name) for name in ("ndarray", "dtype")),
    ("_codecs", "encode"),
}
# Long Range Arena cuts the texts of Retrieval before encoding them
LONGEST_TEXT = 10_000


class Example(NamedTuple):
    """documents: integer arrays (length,), one, or two for Retrieval; label: 0, 1, ..."""

    documents: tuple[np.ndarray, ...]
    label: int


class Splits(NamedTuple):
    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example]


def load(task: Task, root: Path) -> Splits:
    """The released files of a task, in the splits of Long Range Arena.

    raises  FileNotFoundError that says what was looked for, and how to run without the files
    """
    try:
        return _load(task, root)
    except FileNotFoundError as error:
        is_generated = task.name.startswith(("listops", "path"))
        other = "generated makes data by the published rules" if is_generated else "stand-in runs without them"
        hint = f"--data.root FOLDER names the folder of the released files; --data.source {other}"
        raise FileNotFoundError(f"{error}\n{hint}") from None


def _load(task: Task, root: Path) -> Splits:
    if task.name == "listops":
        return listops(root)
    if task.name.startswith("text"):
        return text(root, length=task.length)
    if task.name == "retrieval":
        return retrieval(root, length=task.length)
    if task.name == "image":
        return image(root)
    if task.name.startswith("path") and task.grid is not None:
        return pathfinder(root, task.grid[0])
    raise ValueError(f"task {task.name!r} has no released files")


def _find(root: Path, folders: Sequence[str], *names: str) -> Path:
    """The first file that exists, among the names in each folder, in any nest of `root`.

    raises  FileNotFoundError with every path that was tried
    """
    tried = [root / nest / folder / name for folder in folders for nest in NESTS for name in names]
    for path in tried:
        if path.exists():
            return path
    looked = "\n".join(f"    {path}" for path in tried)
    raise FileNotFoundError(f"{names[0]} was not found under {root}. Looked for\n{looked}")


def _as_tokens(text: bytes) -> np.ndarray:
    """int16 (length,): byte + 1; 0 is padding."""
    return np.frombuffer(text, dtype=np.uint8).astype(np.int16) + 1


# ---- ListOps ----


def listops(root: Path) -> Splits:
    """basic_{train,val,test}.tsv: 96,000, 2,000 and 2,000 expressions in the release."""
    folder = _find(root, ("listops-1000", "listops", "listops/listops-1000"), "basic_train.tsv").parent
    return Splits(*(read_listops(folder / f"basic_{split}.tsv") for split in ("train", "val", "test")))


def read_listops(path: Path) -> list[Example]:
    """Every expression of a file. Raises a ValueError that names the line if it is not an expression and a digit."""
    header, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    if header != "Source\tTarget":
        raise ValueError(f"{path}: line 1 must be 'Source\\tTarget', got {header[:80]!r}")
    examples = []
    for number, line in enumerate(lines, start=2):
        source, _, target = line.partition("\t")
        if not (target.isdecimal() and len(target) == 1):
            raise ValueError(f"{path}: line {number} must be an expression, a tab and a digit, got {line[:80]!r}")
        try:
            examples.append(Example((np.frombuffer(parse(source), dtype=np.uint8),), int(target)))
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
    return examples


# ---- Text ----


def text(root: Path, *, length: int = 1000) -> Splits:
    """IMDB reviews as bytes, aclImdb/{train,test}/{pos,neg}/*.txt; label 1 for a good one.

    The validation set is the test set, as in Long Range Arena.

    length  reviews are cut to this length
    """
    folder = _find(root, ("aclImdb", "imdb/aclImdb", "imdb", "text/aclImdb"), "train/pos").parents[1]
    train, test = (
        [
            Example((_as_tokens(review[:length]),), label)
            for label, verdict in enumerate(("neg", "pos"))
            for review in _reviews(folder / split / verdict)
        ]
        for split in ("train", "test")
    )
    return Splits(train, test, test)


def _reviews(folder: Path) -> list[bytes]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} was not found: the release has the folders pos and neg in train and in test")
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"{folder} has no file *.txt")
    return [file.read_bytes() for file in files]


# ---- Retrieval ----


def retrieval(root: Path, *, length: int = 4000) -> Splits:
    """Pairs of papers (AAN), new_aan_pairs.{train,eval,test}.tsv: 147,086, 18,090 and 17,437 in the release.

    Label 1 if one cites the other.
    """
    folder = _find(root, ("tsv_data", "aan", "aan/tsv_data"), "new_aan_pairs.train.tsv").parent
    splits = ("train", "eval", "test")
    return Splits(*(read_retrieval(folder / f"new_aan_pairs.{split}.tsv", length=length) for split in splits))


def read_retrieval(path: Path, *, length: int = 4000) -> list[Example]:
    """Every pair of a file. Raises a ValueError that names the line if it has other columns, such as no texts."""
    examples = []
    # bytes: texts may hold characters that text mode takes for line ends
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            columns = line.rstrip(b"\r\n").split(b"\t")
            if len(columns) != 5:
                raise ValueError(
                    f"{path}: line {number} must have 5 columns (label, two identifiers, two texts), got "
                    f"{len(columns)}. Copies with identifiers only have to be joined with the texts of the papers first"
                )
            label = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}.get(columns[0])
            if label is None:
                raise ValueError(f"{path}: line {number} must begin with the label 0.0 or 1.0, got {columns[0][:20]!r}")
            documents = tuple(_as_tokens(text[:LONGEST_TEXT][:length]) for text in columns[3:])
            examples.append(Example(documents, label))
    return examples


# ---- Image ----


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in HARMLESS:
            raise ValueError(f"a batch of CIFAR-10 holds arrays and lists, not {module}.{name}")
        return super().find_class(module, name)


def image(root: Path) -> Splits:
    """CIFAR-10 in gray, uint8 (1024,): 45,000, 5,000 and 10,000 images; the last training images are for validation."""
    first = _find(root, CIFAR_FOLDERS, CIFAR_BATCHES[0], f"{CIFAR_BATCHES[0]}.bin")
    *batches, test = (read_cifar(first.with_name(name + first.suffix)) for name in CIFAR_BATCHES)
    train = [example for batch in batches for example in batch]
    n_train = len(train) * 9 // 10
    return Splits(train[:n_train], train[n_train:], test)


def read_cifar(path: Path) -> list[Example]:
    """The images of one batch, a pickle or plain bytes (.bin), in its order."""
    content = path.read_bytes()
    if path.suffix == ".bin":
        if len(content) % (1 + 3 * CIFAR_PIXELS):
            raise ValueError(f"{path}: a multiple of {1 + 3 * CIFAR_PIXELS} octets was expected, got {len(content)}")
        rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + 3 * CIFAR_PIXELS)
        labels, colors = rows[:, 0].tolist(), rows[:, 1:]
    else:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        labels, colors = batch[b"labels"], batch[b"data"]
    pixels = np.einsum("c,ncp->np", GRAY, colors.reshape(-1, 3, CIFAR_PIXELS).astype(np.int64)) // 10_000
    return [Example((row,), int(label)) for row, label in zip(pixels.astype(np.uint8), labels, strict=True)]


# ---- Pathfinder ----


class Images(Sequence[Example]):
    """Examples of one document, uint8 (resolution * resolution,), row by row; files are read on access."""

    def __init__(self, entries: Sequence[tuple[Path, int]], resolution: int) -> None:
        self.entries, self.resolution = entries, resolution

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, place: int) -> Example:  # type: ignore[override]
        file, label = self.entries[place]
        with Image.open(file) as picture:
            pixels = np.asarray(picture.convert("L"))
        if pixels.shape != (self.resolution, self.resolution):
            raise ValueError(f"{file}: expected {self.resolution} x {self.resolution} pixels, got {pixels.shape}")
        return Example((pixels.reshape(-1),), label)


def pathfinder(root: Path, resolution: int) -> Splits:
    """The hard images, pathfinder<R>/curv_contour_length_14: 160,000, 20,000 and 20,000 in the release.

    Of the two copies of pathfinder128 the top one is preferred, since the nested one was reported broken.
    """
    folders = [f"{prefix}pathfinder{resolution}/curv_contour_length_14" for prefix in ("", "pathfinder/")]
    folder = _find(root, folders, "metadata").parent
    print(f"pathfinder{resolution}: using {folder}")
    entries = read_pathfinder(folder)
    n_train, n_validation = len(entries) * 8 // 10, len(entries) // 10
    ends = (0, n_train, n_train + n_validation, len(entries))
    return Splits(*(Images(entries[begin:end], resolution) for begin, end in itertools.pairwise(ends)))


def read_pathfinder(folder: Path) -> list[tuple[Path, int]]:
    """(file, label) of imgs/<batch>/sample_<i>.png in the order of metadata/<batch>.npy, without empty files."""
    files = sorted((folder / "metadata").glob("*.npy"), key=lambda file: int(file.stem))
    if not files:
        raise FileNotFoundError(f"{folder / 'metadata'} has no file *.npy")
    entries = [entry for file in files for entry in _entries(file, folder)]
    is_there = [(image, label) for image, label in entries if image.stat().st_size]
    if len(is_there) < len(entries):
        print(f"{folder}: {len(entries) - len(is_there)} empty image(s) left out")
    return is_there


def _entries(file: Path, folder: Path) -> list[tuple[Path, int]]:
    """Metadata are text in files named .npy (the release) or NumPy arrays of strings (the generator)."""
    content = file.read_bytes()
    if content.startswith(b"\x93NUMPY"):
        rows = np.load(file).astype(str).tolist()
    else:
        rows = [line.split() for line in content.decode().splitlines() if line.strip()]
    entries = []
    for number, row in enumerate(rows, start=1):
        if len(row) < 4 or row[3] not in ("0", "1", "0.0", "1.0"):
            raise ValueError(
                f"{file}: line {number} must be a folder, a file, an index and a label 0 or 1, got "
                f"{' '.join(row)[:80]!r}"
            )
        entries.append((folder / row[0] / row[1], int(float(row[3]))))
    return entries
