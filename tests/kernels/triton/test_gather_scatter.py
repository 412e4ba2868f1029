"""The gather and scatter kernels equal the PyTorch fallback; on a CPU they run in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocksparse_flash.distributed import gather_scatter as rows

pytest.importorskip("triton")


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def strided(x: Tensor) -> Tensor:
    """The same values as a view of a message: tokens first, between other features."""
    batch, heads, n, features = x.shape
    message = torch.full((n, batch, heads, features + 3), torch.nan, dtype=x.dtype, device=x.device)
    part = message[..., 1 : features + 1].permute(1, 2, 0, 3)
    return part.copy_(x)


def message_of(tensors: list[Tensor]) -> Tensor:
    """The tensors as one message: tokens first, features concatenated."""
    return torch.cat([x.permute(2, 0, 1, 3) for x in tensors], dim=3).contiguous()


# 8: less than a vector; 12: not a power of two; 300 rows: several programs, the last one ragged
@pytest.mark.parametrize("features", [1, 8, 12, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("has_source", "has_target"), [(True, False), (False, True), (True, True), (False, False)])
def test_rows_are_moved(
    features: int, dtype: torch.dtype, has_source: bool, has_target: bool, device: torch.device
) -> None:
    n = 300
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1)).to(device)
    for change in (lambda x: x, strided):
        source = change(drawn((2, 3, n, features), dtype, device, 2))
        source_index, target_index = order if has_source else None, order.flip(0) if has_target else None
        found = [change(torch.zeros(2, 3, n, features, dtype=dtype, device=device)) for _ in range(2)]
        for target, backend in zip(found, ("eager", "triton"), strict=True):
            rows.move([source], [target], backend, source_index=source_index, target_index=target_index)
        assert torch.equal(*found)
        assert torch.equal(
            found[0][:, :, order.flip(0) if has_target else slice(None)],
            source[:, :, order if has_source else slice(None)],
        )


def test_a_subset_of_rows_is_moved_and_the_others_are_unchanged(device: torch.device) -> None:
    source, some = drawn((1, 2, 40, 8), torch.bfloat16, device, 3), torch.tensor([39, 0, 7], device=device)
    for backend in ("eager", "triton"):
        assert torch.equal(rows.picked([source], some, backend)[0], source[:, :, some])
        target = torch.ones_like(source)
        rows.move([source[:, :, :3]], [target], backend, target_index=some)
        assert torch.equal(target[:, :, some], source[:, :, :3])
        target[:, :, some] = 1
        assert (target == 1).all()


# 5 tensors: more than one launch takes
@pytest.mark.parametrize("widths", [(8, 8), (128, 12), (12, 128), (16, 8, 1), (8, 16, 12, 2), (8, 8, 8, 1, 1)])
def test_several_tensors_are_moved_at_once(widths: tuple[int, ...], device: torch.device) -> None:
    """A subset of rows of tensors with different widths and types, like outputs and their lse."""
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))[:50].to(device)
    types = [torch.float32 if n == 1 else torch.bfloat16 for n in widths]
    sources = [strided(drawn((2, 3, 70, n), dtype, device, n)) for n, dtype in zip(widths, types, strict=True)]
    for backend in ("eager", "triton"):
        picked = rows.picked(sources, order, backend)
        targets = [torch.zeros_like(source) for source in sources]
        rows.move(picked, targets, backend, target_index=order)
        for source, some, target in zip(sources, picked, targets, strict=True):
            assert torch.equal(some, source[:, :, order])
            assert torch.equal(target[:, :, order], source[:, :, order])
            assert target.count_nonzero() == some.count_nonzero()


@pytest.mark.parametrize("widths", [(8,), (128, 12), (12, 128), (16, 16, 8, 2)])
def test_messages_are_packed_and_unpacked(widths: tuple[int, ...], device: torch.device) -> None:
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))[:50].to(device)
    sources = [drawn((2, 3, 70, n), torch.bfloat16, device, n) for n in widths]
    for backend in ("eager", "triton"):
        message = rows.pack(sources, order, backend)
        assert torch.equal(message, message_of([source[:, :, order] for source in sources]))
        assert message.is_contiguous()
        targets = [torch.zeros_like(source) for source in sources]
        rows.unpack(message, targets, order, backend)
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(target[:, :, order], source[:, :, order])
            assert target.count_nonzero() == source[:, :, order].count_nonzero()


def test_nothing_is_moved_without_rows(device: torch.device) -> None:
    none, target = torch.zeros(0, dtype=torch.long, device=device), torch.ones(1, 2, 5, 8, device=device)
    for backend in ("eager", "triton"):
        rows.move([torch.zeros(1, 2, 5, 8, device=device)], [target], backend, source_index=none, target_index=none)
        rows.unpack(rows.pack([target], none, backend), [target], none, backend)
        assert (target == 1).all()


def drawn_table(limits: list[int], n_tokens: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """For each rank and token, a random row below the rank's limit, or -1 for none."""
    values = torch.rand(len(limits), n_tokens, generator=generator) * (torch.tensor(limits)[:, None] + 20)
    return (values.long() - 20).clamp(min=-1).int().to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n_bases", [0, 1, 2])
@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("widths", [(12,), (12, 8)])
def test_sums_are_in_the_order_of_ranks(
    dtype: torch.dtype, n_bases: int, n_ranks: int, widths: tuple[int, ...], device: torch.device
) -> None:
    """A subset of tokens, in row on the first base; bitwise equal to a loop over tokens and ranks in float32."""
    n, n_mine, n_others, rank = 70, 30, 50, 1
    generator = torch.Generator().manual_seed(n_bases + n_ranks)
    mine = [drawn((2, 2, n_mine, width), dtype, device, 4 + width) for width in widths]
    others = [drawn((2, 2, n_others, width), dtype, device, 5 + width) for width in widths]
    bases = [[drawn((2, 2, n, width), dtype, device, 6 + i + width) for width in widths] for i in range(n_bases)]
    tokens = torch.randperm(n, generator=generator)[:40].sort().values.to(device)
    table = drawn_table([n_mine if i == rank else n_others for i in range(n_ranks)], 40, generator, device)

    def fresh() -> list[Tensor]:
        return [torch.zeros(2, 2, n, width, dtype=dtype, device=device) for width in widths]

    expected = [base.clone() for base in bases[0]] if bases else fresh()
    for i_sum, width in enumerate(widths):
        for i, token in enumerate(tokens.tolist()):
            total = torch.zeros(2, 2, width, device=device)
            for i_rank in range(n_ranks):
                if i_rank == rank:
                    for base in bases:
                        total += base[i_sum][:, :, token].float()
                row = int(table[i_rank, i])
                if row >= 0:
                    total += (mine if i_rank == rank else others)[i_sum][:, :, row].float()
            expected[i_sum][:, :, token] = total.to(dtype)

    for backend in ("eager", "triton"):
        copies = [[base.clone() for base in each] for each in bases]
        totals = copies[0] if copies else fresh()
        rows.add(totals, mine, message_of(others), copies, table, tokens, rank, backend)
        # Triton's interpreter truncates where a GPU rounds
        truncates = backend == "triton" and dtype == torch.bfloat16 and device.type == "cpu"
        for total, wanted in zip(totals, expected, strict=True):
            assert torch.allclose(total, wanted, rtol=2**-7 if truncates else 0, atol=0), backend


def test_sums_of_all_tokens_need_no_messages(device: torch.device) -> None:
    mine, table = (
        drawn((1, 2, 9, 8), torch.float32, device, 1),
        torch.full((2, 9), -1, dtype=torch.int32, device=device),
    )
    table[0, 3:] = torch.arange(6, device=device)
    for backend in ("eager", "triton"):
        total = torch.full((1, 2, 9, 8), torch.nan, device=device)
        rows.add([total], [mine], message_of([mine[:, :, :0]]), [], table, None, 0, backend)
        assert torch.equal(total[:, :, 3:], mine[:, :, :6]) and (total[:, :, :3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n_ranks", "width"), [(2, 8), (3, 12), (4, 5)])
def test_results_of_ranks_are_merged(dtype: torch.dtype, n_ranks: int, width: int, device: torch.device) -> None:
    """Compared with a loop over tokens in float64. A token without keys on any rank gets 0 and -inf; others stay."""
    n, n_mine, n_others, rank = 70, 30, 50, 1
    generator = torch.Generator().manual_seed(n_ranks)
    sizes = [n_mine if i == rank else n_others for i in range(n_ranks)]
    parts = [drawn((2, 2, size, width), dtype, device, 4 + i) for i, size in enumerate((n_mine, n_others))]
    lses = [8 * drawn((2, 2, size), torch.float32, device, 6 + i) for i, size in enumerate((n_mine, n_others))]
    # rows without keys on that rank
    for lse in lses:
        lse[:, :, ::5] = -torch.inf
    tokens = torch.randperm(n, generator=generator)[:40].sort().values.to(device)
    table = drawn_table(sizes, 40, generator, device)
    table[:, 3] = -1
    message = message_of([parts[1], lses[1][..., None].view(dtype)])

    expected, expected_lse = (torch.ones(2, 2, n, *rest, dtype=torch.float64) for rest in ((width,), ()))
    for i, token in enumerate(tokens.tolist()):
        total, weight = torch.zeros(2, 2, width, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
        for i_rank in range(n_ranks):
            row = int(table[i_rank, i])
            if row >= 0:
                which = int(i_rank != rank)
                share = lses[which][:, :, row].double().cpu().exp()
                weight += share
                total += share[..., None] * parts[which][:, :, row].double().cpu()
        expected[:, :, token] = torch.where(weight == 0, 0.0, 1 / weight)[..., None] * total
        expected_lse[:, :, token] = weight.log()

    for backend in ("eager", "triton"):
        out, lse = torch.ones(2, 2, n, width, dtype=dtype, device=device), torch.ones(2, 2, n, device=device)
        rows.merge(out, lse, (parts[0], lses[0]), message, table, tokens, rank, backend)
        eps = torch.finfo(dtype).eps
        assert torch.allclose(out.double().cpu(), expected, rtol=2 * eps, atol=2 * eps), backend
        assert torch.allclose(lse.double().cpu(), expected_lse, rtol=1e-6, atol=1e-6), backend
        assert (lse[:, :, tokens[3]] == -torch.inf).all() and (out[:, :, tokens[3]] == 0).all()
