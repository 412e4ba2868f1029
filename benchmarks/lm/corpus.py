"""A corpus of bytes from a folder of packages: split by package, without repeated files, with checksums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..run import saved

# shorter lines, such as `else:`, do not show that a file is a copy
MIN_LINE = 20
# of the bytes of a split, from one package at most
PACKAGE_SHARE = 0.1
MANIFEST = ("sha256", "train_bytes", "validation_bytes", "packages")


def is_copy(text: bytes, seen: set[int]) -> bool:
    """Whether half of the long lines or more are in `seen`, as in vendored copies; if not, adds them to it."""
    lines = {hash(line) for line in map(bytes.strip, text.splitlines()) if len(line) >= MIN_LINE}
    if 2 * len(lines & seen) >= len(lines):
        return True
    seen |= lines
    return False


def make(
    folder: Path, out: Path, *, suffix: str = ".py", max_bytes: int = 20_000_000, validation_share: float = 0.05
) -> dict[str, Any]:
    """Writes the training bytes and then the validation bytes to `out`, and the manifest, which is returned, beside it.

    The manifest has the name of `out` with the suffix .json, and names the packages that were left out: as copies, as
    they were larger than a tenth of their split, or for lack of room. Other files are not replaced, nor is another
    corpus, with which trainings may go on.

    folder            each entry is a package, a folder or a file, and goes to one split
    validation_share  of the bytes. These packages are read first, so that training drops what is in both
    raises            ValueError if there is no such folder, max_bytes is below 1, a split is empty, or another file or
                      corpus has the place of the corpus or of the manifest
    """
    if not folder.is_dir():
        raise ValueError(f"folder must be a folder of packages, got {folder}, which is none")
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be 1 or more, got {max_bytes}")
    if not out.name or out.is_dir() or out.suffix == ".json":
        raise ValueError(f"out must be a file that does not end with .json, as its manifest does, got {str(out)!r}")
    known = read_manifest(out)["sha256"] if out.with_suffix(".json").exists() else None
    if known is None and out.exists():
        raise ValueError(
            f"out must not be another file, got {out}, which has no manifest beside it: choose another place, or "
            "remove it"
        )
    found: dict[str, list[Path]] = {}
    for path in sorted(path for path in folder.rglob(f"*{suffix}") if path.is_file()):
        found.setdefault(path.relative_to(folder).parts[0], []).append(path)
    max_bytes = min(max_bytes, sum(path.stat().st_size for files in found.values() for path in files))
    # in the order of a hash, which depends on the name alone
    names = sorted(found, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    splits, packages, seen = {}, {}, set[int]()
    for split, share in (("validation", validation_share), ("train", 1 - validation_share)):
        room = share * max_bytes
        limit, splits[split] = PACKAGE_SHARE * room, b""
        # a package that finds too little room would be lost
        while names and room >= limit:
            name, text = names.pop(0), b""
            for path in found[name]:
                content = path.read_bytes()
                document = b"# %s\n%s\0" % (os.fsencode(path.relative_to(folder)), content)
                if len(text) + len(document) <= limit and not is_copy(content, seen):
                    text += document
            if text:
                splits[split] += text
                room -= len(text)
                packages[name] = {"split": split, "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        if not splits[split]:
            raise ValueError(
                f"no text for {split} in {folder}: it needs more packages with {suffix} files, or smaller ones, since "
                f"one may have a tenth of the split, {limit:,.0f} bytes"
            )
    content = splits["train"] + splits["validation"]
    manifest: dict[str, Any] = {f"{split}_bytes": len(text) for split, text in splits.items()}
    manifest |= {"sha256": hashlib.sha256(content).hexdigest(), "packages": packages}
    manifest["left_out"] = sorted(found.keys() - packages)
    if out.exists() and known != manifest["sha256"]:
        raise ValueError(
            f"out must not be the place of another corpus, got {out}, whose SHA-256 is {known}, not "
            f"{manifest['sha256']}: choose another place, or remove it"
        )
    # a kill between the two leaves a manifest alone, which is no corpus, and is replaced the next time
    with saved.replacing(out.with_suffix(".json")) as unfinished:
        unfinished.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    with saved.replacing(out) as unfinished:
        unfinished.write_bytes(content)
    return manifest


def read_manifest(corpus: Path) -> dict[str, Any]:
    """The manifest beside a corpus; ValueError if the file is none."""
    return saved.read_json(corpus.with_suffix(".json"), MANIFEST, f"the manifest of the corpus {corpus}")


class Corpus:
    """Windows of `length` tokens and the one after them, uint8 (windows, length + 1), which do not overlap.

    raises  FileNotFoundError without the file that `make` writes, ValueError if it is another one or too short
    """

    def __init__(self, path: Path, length: int) -> None:
        if not path.exists() or not path.with_suffix(".json").exists():
            raise FileNotFoundError(f"no corpus at {path}: python -m benchmarks.lm corpus --out {path}")
        content = path.read_bytes()
        manifest = read_manifest(path)
        self.sha256 = hashlib.sha256(content).hexdigest()
        if self.sha256 != manifest["sha256"]:
            raise ValueError(f"{path} has SHA-256 {self.sha256}, but its manifest says {manifest['sha256']}")
        symbols, n_train = np.frombuffer(content, dtype=np.uint8), manifest["train_bytes"]
        self.train, self.validation = (
            torch.from_numpy(part[: len(part) // (length + 1) * (length + 1)].reshape(-1, length + 1).copy())
            for part in (symbols[:n_train], symbols[n_train:])
        )
        if not len(self.validation):
            raise ValueError(f"length must be below the {manifest['validation_bytes']} bytes of validation")

    def training_batches(self, batch_size: int, *, seed: int, first_step: int, n_steps: int) -> Iterator[Tensor]:
        """A batch for each step, a function of seed and step alone; an epoch has each window at most once."""
        if batch_size > len(self.train):
            raise ValueError(f"batch_size must be at most the {len(self.train)} training windows, got {batch_size}")
        for step in range(first_step, first_step + n_steps):
            epoch, place = divmod(step, len(self.train) // batch_size)
            order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
            yield self.train[order[place * batch_size : (place + 1) * batch_size]]

    def validation_batches(self, batch_size: int, n_windows: int) -> Iterator[Tensor]:
        """Windows at equal distances in the validation split."""
        places = torch.linspace(0, len(self.validation) - 1, min(n_windows, len(self.validation))).long()
        return iter(self.validation[places].split(batch_size))
