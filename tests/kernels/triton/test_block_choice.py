"""The kernel chooses the blocks that PyTorch's operations choose; on a CPU it runs in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocksparse_flash.nn.block_choice import choose_best

block_choice = pytest.importorskip("blocksparse_flash.kernels.triton.block_choice")

# rows of two documents of 5 and 8 tokens in blocks of 2, moved apart: places 5, 14 and 15 have no token
OWN = [0, 0, 1, 1, 2, -1, 3, 3, 4, 4, 5, 5, 6, 6, -1, -1]
FIRST = [0, 0, 0, 0, 0, -1, 3, 3, 3, 3, 3, 3, 3, 3, -1, -1]
N_SEEN = 7


def ranges(kind: str) -> tuple[Tensor, Tensor]:
    own, first = (torch.tensor(each)[:, None] for each in (OWN, FIRST))
    if kind == "document":
        return own.clamp(min=0).cummax(0).values, torch.zeros_like(own)
    other = torch.arange(len(OWN))[:, None] * N_SEEN // len(OWN)
    return torch.stack([own, other])[:, None], torch.stack([first, torch.zeros_like(other)])[:, None]


def both(scores: Tensor, device: torch.device, *, n_chosen: int, kind: str, **options: object) -> tuple[Tensor, Tensor]:
    """Of the kernel and of PyTorch, sorted."""
    own, earliest = ranges(kind)
    # rows before and after those of scores
    found, expected = (torch.full((*scores.shape[:2], scores.shape[2] + 3, n_chosen), -5) for _ in range(2))
    choose_best(expected, scores.clone(), own, earliest, 2, n_seen=N_SEEN, **options)  # type: ignore[arg-type]
    options = {"always": (0, 1), "strides": (1, 1)} | options
    arguments = [each.to(device) for each in (scores, own, earliest, found)]
    block_choice.choose_blocks(*arguments, 2, **options)
    assert (arguments[3][:, :, [0, 1, -1]] == -5).all()
    return arguments[3].sort(3).values.cpu(), expected.sort(3).values


def drawn(n: int, seed: int = 0) -> Tensor:
    """Different whole numbers, whose sums are exact."""
    shape = (2, 2, len(OWN), n)
    return torch.randint(-(2**18), 2**18, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("kind", ["document", "documents"])
@pytest.mark.parametrize(("n_chosen", "always"), [(3, (0, 1)), (4, (1, 2)), (1, (0, 1)), (9, (2, 1))])
def test_blocks(
    n_chosen: int, always: tuple[int, int], kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_choice, "SORTED", 4)
    found, expected = both(drawn(N_SEEN), device, n_chosen=n_chosen, kind=kind, always=always)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["document", "documents"])
@pytest.mark.parametrize(
    ("strides", "n"), [((4, 2), 25), ((2, 1), 13), ((1, 3), 5), ((1, 1), 6), ((3, 5), 14), ((4, 4), 0)]
)
def test_weights_of_keys(
    strides: tuple[int, int], n: int, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_choice, "SORTED", 2)
    # of no keys, as many as are selected: the choice between equal blocks is open
    found, expected = both(drawn(n).abs(), device, n_chosen=3 if n else 7, kind=kind, always=(1, 1), strides=strides)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, -torch.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_query_selects_different_blocks_up_to_its_own_whatever_the_scores(
    dtype: torch.dtype, bad: float, device: torch.device
) -> None:
    scores = drawn(N_SEEN)[:1, :1].to(dtype)
    scores[..., ::2] = bad
    own = ranges("document")[0]
    for cols in both(scores, device, n_chosen=3, kind="document"):
        chosen = cols[0, 0, 2:-1]
        assert (chosen <= own).all() and (chosen == own).any(1).all()
        for row, last in zip(chosen.tolist(), own[:, 0].tolist(), strict=True):
            used = [col for col in row if col >= 0]
            assert len(used) == len(set(used)) == min(3, last + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_infinite_scores_do_not_displace_blocks_that_are_always_selected(
    dtype: torch.dtype, device: torch.device
) -> None:
    scores = torch.full((1, 1, len(OWN), N_SEEN), torch.inf, dtype=dtype, device=device)
    own, earliest = (each.to(device) for each in ranges("document"))
    cols = torch.empty(1, 1, len(OWN), 2, dtype=torch.int64, device=device)
    block_choice.choose_blocks(scores, own, earliest, cols, 0, always=(0, 1), strides=(1, 1))
    assert torch.equal(cols[0, 0, :, :1], own)
    # equal scores: the first block
    assert torch.equal(cols[0, 0, :, 1:], torch.where(own > 0, 0, -1))


def test_too_many_blocks_or_strides_are_left_to_pytorch() -> None:
    scores = torch.zeros(1)
    assert block_choice.can_choose(scores, 256, (4, 2))
    assert not block_choice.can_choose(scores, 257, (4, 2))
    assert not block_choice.can_choose(scores, 4, (60, 8))
    assert not block_choice.can_choose(scores.double(), 4, (4, 2))
