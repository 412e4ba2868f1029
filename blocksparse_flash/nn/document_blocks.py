"""Blocks of packed documents, which are moved apart so that each begins at a block boundary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..packed import checked_boundaries
from ..plan.block_selection import document_of_tokens
from .positions import RotaryTable, rotary_table


class DocumentBlocks(NamedTuple):
    """Packed documents moved apart: each begins at a block boundary, so each block has tokens of only one document.

    A document is followed by up to block_size - 1 empty places. The length of the new sequence depends only on the
    shape of cu_seqlens, so nothing waits for the device. Empty places have block -1, and so do tokens after the last
    document.

    places  int64 (batch | 1, 1, length, 1): the place of each token
    own     int64 (batch | 1, 1, new length, 1): the block of the token at each place, or -1
    first   int64 (batch | 1, 1, new length, 1): the first block of that token's document, or -1
    """

    places: Tensor
    own: Tensor
    first: Tensor

    @classmethod
    def of(cls, cu_seqlens: object, q: Tensor, k: Tensor, block_size: int) -> DocumentBlocks:
        """For queries and keys (batch, heads, length, head_dim) with these boundaries, which it checks."""
        bounds, length = checked_boundaries(cu_seqlens, q, k).long(), q.shape[2]
        number = document_of_tokens(bounds, length)[:, 0].long()
        # blocks before each document, and before the tokens after the last one
        before = torch.nn.functional.pad((-(-bounds.diff() // block_size)).cumsum(1), (1, 0))
        first = before.gather(1, number)
        places = torch.arange(length, device=q.device) - bounds.gather(1, number) + first * block_size
        own = (places // block_size).masked_fill(number == bounds.shape[1] - 1, -1)
        n_blocks = min(length, (length + bounds.shape[1] * (block_size - 1)) // block_size)
        unused = bounds.new_full((len(bounds), n_blocks * block_size), -1)
        own, first = (unused.scatter(1, places, each)[:, None, :, None] for each in (own, first))
        return cls(places[:, None, :, None], own, first)

    @property
    def begins(self) -> Tensor:
        """int64 (batch | 1, 1, new length, 1): the first block of each place's document.

        An empty place belongs to the document before it.
        """
        return self.first.cummax(2).values

    def apart(self, x: Tensor) -> Tensor:
        """(batch, heads, length, d) to (batch, heads, new length, d); places without tokens are 0."""
        zeros = x.new_zeros(*x.shape[:2], self.own.shape[2], x.shape[3])
        return zeros.scatter(2, self.places.expand_as(x), x)

    def together(self, x: Tensor) -> Tensor:
        """The inverse of `apart`."""
        return x.gather(2, self.places.expand(*x.shape[:2], -1, x.shape[3]))


def block_ranges(
    documents: DocumentBlocks | None, length: int, block_size: int, device: torch.device, q_start: int = 0
) -> tuple[Tensor, Tensor]:
    """(own block, first block of its document) of each query, int64 (..., length, 1).

    A query may select these blocks and those between them.

    documents  None: the queries are those from position q_start on of one document
    """
    if documents is not None:
        return documents.own, documents.first
    own = torch.arange(q_start, q_start + length, device=device)[:, None] // block_size
    return own, torch.zeros_like(own)


def document_table(cu_seqlens: object, x: Tensor, base: float, head_dim: int) -> RotaryTable:
    """The rotary table (batch | 1, 1, length, head_dim / 2) of positions that restart in each document.

    x  (batch, length, embed_dim)
    """
    heads = x[:, None]
    bounds = checked_boundaries(cu_seqlens, heads, heads).long()
    number = document_of_tokens(bounds, x.shape[1])[:, 0].long()
    return table_of(torch.arange(x.shape[1], device=x.device) - bounds.gather(1, number), base, head_dim)


def table_of(positions: Tensor, base: float, head_dim: int) -> RotaryTable:
    """The rotary table (batch, 1, length, head_dim / 2) of positions (batch, length)."""
    table = rotary_table(positions.flatten(), base, head_dim)
    return RotaryTable(*(each.unflatten(0, positions.shape)[:, None] for each in table))
