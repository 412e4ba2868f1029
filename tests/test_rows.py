"""Do tokens move and add up alike by kernel and by PyTorch? On the CPU the kernels run in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocksparse_flash.distributed import rows

pytest.importorskip("triton")


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def strided(x: Tensor) -> Tensor:
    """The same values as a message holds them: tokens first, other features beside."""
    batch, heads, n, features = x.shape
    message = torch.full((n, batch, heads, features + 3), torch.nan, dtype=x.dtype, device=x.device)
    part = message[..., 1 : features + 1].permute(1, 2, 0, 3)
    return part.copy_(x)


# 8: less than a vector; 12: no power of two; 300 rows: more than one program, the last one ragged
@pytest.mark.parametrize("features", [1, 8, 12, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("taken", "put"), [(True, False), (False, True), (True, True), (False, False)])
def test_rows_are_copied(features: int, dtype: torch.dtype, taken: bool, put: bool, device: torch.device) -> None:
    n = 300
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1)).to(device)
    for change in (lambda x: x, strided):
        source = change(drawn((2, 3, n, features), dtype, device, 2))
        lists = {"taken": order if taken else None, "put": order.flip(0) if put else None}
        found = [change(torch.zeros(2, 3, n, features, dtype=dtype, device=device)) for _ in range(2)]
        for target, backend in zip(found, ("eager", "triton"), strict=True):
            assert rows.copy(source, target, backend, **lists) is target
        assert torch.equal(*found)
        assert torch.equal(
            found[0][:, :, order.flip(0) if put else slice(None)], source[:, :, order if taken else slice(None)]
        )


def test_some_rows_are_picked_and_the_others_stay(device: torch.device) -> None:
    source, some = drawn((1, 2, 40, 8), torch.bfloat16, device, 3), torch.tensor([39, 0, 7], device=device)
    for backend in ("eager", "triton"):
        assert torch.equal(rows.picked(source, some, backend), source[:, :, some])
        target = torch.ones_like(source)
        rows.copy(source[:, :, :3], target, backend, put=some)
        assert torch.equal(target[:, :, some], source[:, :, :3])
        target[:, :, some] = 1
        assert (target == 1).all()


@pytest.mark.parametrize("widths", [(8, 8), (128, 12), (12, 128)])
def test_two_tensors_are_copied_at_once(widths: tuple[int, int], device: torch.device) -> None:
    """As keys and values of other widths are: into and out of a message, some rows."""
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))[:50].to(device)
    sources = [strided(drawn((2, 3, 70, n), torch.bfloat16, device, n)) for n in widths]
    for backend in ("eager", "triton"):
        picked = rows.picked_both(sources, order, backend)
        targets = [torch.zeros_like(source) for source in sources]
        rows.copy_both(picked, targets, backend, put=order)
        for source, some, target in zip(sources, picked, targets, strict=True):
            assert torch.equal(some, source[:, :, order])
            assert torch.equal(target[:, :, order], source[:, :, order])
            assert target.count_nonzero() == some.count_nonzero()


def test_nothing_is_copied_without_rows(device: torch.device) -> None:
    none, target = torch.zeros(0, dtype=torch.long, device=device), torch.ones(1, 2, 5, 8, device=device)
    for backend in ("eager", "triton"):
        rows.copy(torch.zeros(1, 2, 5, 8, device=device), target, backend, taken=none, put=none)
        rows.copy(torch.zeros(1, 2, 0, 8, device=device), target, backend, put=none)
        assert (target == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n_bases", [0, 1, 2])
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_sums_are_in_the_order_of_ranks(dtype: torch.dtype, n_bases: int, n_ranks: int, device: torch.device) -> None:
    """Of some tokens, in place on the first base; bit by bit those of a loop over tokens and ranks in float32."""
    n, n_mine, n_others, features, rank = 70, 30, 50, 12, 1
    generator = torch.Generator().manual_seed(n_bases + n_ranks)
    mine = drawn((2, 2, n_mine, features), dtype, device, 4)
    others = strided(drawn((2, 2, n_others, features), dtype, device, 5))
    bases = [drawn((2, 2, n, features), dtype, device, 6 + i) for i in range(n_bases)]
    tokens = torch.randperm(n, generator=generator)[:40].sort().values.to(device)
    limits = torch.full((n_ranks, 1), n_others)
    limits[rank] = n_mine
    table = (torch.rand(n_ranks, 40, generator=generator) * (limits + 20)).long() - 20
    table = table.clamp(min=-1).int().to(device)

    expected = bases[0].clone() if bases else torch.zeros(2, 2, n, features, dtype=dtype, device=device)
    for i, token in enumerate(tokens.tolist()):
        total = torch.zeros(2, 2, features, device=device)
        for i_rank in range(n_ranks):
            if i_rank == rank:
                for base in bases:
                    total += base[:, :, token].float()
            place = int(table[i_rank, i])
            if place >= 0:
                total += (mine if i_rank == rank else others)[:, :, place].float()
        expected[:, :, token] = total.to(dtype)

    for backend in ("eager", "triton"):
        copies = [base.clone() for base in bases]
        total = copies[0] if copies else torch.zeros(2, 2, n, features, dtype=dtype, device=device)
        rows.add(total, mine, others, copies, table, tokens, rank, backend)
        # Triton's interpreter cuts bits off where a GPU rounds
        cuts = backend == "triton" and dtype == torch.bfloat16 and device.type == "cpu"
        assert torch.allclose(total, expected, rtol=2**-7 if cuts else 0, atol=0), backend


def test_a_sum_of_all_tokens_without_messages(device: torch.device) -> None:
    mine, table = (
        drawn((1, 2, 9, 8), torch.float32, device, 1),
        torch.full((2, 9), -1, dtype=torch.int32, device=device),
    )
    table[0, 3:] = torch.arange(6, device=device)
    for backend in ("eager", "triton"):
        total = torch.full((1, 2, 9, 8), torch.nan, device=device)
        rows.add(total, mine, mine[:, :, :0], [], table, None, 0, backend)
        assert torch.equal(total[:, :, 3:], mine[:, :, :6]) and (total[:, :, :3] == 0).all()
