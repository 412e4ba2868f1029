"""Checks that all ranks of a group pass the same arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..runtime import tracing

Result = TypeVar("Result")
Object = TypeVar("Object")

_REFUSED = "refused"


def agreed(make: Callable[[], tuple[Result, Mapping[str, str]]], group: Any, name: str) -> Result:
    """The result of `make`, after all ranks have compared their facts.

    make     returns (made, facts), facts in a fixed order; its error is sent to all ranks
    name     of the call, for the message
    raises   on every rank: its own error if it has one, otherwise ValueError naming the ranks that differ, the argument
             and its values. RuntimeError if a rank does not call within the group's timeout
    """
    error: Exception | None = None
    made: Result | None = None
    try:
        made, facts = make()
    # of any type, since a rank that failed must not leave the others waiting
    except Exception as refused:  # noqa: BLE001  raised below
        error, facts = refused, {_REFUSED: str(refused)}
    said = gather_objects(dict(facts), group)
    if error is not None:
        raise error
    complaint = _difference(said)
    if complaint:
        raise ValueError(f"{name}: {complaint}")
    assert made is not None
    return made


def refuse_compiled_calls() -> None:
    """ValueError in torch.compile, for calls that the ranks compare."""
    if torch.compiler.is_compiling():
        raise ValueError(
            "plan(..., check_calls=True) compares the calls of all ranks on the host, which torch.compile cannot "
            "trace: compile with check_calls=False"
        )


def gather_objects(what: Object, group: Any) -> list[Object]:
    """The objects of all ranks, in rank order. Every rank of the group must call it."""
    said: list[Any] = [None] * dist.get_world_size(group)
    # within a transform it could not read the tensors that it makes
    with tracing.outside_transforms():
        dist.all_gather_object(said, what, group=group)
    return said


def _difference(said: list[dict[str, str]]) -> str:
    """The ranks that differ from the majority, and the first fact in which they do; empty if none does."""
    refused = {rank: facts[_REFUSED] for rank, facts in enumerate(said) if _REFUSED in facts}
    if refused:
        return "; ".join(f"rank {rank} refused its arguments: {why}" for rank, why in refused.items())
    for fact in said[0]:
        values = [facts.get(fact, "nothing") for facts in said]
        # the first of equally common values
        usual = Counter(values).most_common(1)[0][0]
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            ranks = ", ".join(map(str, odd))
            return (
                f"every rank must pass the same arguments, but rank {ranks} differs in {fact}: "
                f"{', '.join(dict.fromkeys(values[rank] for rank in odd))}, the others have {usual}"
            )
    return ""
