"""Names of other libraries, and misspelt ones, get the name of this package."""

from __future__ import annotations

import re

import pytest

import blocksparse_flash
import masks
from masks.other_names import OTHER_NAMES


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("sliding_window", "local(window)"),
        ("causal_window", "local(window=(left, 0))"),
        ("big_bird", "bigbird"),
        ("BigBird", "bigbird"),
        ("dilated_sliding_window", "dilated_window"),
        ("document_mask", "documents"),
        ("butterfy", "butterfly"),
        ("longformr", "longformer"),
    ],
)
def test_an_unknown_name_gets_a_known_one(name: str, meant: str) -> None:
    message = re.escape(f"module 'masks' has no attribute '{name}'. Did you mean {meant}?")
    for package in (masks, blocksparse_flash.masks):
        with pytest.raises(AttributeError, match=message):
            getattr(package, name)


def test_specifications_get_the_same_help() -> None:
    with pytest.raises(
        ValueError, match=r"no mask is called sliding_window\. Did you mean local\(window\)\? There are"
    ):
        masks.build("sliding_window(256) | causal", 1024)


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("local", {"window_size": 8}, "Did you mean window?"),
        ("local", {"window": 8, "causal": True}, "Write `& masks.causal(n)` after the mask"),
        ("longformer", {"window": 8, "causal": True}, "Write `& masks.causal(n)` after the mask"),
        ("butterfly", {"causal": True}, "Write `& masks.causal(n)` after the mask"),
        ("causal", {"zzz": 1}, "It takes length, block_size"),
    ],
)
def test_an_unknown_argument_gets_a_known_one(name: str, given: dict[str, object], meant: str) -> None:
    unknown = [*given][-1]
    message = re.escape(f"{name}() got an unexpected keyword argument '{unknown}'. {meant}")
    with pytest.raises(TypeError, match=f"^{message}$"):
        getattr(masks, name)(64, **given)


def test_specifications_say_what_makes_a_mask_causal() -> None:
    with pytest.raises(ValueError, match=r"not causal\. Write `& causal` after the mask\n"):
        masks.build("local(8, causal=True)", 64)


def test_a_name_like_no_other_is_refused_without_help() -> None:
    with pytest.raises(AttributeError, match=r"module 'masks' has no attribute 'zzz'\.$"):
        masks.zzz  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(masks, "_local")


def test_what_is_meant_exists() -> None:
    for name, meant in OTHER_NAMES.items():
        assert name not in masks.__all__
        words = [part.partition("(")[0] for part in meant.split(" or ")]
        assert set(words) <= {*masks.__all__, "attention without a layout, which attends to everything"}
