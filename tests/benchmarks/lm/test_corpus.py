"""A corpus has each file once, in one split, and batches that depend on seed and step alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.lm import corpus
from benchmarks.lm.corpus import Corpus


def code(name: str, n_lines: int = 12) -> str:
    return "".join(f"    {name}_result_{line} = compute_{name}({line})\n" for line in range(n_lines))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """80 packages with one file each; every fourth also has a copy of one vendored file."""
    for number in range(80):
        package = tmp_path / "site" / f"package{number}"
        package.mkdir(parents=True)
        (package / "code.py").write_text(code(f"name{number}"))
        if number % 4 == 0:
            (package / "vendored.py").write_text(f"# copy {number}\n" + code("vendored", 8))
    (tmp_path / "site" / "notes.txt").write_text("not Python")
    return tmp_path / "site"


@pytest.fixture
def path(folder: Path, tmp_path: Path) -> Path:
    corpus.make(folder, tmp_path / "corpus.bin", validation_share=0.3)
    return tmp_path / "corpus.bin"


def test_packages_go_to_one_split_each(path: Path) -> None:
    manifest, content = json.loads(path.with_suffix(".json").read_text()), path.read_bytes()
    n_train = manifest["train_bytes"]
    splits = {"train": content[:n_train].decode(), "validation": content[n_train:].decode()}
    of_package = {name: facts["split"] for name, facts in manifest["packages"].items()}
    assert set(of_package.values()) == {"train", "validation"}
    for name, split in of_package.items():
        for each, text in splits.items():
            assert (f"# {name}/code.py\n" in text) == (each == split)
    assert manifest["validation_bytes"] + n_train == len(content)
    assert sum(facts["bytes"] for facts in manifest["packages"].values()) == len(content)


def test_a_copied_file_is_kept_once_and_not_for_training_if_validation_has_it(path: Path) -> None:
    text = path.read_text()
    assert text.count("vendored_result_0 ") == 1
    n_train = json.loads(path.with_suffix(".json").read_text())["train_bytes"]
    assert text.index("vendored_result_0 ") >= n_train


def test_files_count_as_copies_if_half_of_their_long_lines_are_known() -> None:
    seen: set[int] = set()
    assert not corpus.is_copy(code("a").encode(), seen)
    assert corpus.is_copy(code("a").encode(), seen)
    assert corpus.is_copy((code("a") + code("b", 11)).encode(), seen)
    assert not corpus.is_copy((code("a") + code("b", 13)).encode(), seen)
    # no line of an empty file is new
    assert corpus.is_copy(b"", seen)


def test_the_same_folder_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    made = [corpus.make(folder, tmp_path / name, max_bytes=40_000, validation_share=0.3) for name in ("a.bin", "b.bin")]
    assert made[0] == made[1]
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    assert (tmp_path / "a.bin").stat().st_size <= 40_000


def test_any_text_can_be_read(tmp_path: Path) -> None:
    for number in range(80):
        (tmp_path / f"{number}.md").write_text(code(f"chapter{number}"))
    made = corpus.make(tmp_path, tmp_path / "out" / "text.bin", suffix=".md", validation_share=0.2)
    assert {Path(name).suffix for name in made["packages"]} == {".md"}


def test_a_folder_that_is_not_there_and_an_empty_corpus_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folder must be a folder of packages, got .*nothing, which is none"):
        corpus.make(tmp_path / "nothing", tmp_path / "corpus.bin")
    with pytest.raises(ValueError, match="max_bytes must be 1 or more, got 0"):
        corpus.make(tmp_path, tmp_path / "corpus.bin", max_bytes=0)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no text for validation in .*: it needs more packages with \.py files"):
        corpus.make(tmp_path, tmp_path / "corpus.bin")


def test_batches_are_a_function_of_seed_and_step(path: Path) -> None:
    data = Corpus(path, 64)
    whole = list(data.training_batches(3, seed=1, first_step=0, n_steps=2 * len(data.train)))
    rest = list(data.training_batches(3, seed=1, first_step=5, n_steps=4))
    assert all(torch.equal(*pair) for pair in zip(whole[5:9], rest, strict=True))
    (other,) = data.training_batches(3, seed=2, first_step=5, n_steps=1)
    assert not torch.equal(other, rest[0])
    # each window once an epoch
    epoch = torch.cat(whole[: len(data.train) // 3])
    assert len(epoch.unique(dim=0)) == len(epoch) == len(data.train) // 3 * 3
    assert not any(torch.equal(*pair) for pair in pairwise(whole[:4]))


def test_validation_windows_are_spread_over_the_split(path: Path) -> None:
    data = Corpus(path, 64)
    windows = torch.cat(list(data.validation_batches(2, 5)))
    assert len(windows) == 5
    assert torch.equal(windows[0], data.validation[0]) and torch.equal(windows[-1], data.validation[-1])
    everything = torch.cat(list(data.validation_batches(2, 10**6)))
    assert torch.equal(everything, data.validation)


def test_a_changed_corpus_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(ValueError, match="but its manifest says"):
        Corpus(path, 64)


def test_a_missing_or_short_corpus_is_refused(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no corpus at .*nothing\.bin: python -m benchmarks\.lm corpus"):
        Corpus(path.with_name("nothing.bin"), 64)
    with pytest.raises(ValueError, match="length must be below the"):
        Corpus(path, 100_000)
    with pytest.raises(ValueError, match="batch_size must be at most the"):
        next(Corpus(path, 64).training_batches(10_000, seed=0, first_step=0, n_steps=1))


@pytest.mark.parametrize("name", ["corpus.json", ".", "folder"])
def test_the_place_of_a_manifest_or_a_folder_is_no_place_for_a_corpus(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Regression: the manifest replaced the corpus."""
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"out must be a file that does not end with \.json"):
        corpus.make(folder, Path(name), validation_share=0.3)
    assert not (tmp_path / "corpus.json").exists()


@pytest.mark.parametrize("text", ['{"keep": "me"}', "[1]", "no JSON", ""])
def test_another_file_in_the_place_of_the_manifest_is_kept(folder: Path, tmp_path: Path, text: str) -> None:
    """Regression: it was replaced."""
    notes = tmp_path / "notes.json"
    notes.write_text(text)
    with pytest.raises(ValueError, match=r"notes\.json is not the manifest of the corpus .*notes\.txt"):
        corpus.make(folder, tmp_path / "notes.txt", validation_share=0.3)
    assert notes.read_text() == text and not (tmp_path / "notes.txt").exists()
    (tmp_path / "notes.txt").write_bytes(b"text")
    with pytest.raises(ValueError, match=r"notes\.json is not the manifest of the corpus .*notes\.txt"):
        Corpus(tmp_path / "notes.txt", 64)


def test_another_file_in_the_place_of_the_corpus_is_kept(folder: Path, tmp_path: Path) -> None:
    """Regression: it was replaced."""
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"out must not be another file, got .*thesis\.txt, which has no manifest"):
        corpus.make(folder, tmp_path / "thesis.txt", validation_share=0.3)
    assert (tmp_path / "thesis.txt").read_text() == "years of work" and not (tmp_path / "thesis.json").exists()


def test_another_corpus_is_kept_and_the_same_one_made_again(folder: Path, path: Path) -> None:
    """Regression: it was replaced, and trainings with it could not go on."""
    before = path.read_bytes()
    path.write_bytes(before[:100])
    corpus.make(folder, path, validation_share=0.3)
    assert path.read_bytes() == before
    (folder / "package7" / "code.py").write_text(code("changed"))
    with pytest.raises(
        ValueError, match=r"out must not be the place of another corpus, got .*corpus\.bin, whose SHA-2"
    ):
        corpus.make(folder, path, validation_share=0.3)
    assert path.read_bytes() == before and len(Corpus(path, 64).train)
    # of a corpus that is not there
    path.unlink()
    corpus.make(folder, path, validation_share=0.3)
    assert path.read_bytes() != before and len(Corpus(path, 64).train)


def test_names_of_any_bytes_can_be_read(folder: Path, tmp_path: Path) -> None:
    (folder / os.fsdecode(b"odd\xff")).mkdir()
    (folder / os.fsdecode(b"odd\xff") / "a.py").write_text(code("odd"))
    made = corpus.make(folder, tmp_path / "corpus.bin", validation_share=0.3)
    assert b"# odd\xff/a.py\n" in (tmp_path / "corpus.bin").read_bytes()
    assert os.fsdecode(b"odd\xff") in made["packages"] and len(Corpus(tmp_path / "corpus.bin", 64).train)


def test_packages_that_are_left_out_are_listed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(80):
        (source / f"{number:02}.py").write_text(code(f"one{number}"))
    for name in ("copy1.py", "copy2.py"):
        (source / name).write_text(code("same"))
    made = corpus.make(source, tmp_path / "corpus.bin", validation_share=0.2)
    assert len(made["left_out"]) + len(made["packages"]) == 82
    assert len({"copy1.py", "copy2.py"} & {*made["left_out"]}) >= 1


def test_files_that_are_too_large_for_a_split_are_named_as_the_cause(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.py").write_text(code(f"one{number}"))
    with pytest.raises(ValueError, match=r"or smaller ones, since one may have a tenth of the split, [\d,]+ bytes"):
        corpus.make(tmp_path, tmp_path / "corpus.bin")


def test_a_half_written_corpus_is_none_and_is_made_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "corpus.bin"

    def half(error: BaseException) -> Callable[[Path, bytes], None]:
        def write(file: Path, content: bytes) -> None:
            with file.open("wb") as stream:
                stream.write(content[:100])
            raise error

        return write

    for error in (KeyboardInterrupt(), OSError(28, "No space left on device")):
        with monkeypatch.context() as patch, pytest.raises(type(error)) as stop:
            patch.setattr(Path, "write_bytes", half(error))
            corpus.make(folder, path, validation_share=0.3)
        with pytest.raises(FileNotFoundError, match=r"no corpus at .*corpus\.bin: python -m benchmarks\.lm corpus"):
            Corpus(path, 64)
        assert [each.name for each in path.parent.iterdir()] == ["corpus.json"]
    # of the full disk
    stop.match(r"corpus\.bin cannot be written, with [\d.,]+ MB free on its disk: .*No space left on device")
    corpus.make(folder, path, validation_share=0.3)
    assert len(Corpus(path, 64).train)
