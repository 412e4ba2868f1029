"""The message about ranks whose arguments differ; context_cases.py tests that every rank raises it."""

from __future__ import annotations

from blocksparse_flash.distributed.agreement import _difference


def test_equal_facts_are_no_difference() -> None:
    assert _difference([{"a": "1", "b": "2"}] * 3) == ""


def test_the_minority_is_the_odd_one() -> None:
    said = _difference([{"a": "1", "b": "3"}, {"a": "1", "b": "2"}, {"a": "1", "b": "2"}])
    assert "rank 0 differs in b: 3, the others have 2" in said


def test_of_two_ranks_the_second_is_the_odd_one() -> None:
    assert "rank 1 differs in a" in _difference([{"a": "1"}, {"a": "2"}])


def test_refusals_come_first() -> None:
    said = _difference([{"a": "1"}, {"refused": "order must be ..."}, {"a": "2"}])
    assert said == "rank 1 refused its arguments: order must be ..."
