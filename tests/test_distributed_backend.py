"""Which backend do several ranks take? The one that one process would, whatever part each holds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

import masks
from blocksparse_flash import distributed, functional, ops
from blocksparse_flash.distributed import functional as shared

LENGTH, HEADS, DIM = 512, (2, 1), 16


def test_several_ranks_choose_by_the_size_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    unfit: list[str | None] = []

    def choose(*arguments: Any) -> str:
        unfit.append(arguments[3])
        return "eager"

    monkeypatch.setattr(functional, "_choose", choose)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plan = distributed.plan(masks.local(LENGTH, window=64), dist.group.WORLD, heads=HEADS)
        q, k = (torch.zeros(1, heads, LENGTH, DIM) for heads in HEADS)
        # as a rank that holds half of the tokens
        halved = dataclasses.replace(plan, length=2 * LENGTH)
        for asked, enough in ((plan, sum(HEADS) * LENGTH * DIM), (halved, sum(HEADS) * 2 * LENGTH * DIM)):
            for worth in (enough + 1, enough):
                monkeypatch.setattr(ops, "WORTH_HOPPER", worth)
                shared._checked(q, k, k, asked, 0, None, None, "auto")
        shared._checked(q, k, k, plan, 0, None, None, "hopper")
    finally:
        dist.destroy_process_group()
    assert unfit == [functional.SMALL, None, functional.SMALL, None, None]
