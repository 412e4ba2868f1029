"""Released files are read in every layout; the tests write short files of the same formats."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import random_split

pytest.importorskip("numba", reason="needs the extra [lra]")
pytest.importorskip("lightning", reason="needs the extra [lra]")

from benchmarks.lra import listops, released, scoring, tasks
from benchmarks.lra.data import LraData, Rules

NESTS = ["", "lra_release", "lra_release/lra_release"]


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# ---- ListOps ----

# a line of the release
TREE = "( ( ( ( [MAX 4 ) 3 ) ( ( ( [MIN 2 ) 3 ) ] ) ) ] )"


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("folder", ["listops-1000", "listops", "listops/listops-1000"])
def test_listops_is_found_in_every_layout(tmp_path: Path, nest: str, folder: str) -> None:
    for split, digit in (("train", "7"), ("val", "8"), ("test", "9")):
        put(tmp_path / nest / folder / f"basic_{split}.tsv", f"Source\tTarget\n{TREE}\t4\n{digit}\t{digit}\n")
    splits = released.listops(tmp_path)
    assert [len(split) for split in splits] == [2, 2, 2]
    assert [split[1].label for split in splits] == [7, 8, 9]
    assert listops.to_text(splits.train[0].documents[0].tolist()) == "[MAX 4 3 [MIN 2 3 ] ]"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("7\t7\n", "line 1 must be 'Source"),
        ("Source\tTarget\n7 7\n", "line 2 must be an expression, a tab and a digit"),
        ("Source\tTarget\n7\t7\n[SUM 1 2 ]\t3\n", r"line 3: text must hold only .* got '\[SUM'"),
    ],
)
def test_damaged_listops_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        released.read_listops(put(tmp_path / "file.tsv", content))


# ---- Retrieval ----


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("folder", ["tsv_data", "aan", "aan/tsv_data"])
def test_retrieval_is_found_in_every_layout(tmp_path: Path, nest: str, folder: str) -> None:
    for split, label in (("train", "1.0"), ("eval", "0.0"), ("test", "1")):
        put(tmp_path / nest / folder / f"new_aan_pairs.{split}.tsv", f'{label}\tP01\tP02\ta "b\tc\x85 é\n')
    splits = released.retrieval(tmp_path, length=5)
    assert [split[0].label for split in splits] == [1, 0, 1]
    first, second = splits.train[0].documents
    assert first.tolist() == [ord(letter) + 1 for letter in 'a "b']
    # octets, cut after five of them: "c", the two of U+0085, a blank, the first of "é"
    assert second.tolist() == [octet + 1 for octet in "c\x85 é".encode()[:5]]


def test_retrieval_without_texts_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path / "new_aan_pairs.train.tsv", "1.0\tP01\tP02\n")
    with pytest.raises(ValueError, match=r"line 1 must have 5 columns .* got 3\. Copies with identifiers only"):
        released.read_retrieval(path)
    path = put(tmp_path / "new_aan_pairs.eval.tsv", "1.0\ta\tb\tc\td\nyes\ta\tb\tc\td\n")
    with pytest.raises(ValueError, match=r"line 2 must begin with the label 0\.0 or 1\.0, got b'yes'"):
        released.read_retrieval(path)


# ---- Text ----


def put_reviews(folder: Path) -> None:
    for split in ("train", "test"):
        put(folder / split / "pos" / "0_9.txt", f"good {split} é")
        put(folder / split / "pos" / "1_8.txt", "fine" * 8)
        put(folder / split / "neg" / "0_1.txt", "bad")


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("folder", ["aclImdb", "imdb/aclImdb"])
def test_text_is_found_in_every_layout(tmp_path: Path, nest: str, folder: str) -> None:
    put_reviews(tmp_path / nest / folder)
    splits = released.text(tmp_path, length=13)
    assert [example.label for example in splits.train] == [0, 1, 1]
    assert splits.train[1].documents[0].tolist() == [octet + 1 for octet in "good train é".encode()[:13]]
    assert splits.validation is splits.test


def test_missing_reviews_are_missed(tmp_path: Path) -> None:
    put_reviews(tmp_path / "aclImdb")
    (tmp_path / "aclImdb" / "test" / "neg" / "0_1.txt").unlink()
    with pytest.raises(FileNotFoundError, match="neg has no file"):
        released.text(tmp_path)
    (tmp_path / "aclImdb" / "test" / "neg").rmdir()
    with pytest.raises(FileNotFoundError, match="neg was not found"):
        released.text(tmp_path)


# ---- Image ----


def pictures(seed: int, count: int) -> tuple[np.ndarray, list[int]]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (count, 3072), dtype=np.uint8), generator.integers(0, 10, count).tolist()


def put_batches(folder: Path, is_binary: bool) -> None:
    for number, name in enumerate(released.CIFAR_BATCHES):
        colors, labels = pictures(number, 2)
        if is_binary:
            rows = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], colors], axis=1)
            put(folder / f"{name}.bin", rows.tobytes())
        else:
            put(folder / name, pickle.dumps({b"data": colors, b"labels": labels}, protocol=2))


@pytest.mark.parametrize("is_binary", [False, True])
@pytest.mark.parametrize(
    "folder", ["cifar-10-batches-py", "lra_release/cifar10/cifar-10-batches-py", "cifar-10-batches-bin"]
)
def test_images_are_found_in_every_layout_and_made_gray(tmp_path: Path, folder: str, is_binary: bool) -> None:
    put_batches(tmp_path / folder, is_binary)
    splits = released.image(tmp_path)
    assert [len(split) for split in splits] == [9, 1, 2]
    colors, labels = pictures(0, 2)
    red, green, blue = (int(colors[1, channel * 1024 + 33]) for channel in range(3))
    example = splits.train[1]
    assert example.label == labels[1]
    assert example.documents[0].dtype == np.uint8
    # the second pixel of the second row
    assert example.documents[0][33] == int((0.2989 * red + 0.587 * green + 0.114 * blue) / 255 * 255.5)


def test_torchvision_has_the_grays_of_pillow(tmp_path: Path) -> None:
    """TensorFlow's are at most one gray away, and differ in some pixels from weights that are only rounded down."""
    colors, labels = pictures(3, 20)
    path = put(tmp_path / "data_batch_1", pickle.dumps({b"data": colors, b"labels": labels}, protocol=2))
    found = np.stack([example.documents[0] for example in released.read_cifar(path, gray="torchvision")])
    shown = [Image.fromarray(row.reshape(3, 32, 32).transpose(1, 2, 0)).convert("L") for row in colors]
    np.testing.assert_array_equal(found, np.stack([np.asarray(each).reshape(-1) for each in shown]))
    tensorflow = np.stack([example.documents[0] for example in released.read_cifar(path)])
    plain = np.einsum("c,ncp->np", [0.2989, 0.587, 0.114], colors.reshape(-1, 3, 1024)).astype(np.uint8)
    assert {*np.unique(tensorflow - plain)} == {0, 1}
    assert (tensorflow != plain).mean() == pytest.approx(0.25, abs=0.02)


def test_white_stays_within_a_byte(tmp_path: Path) -> None:
    white = np.full((1, 3072), 255, dtype=np.uint8)
    path = put(tmp_path / "data_batch_1", pickle.dumps({b"data": white, b"labels": [3]}, protocol=2))
    assert released.read_cifar(path)[0].documents[0].max() == 255


class Harmful:
    def __reduce__(self) -> tuple:
        return print, ("run",)


def test_a_batch_that_is_a_program_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path / "data_batch_1", pickle.dumps({b"data": Harmful()}, protocol=2))
    with pytest.raises(ValueError, match="holds arrays and lists, not"):
        released.read_cifar(path)
    path = put(tmp_path / "data_batch_1.bin", b"123")
    with pytest.raises(ValueError, match="a multiple of 3073 octets was expected, got 3"):
        released.read_cifar(path)


# ---- Pathfinder ----


def put_pathfinder(folder: Path, count: int = 20, *, is_array: bool = False, brightness: int = 0) -> None:
    """Two batches, the second named so that "10" has to come after "2"; pixel 0 of image i is i, its label i % 2."""
    rows: dict[str, list[list[str]]] = {"2": [], "10": []}
    for index in range(count):
        batch = "2" if index < count // 2 else "10"
        row = f"imgs/{batch} sample_{index}.png {index} {index % 2} 1.0 6 2 2 0.5 1 1"
        rows[batch].append(row.split())
        pixels = np.full((32, 32), brightness, dtype=np.uint8)
        pixels[0, 0] = index
        path = folder / "imgs" / batch / f"sample_{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    (folder / "metadata").mkdir(parents=True)
    for batch, lines in rows.items():
        path = folder / "metadata" / f"{batch}.npy"
        if is_array:
            np.save(path, np.array(lines))
        else:
            path.write_text("".join(" ".join(line) + "\n" for line in lines))


def firsts(examples: Sequence[released.Example]) -> list[int]:
    return [int(example.documents[0][0]) for example in examples]


@pytest.mark.parametrize("is_array", [False, True], ids=["text", "array"])
@pytest.mark.parametrize(
    "folder",
    ["pathfinder32", "lra_release/pathfinder32", "lra_release/lra_release/pathfinder32", "pathfinder/pathfinder32"],
)
def test_pathfinder_is_found_in_every_layout(tmp_path: Path, folder: str, is_array: bool) -> None:
    put_pathfinder(tmp_path / folder / "curv_contour_length_14", is_array=is_array)
    splits = released.pathfinder(tmp_path, 32)
    assert [firsts(split) for split in splits] == [list(range(16)), [16, 17], [18, 19]]
    assert [example.label for example in splits.train] == [0, 1] * 8
    assert splits.train[3].documents[0].shape == (1024,)
    assert splits.train[3].documents[0].dtype == np.uint8


def test_of_two_copies_the_one_at_the_top_is_used_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hard = "pathfinder32/curv_contour_length_14"
    put_pathfinder(tmp_path / "lra_release/lra_release" / hard, brightness=9)
    put_pathfinder(tmp_path / "lra_release" / hard, brightness=5)
    splits = released.pathfinder(tmp_path, 32)
    assert splits.test[0].documents[0][1] == 5
    assert str(tmp_path / "lra_release" / hard) in capsys.readouterr().out


def test_empty_images_are_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    put_pathfinder(folder)
    (folder / "imgs" / "2" / "sample_4.png").write_bytes(b"")
    splits = released.pathfinder(tmp_path, 32)
    assert firsts(splits.train) == [0, 1, 2, 3, *range(5, 16)]
    assert "1 empty image(s) left out" in capsys.readouterr().out


def test_damaged_pathfinder_files_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    put_pathfinder(folder)
    Image.new("L", (16, 16)).save(folder / "imgs" / "2" / "sample_0.png")
    with pytest.raises(ValueError, match="expected 32 x 32 pixels, got"):
        _ = released.pathfinder(tmp_path, 32).train[0]
    (folder / "metadata" / "2.npy").write_text("imgs/2 sample_0.png 0 yes\n")
    with pytest.raises(ValueError, match="line 1 must be a folder, a file, an index and a label 0 or 1"):
        released.pathfinder(tmp_path, 32)
    for file in (folder / "metadata").iterdir():
        file.unlink()
    with pytest.raises(FileNotFoundError, match="metadata has no file"):
        released.pathfinder(tmp_path, 32)


# ---- options ----


def test_difficulties_have_folders_of_their_own(tmp_path: Path) -> None:
    for brightness, folder in enumerate(("curv_contour_length_14", "curv_contour_length_9", "curv_baseline"), 1):
        put_pathfinder(tmp_path / "pathfinder32" / folder, brightness=brightness)
    for brightness, length in enumerate((14, 9, 6), 1):
        rules = Rules(contour_length=length)
        module = LraData("pathfinder32", "official", root=tmp_path, rules=rules)
        module.setup("fit")
        assert module.rows["test"].take(np.arange(1)).tokens[0, 0, 1] == brightness
        assert scoring.belongs(module) == (length == 14)
    with pytest.raises(ValueError, match=r"contour_length must be one of \[14, 9, 6\] in released files, got 7"):
        released.pathfinder(tmp_path, 32, contour_length=7)


def test_random_splits_are_those_of_pytorch(tmp_path: Path) -> None:
    put_pathfinder(tmp_path / "pathfinder32" / "curv_contour_length_14")
    put_batches(tmp_path / "cifar", is_binary=False)
    generator = torch.Generator().manual_seed(42)
    expected = random_split(range(20), [16, 2, 2], generator=generator)
    splits = released.load(tasks.find("pathfinder32"), tmp_path, released.Reading(split="random"))
    assert [firsts(split) for split in splits] == [list(part) for part in expected]
    in_order, drawn = (released.image(tmp_path, split=split) for split in ("official", "random"))
    train, validation = random_split(range(10), [9, 1], generator=torch.Generator().manual_seed(42))
    files = [*in_order.train, *in_order.validation]
    for part, split in ((train, drawn.train), (validation, drawn.validation)):
        assert [firsts([files[place]]) for place in part] == [firsts([example]) for example in split]
    assert firsts(drawn.test) == firsts(in_order.test)


def test_frequent_characters_have_tokens(tmp_path: Path) -> None:
    for split in ("train", "test"):
        put(tmp_path / "aclImdb" / split / "pos" / "0_9.txt", "é" * 20 + "a" * 30 + "x" * 13)
        put(tmp_path / "aclImdb" / split / "neg" / "0_1.txt", "aéx" + "b" * 100)
    module = LraData("text", "official", root=tmp_path, reading=released.Reading(encoding="characters"))
    module.setup("fit")
    batch = module.rows["train"].take(np.arange(2))
    # 0 pads; unknown, end, b, a, é: x is too rare
    assert batch.tokens[0, 0, :6].tolist() == [4, 5, 1, 3, 3, 3]
    assert batch.tokens[0, 0, 102:105].tolist() == [3, 2, 0]
    assert batch.lengths[:, 0].tolist() == [104, 64]
    assert module.description == "official release, encoding=characters"
    cut = released.text(tmp_path, length=3, encoding="characters").train[0].documents[0]
    assert len(cut) == 3 and cut[-1] == 2
    many = "".join(chr(0x4E00 + number) for number in range(300)) * 15
    put(tmp_path / "aclImdb" / "train" / "pos" / "0_9.txt", many)
    with pytest.raises(ValueError, match="characters must be at most 254, got 30"):
        released.text(tmp_path, length=10_000, encoding="characters")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "image", "source": "stand-in", "reading": released.Reading()}, "reading is only for released files"),
        ({"task": "image", "source": "stand-in", "rules": Rules(changes={"size": 1})}, "rules.changes are only for"),
        ({"task": "listops", "rules": Rules(contour_length=6)}, "rules.contour_length is only for Pathfinder, got"),
    ],
)
def test_options_of_other_data_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LraData(**changes)


def test_options_of_other_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="listops has no option split, got split='random'"):
        released.load(tasks.find("listops"), tmp_path, released.Reading(split="random"))


# ---- what is not there ----


@pytest.mark.parametrize(
    ("load", "named"),
    [
        (released.listops, "lra_release/lra_release/listops-1000/basic_train.tsv"),
        (released.retrieval, "aan/tsv_data/new_aan_pairs.train.tsv"),
        (released.text, "aclImdb/train/pos"),
        (released.image, "cifar-10-batches-py/data_batch_1"),
        (lambda root: released.pathfinder(root, 128), "lra_release/pathfinder128/curv_contour_length_14/metadata"),
    ],
    ids=["listops", "retrieval", "text", "image", "pathfinder"],
)
def test_what_is_missing_is_named_with_every_place(tmp_path: Path, load: Callable[[Path], object], named: str) -> None:
    with pytest.raises(FileNotFoundError, match="Looked for") as error:
        load(tmp_path)
    assert str(tmp_path / named) in str(error.value)


@pytest.mark.parametrize(
    ("task", "other"),
    [
        ("text", "stand-in runs without them"),
        ("image", "stand-in runs without them"),
        ("listops", "generated makes data by the published rules"),
        ("pathx", "generated makes data by the published rules"),
    ],
)
def test_missing_files_name_the_options_that_help(tmp_path: Path, task: str, other: str) -> None:
    with pytest.raises(FileNotFoundError, match="was not found under") as error:
        released.load(tasks.find(task), tmp_path)
    *_, last = str(error.value).splitlines()
    assert last == f"--data.root FOLDER names the folder of the released files; --data.source {other}"
