"""ListOps samples: published statistics, grammar and guesses."""

from __future__ import annotations

import statistics
from collections import Counter

import numpy as np
import pytest

from benchmarks.lra import floors, listops
from benchmarks.lra.listops import PRESETS, Preset, Sample


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    # 4,000: the standard error of an accuracy is under 0.008
    return listops.generate(4000, PRESETS["lra"], seed=0)


def test_lengths_are_those_of_long_range_arena(samples: list[Sample]) -> None:
    """8,000 samples of another implementation: mean 1038 to 1041, median 957, deciles 579 and 1640."""
    lengths = [len(sample.tokens) for sample in samples]
    deciles = statistics.quantiles(lengths, n=10)
    assert 500 < min(lengths) and max(lengths) < 2000
    assert statistics.mean(lengths) == pytest.approx(1040, abs=20)
    assert deciles[4] == pytest.approx(957, abs=35)
    assert deciles[0] == pytest.approx(579, abs=15)
    assert deciles[8] == pytest.approx(1640, abs=30)


def test_labels_are_those_of_long_range_arena(samples: list[Sample]) -> None:
    counts = Counter(sample.label for sample in samples)
    expected = (0.167, 0.089, 0.073, 0.080, 0.090, 0.088, 0.082, 0.074, 0.087, 0.171)
    for label, share in enumerate(expected):
        assert counts[label] / len(samples) == pytest.approx(share, abs=0.02)


def test_trees_are_those_of_long_range_arena(samples: list[Sample]) -> None:
    """Every accepted tree is as deep as it may be, and roots have many children."""
    assert all(_operator_depth(sample.tokens) == 9 for sample in samples)
    arities = Counter(_root_arity(sample.tokens) for sample in samples)
    assert min(arities) == 2 and max(arities) == 10
    assert arities[10] / len(samples) == pytest.approx(0.16, abs=0.02)
    assert arities[2] / len(samples) == pytest.approx(0.047, abs=0.015)


def _operator_depth(tokens: bytes) -> int:
    """Depth of the deepest operator: 1 for an operator over digits."""
    depth = deepest = 0
    for token in tokens:
        depth += listops.FIRST_OPERATOR <= token < listops.CLOSE
        deepest = max(deepest, depth)
        depth -= token == listops.CLOSE
    return deepest


def _root_arity(tokens: bytes) -> int:
    depth = arity = 0
    for token in tokens:
        depth -= token == listops.CLOSE
        arity += depth == 1 and token != listops.CLOSE
        depth += listops.FIRST_OPERATOR <= token < listops.CLOSE
    return arity


@pytest.mark.parametrize(
    ("depth", "accuracy"),
    [(0, 0.365), (1, 0.603), (2, 0.743), (3, 0.836), (4, 0.900), (5, 0.934), (6, 0.960), (7, 0.974), (9, 1.0)],
)
def test_looking_deeper_is_worth_what_it_is_in_long_range_arena(
    samples: list[Sample], depth: int, accuracy: float
) -> None:
    assert listops.oracle_accuracy(samples, depth=depth) == pytest.approx(accuracy, abs=0.02)


def _floor(samples: list[Sample]) -> float:
    roots, labels = np.array([(sample.tokens[0], sample.label) for sample in samples]).T
    return floors.best_guess(roots, labels)[0]


def test_the_floor_is_the_best_that_the_first_token_allows(samples: list[Sample]) -> None:
    floor = _floor(samples)
    assert floor == pytest.approx(0.365, abs=0.02)
    assert floor >= listops.oracle_accuracy(samples, depth=0)
    # two MAX samples with one label between them, two SM samples that agree
    small = [Sample(listops.parse(text), label) for text, label in (("[MAX", 9), ("[MAX", 8), ("[SM", 1), ("[SM", 1))]
    assert _floor(small) == 0.75


@pytest.mark.parametrize("rules", [*PRESETS.values(), Preset(3, 4, 5, 30)], ids=str)
def test_labels_are_values_and_lengths_are_within_the_limits(rules: Preset) -> None:
    drawn = listops.generate(300, rules, seed=3)
    assert len({sample.tokens for sample in drawn}) == 300
    for sample in drawn:
        assert listops.evaluate(sample.tokens) == sample.label
        assert rules.min_length < len(sample.tokens) < rules.max_length
        assert 1 <= _operator_depth(sample.tokens) < rules.max_depth
        assert set(sample.tokens) <= set(range(1, listops.N_TOKENS))
        assert listops.parse(listops.to_text(sample.tokens)) == sample.tokens


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[MIN 3 2 7 ]", 2),
        ("[MAX 3 2 7 ]", 7),
        ("[MED 1 5 8 9 2 ]", 5),
        # the mean of the middle two is truncated
        ("[MED 4 5 ]", 4),
        ("[MED 9 1 2 6 ]", 4),
        ("[SM 8 7 6 ]", 1),
        ("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]", 5),
        # as in the released files
        ("( ( ( ( [MAX 4 ) 3 ) ( ( ( [MIN 2 ) 3 ) ] ) ) ] )", 4),
        ("[SM [SM 9 9 X [MED 7 X X", 5),
        ("7", 7),
    ],
)
def test_expressions_have_the_value_of_their_operators(text: str, value: int) -> None:
    assert listops.evaluate(listops.parse(text)) == value


@pytest.mark.parametrize("text", ["", "3 4", "[MIN 3 2", "[MIN ]", "3 ]", "]", "[MIN 3 ] 4"])
def test_incomplete_expressions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="one complete expression"):
        listops.evaluate(listops.parse(text))


def test_unknown_symbols_and_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got '\[SUM'"):
        listops.parse("[SUM 1 2 ]")
    with pytest.raises(ValueError, match="count must be 0 or more"):
        listops.generate(-1, PRESETS["lra"], seed=0)


def test_an_impossible_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # two digits under one of four operators: 400 samples exist
    monkeypatch.setattr(listops, "PATIENCE", 20_000)
    rules = Preset(2, 2, 3, 5)
    assert len(listops.generate(400, rules, seed=0)) == 400
    with pytest.raises(ValueError, match="after 400 of 401"):
        listops.generate(401, rules, seed=0)


def test_a_seed_decides_the_samples() -> None:
    first, again = (listops.generate(50, PRESETS["small"], seed=7) for _ in range(2))
    assert first == again
    assert not set(first) & set(listops.generate(50, PRESETS["small"], seed=8))
    assert listops.generate(20, PRESETS["small"], seed=7) == first[:20]
    # on every machine and Python version
    assert listops.to_text(listops.generate(1, Preset(3, 4, 5, 30), seed=1)[0].tokens) == "[MIN 6 0 3 2 ]"


def test_splits_are_disjoint_and_the_test_set_does_not_depend_on_the_others() -> None:
    splits = listops.splits(PRESETS["small"], n_train=60, n_validation=20, n_test=10, seed=0)
    assert [len(part) for part in splits] == [60, 20, 10]
    assert len({sample.tokens for part in splits for sample in part}) == 90
    assert listops.splits(PRESETS["small"], n_train=5, n_validation=2, n_test=10, seed=0).test == splits.test
