"""Do all ranks ask for the same? If not, every rank hears which one differs, in what.

Knows a process group and what each rank says of itself in words. Must not know layouts or plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

Made = TypeVar("Made")
Said = TypeVar("Said")

_REFUSED = "refused"


def agreed(make: Callable[[], tuple[Made, Mapping[str, str]]], group: Any, name: str) -> Made:
    """What `make` makes, once all ranks have made theirs and said the same of it.

    make     returns (made, facts), facts in a fixed order; a TypeError or ValueError of it is told to all ranks
    name     of the call, for the message
    raises   on every rank: its own error where it has one, else ValueError naming the ranks that differ, in what, and
             what each of them says. RuntimeError where a rank does not come within the group's timeout
    """
    error: TypeError | ValueError | None = None
    made: Made | None = None
    try:
        made, facts = make()
    except (TypeError, ValueError) as refused:
        error, facts = refused, {_REFUSED: str(refused)}
    # a fixed collective whatever happened before, so that all ranks meet here
    said = gather_objects(dict(facts), group)
    if error is not None:
        raise error
    complaint = _difference(said)
    if complaint:
        raise ValueError(f"{name}: {complaint}")
    assert made is not None
    return made


def gather_objects(what: Said, group: Any) -> list[Said]:
    """What each rank says, rank after rank. Every rank of the group must call it."""
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, what, group=group)
    return said


def _difference(said: list[dict[str, str]]) -> str:
    """Which ranks differ from most, and in the first fact where they do; empty if none does."""
    refused = {rank: facts[_REFUSED] for rank, facts in enumerate(said) if _REFUSED in facts}
    if refused:
        return "; ".join(f"rank {rank} refused its arguments: {why}" for rank, why in refused.items())
    for fact in said[0]:
        values = [facts.get(fact, "nothing") for facts in said]
        # of equally common ones the first
        usual = Counter(values).most_common(1)[0][0]
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            ranks = ", ".join(map(str, odd))
            return (
                f"every rank must pass the same arguments, but rank {ranks} differs in {fact}: "
                f"{', '.join(dict.fromkeys(values[rank] for rank in odd))}, the others have {usual}"
            )
    return ""
