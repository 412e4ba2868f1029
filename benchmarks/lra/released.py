"""Readers of Long Range Arena's released files, in every layout in which copies are passed on."""

from __future__ import annotations

import io
import itertools
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image

from .listops import parse
from .tasks import Task, find

# the archive unpacks into a folder of its own name that holds another one
NESTS = ("", "lra_release", "lra_release/lra_release")
CIFAR_FOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-py", "cifar")
CIFAR_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
CIFAR_PIXELS = 32 * 32
# weights of red, green and blue in gray: TensorFlow's, and in 65,536ths those of Pillow, which torchvision uses
GRAY = np.array([0.2989, 0.587, 0.114], dtype=np.float32)
GRAY_PILLOW = np.array([19595, 38470, 7471])
# Pathfinder's folders by the number of dashes in a snake
FOLDERS = {14: "curv_contour_length_14", 9: "curv_contour_length_9", 6: "curv_baseline"}
# in the PyTorch versions of the benchmark: seed of random splits, and least occurrences of a character
SPLIT_SEED, MIN_COUNT = 42, 15
PADDING, UNKNOWN, END = range(3)
# globals needed to unpickle an array, in Python 2, NumPy 1 and NumPy 2
HARMLESS = {
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *(("numpy", name) for name in ("ndarray", "dtype")),
    ("_codecs", "encode"),
}
# Long Range Arena cuts the texts of Retrieval before encoding them
LONGEST_TEXT = 10_000


@dataclass(frozen=True)
class Reading:
    """How released files are read: by default as in Long Range Arena, otherwise as in PyTorch versions of it.

    split     Image and Pathfinder: "official" cuts the files in their order, "random" draws the validation set of Image
              and all splits of Pathfinder with seed 42
    encoding  Text: "bytes", or "characters" with at least 15 occurrences in the training set, and an end token
    gray      Image: rounding and weights of "tensorflow" or "torchvision"
    """

    split: Literal["official", "random"] = "official"
    encoding: Literal["bytes", "characters"] = "bytes"
    gray: Literal["tensorflow", "torchvision"] = "tensorflow"

    @property
    def changes(self) -> dict[str, str]:
        """The options whose values are not the defaults."""
        return {name: value for name, value in asdict(self).items() if value != getattr(Reading, name)}


class Example(NamedTuple):
    """documents: integer arrays (length,), one, or two for Retrieval; label: 0, 1, ..."""

    documents: tuple[np.ndarray, ...]
    label: int


class Splits(NamedTuple):
    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example]


def load(task: Task, root: Path, reading: Reading | None = None, *, contour_length: int = 14) -> Splits:
    """The released files of a task.

    contour_length  Pathfinder: 14 (hard), 9 (intermediate), 6 (easy)
    raises  FileNotFoundError that says what was looked for, and how to run without the files; ValueError for an option
            that the task does not have
    """
    reading = Reading() if reading is None else reading
    is_path = task.name.startswith("path")
    options = {"split": is_path or task.name == "image", "encoding": task.name.startswith("text")}
    options["gray"] = task.name == "image"
    if unused := [name for name in reading.changes if not options[name]]:
        raise ValueError(f"{task.name} has no option {unused[0]}, got {unused[0]}={reading.changes[unused[0]]!r}")
    try:
        return _load(task, root, reading, contour_length)
    except FileNotFoundError as error:
        is_generated = task.name.startswith(("listops", "path"))
        other = "generated makes data by the published rules" if is_generated else "stand-in runs without them"
        hint = f"--data.root FOLDER names the folder of the released files; --data.source {other}"
        raise FileNotFoundError(f"{error}\n{hint}") from None


def _load(task: Task, root: Path, reading: Reading, contour_length: int) -> Splits:
    if task.name == "listops":
        return listops(root)
    if task.name.startswith("text"):
        return text(root, length=task.length, encoding=reading.encoding)
    if task.name == "retrieval":
        return retrieval(root, length=task.length)
    if task.name == "image":
        return image(root, split=reading.split, gray=reading.gray)
    if task.name.startswith("path") and task.grid is not None:
        return pathfinder(root, task.grid[0], contour_length=contour_length, split=reading.split)
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


def _shuffled(count: int) -> list[int]:
    """The order that torch.utils.data.random_split cuts."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()


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


def text(root: Path, *, length: int = 1000, encoding: str = "bytes") -> Splits:
    """IMDB reviews, aclImdb/{train,test}/{pos,neg}/*.txt; label 1 for a good one.

    The validation set is the test set, as in Long Range Arena.

    length    reviews are cut to this length
    encoding  see Reading
    """
    folder = _find(root, ("aclImdb", "imdb/aclImdb", "imdb", "text/aclImdb"), "train/pos").parents[1]
    reviews = [
        [
            (review, label)
            for label, verdict in enumerate(("neg", "pos"))
            for review in _reviews(folder / split / verdict)
        ]
        for split in ("train", "test")
    ]
    encode: Callable[[bytes], np.ndarray] = lambda review: _as_tokens(review[:length])  # noqa: E731
    if encoding == "characters":
        encode = _by_character([review for review, _ in reviews[0]], length)
    train, test = ([Example((encode(review),), label) for review, label in split] for split in reviews)
    return Splits(train, test, test)


def _by_character(reviews: Sequence[bytes], length: int) -> Callable[[bytes], np.ndarray]:
    """Characters to int16 tokens (at most `length`,), with an end token; the most frequent ones have the lowest."""
    counts = Counter(itertools.chain.from_iterable(review.decode()[: length - 1] for review in reviews))
    known = sorted((each for each in counts if counts[each] >= MIN_COUNT), key=lambda each: (-counts[each], each))
    if END + len(known) >= find("text").n_tokens:
        raise ValueError(
            f"characters must be at most {find('text').n_tokens - END - 1}, got {len(known)} in the reviews"
        )
    tokens = {each: token for token, each in enumerate(known, start=END + 1)}
    return lambda review: np.array(
        [*(tokens.get(each, UNKNOWN) for each in review.decode()[: length - 1]), END], dtype=np.int16
    )


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


def image(root: Path, *, split: str = "official", gray: str = "tensorflow") -> Splits:
    """CIFAR-10 in gray, uint8 (1024,): 45,000, 5,000 and 10,000 images; the last training images are for validation.

    split, gray  see Reading
    """
    first = _find(root, CIFAR_FOLDERS, CIFAR_BATCHES[0], f"{CIFAR_BATCHES[0]}.bin")
    *batches, test = (read_cifar(first.with_name(name + first.suffix), gray=gray) for name in CIFAR_BATCHES)
    train = [example for batch in batches for example in batch]
    n_train = len(train) * 9 // 10
    if split == "random":
        train = [train[place] for place in _shuffled(len(train))]
    return Splits(train[:n_train], train[n_train:], test)


def read_cifar(path: Path, *, gray: str = "tensorflow") -> list[Example]:
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
    by_color = colors.reshape(-1, 3, CIFAR_PIXELS)
    if gray == "torchvision":
        pixels = (np.einsum("c,ncp->np", GRAY_PILLOW, by_color.astype(np.int64)) + 2**15) >> 16
    else:
        # scaled to 0 .. 1 and back by 255.5 before rounding down
        pixels = np.einsum("c,ncp->np", GRAY, by_color * np.float32(1 / 255)) * np.float32(255.5)
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


def pathfinder(root: Path, resolution: int, *, contour_length: int = 14, split: str = "official") -> Splits:
    """The images pathfinder<R>/curv_*: 160,000, 20,000 and 20,000 in the release.

    Of the two copies of pathfinder128 the top one is preferred, since the nested one was reported broken.

    contour_length, split  see load and Reading
    """
    if contour_length not in FOLDERS:
        raise ValueError(f"contour_length must be one of {[*FOLDERS]} in released files, got {contour_length}")
    folders = [f"{prefix}pathfinder{resolution}/{FOLDERS[contour_length]}" for prefix in ("", "pathfinder/")]
    folder = _find(root, folders, "metadata").parent
    print(f"pathfinder{resolution}: using {folder}")
    entries = read_pathfinder(folder)
    if split == "random":
        entries = [entries[place] for place in _shuffled(len(entries))]
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
