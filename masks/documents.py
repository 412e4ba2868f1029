"""Packed documents, laid end to end and given by cumulative lengths.

Bitmasks of one sequence without windows are written word by word instead of through a predicate: document boundaries
differ in almost every block, so that a predicate would be evaluated for every pair. Other documents are made from the
ranges of keys of each query, which takes 3 to 8 times as long (300 documents of 65,536 tokens in all, causal: 40 and 5
ms on one core). Boundaries on a GPU stay there. Both are in blocksparse_flash/packed.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from blocksparse_flash import BlockLayout
from blocksparse_flash.packed import PackedLayout, layout_on_host
from blocksparse_flash.plan.packed_builder import MAX_TOKENS, Documents, can_build

from .canvas import BlockSize, Canvas, Length, check_nnz, read_canvas, spread
from .checks import check_dense, read_integer, read_integers, read_switch
from .kinds import kinds_of_sides
from .local import Window, read_window
from .public import public

# of one sequence, or of each sequence of a batch
Boundaries = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | torch.Tensor
# LOW_BITS[n] has its n lowest bits set
LOW_BITS = ((np.uint64(1) << np.arange(33, dtype=np.uint64)) - np.uint64(1)).astype(np.uint32)


class Packed(NamedTuple):
    """The nonempty documents, padded to whole blocks: the last one extends to the end of the last block.

    numbers  int64 (padded length,): the document of each token
    begins   int64 (documents,): its first token
    ends     int64 (documents,): the token after its last one
    """

    numbers: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


def read_bounds(cu_seqlens: Any, name: str, *, is_padded: bool = False) -> np.ndarray:
    """Checked boundaries. is_padded: whether repeated entries may stand for documents that do not exist."""
    bounds = read_integers(name, cu_seqlens)
    if not bounds.size:
        raise ValueError(f"{name}: expected at least one entry, 0, got none")
    if bounds[0] != 0:
        raise ValueError(
            f"{name}: expected 0 as the first entry, got {bounds[0]}. For lengths, pass their cumulative sum"
        )
    drops = np.flatnonzero(np.diff(bounds) < 0)
    if drops.size:
        place = drops[0]
        raise ValueError(
            f"{name}: expected entries that never decrease, got {bounds[place]} at index {place} "
            f"and {bounds[place + 1]} after it. For lengths, pass their cumulative sum"
        )
    if not is_padded and bounds.size >= 16 and bounds[-1] < bounds.size // 2 and np.diff(bounds).max() == 1:
        raise ValueError(
            f"{name}: expected where documents begin and end, got {bounds.size} entries from 0 to {bounds[-1]}, "
            "which look like the document of each token. Write "
            "[*numpy.flatnonzero(numpy.diff(ids, prepend=-1)), len(ids)]"
        )
    return bounds


def _read_rows(cu_seqlens: Boundaries, name: str, *, is_padded: bool) -> np.ndarray:
    """int64 (batch, documents + 1): boundaries of each sequence; one row for boundaries without a batch."""
    if isinstance(cu_seqlens, np.ndarray | torch.Tensor):
        is_batch = cu_seqlens.ndim == 2 and cu_seqlens.shape[0] > 0
    else:
        is_batch = isinstance(cu_seqlens, list | tuple) and isinstance((cu_seqlens or [0])[0], list | tuple)
    if not is_batch:
        return read_bounds(cu_seqlens, name, is_padded=is_padded)[None]
    rows = [read_bounds(row, f"{name}[{i}]", is_padded=True) for i, row in enumerate(cu_seqlens)]
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"{name}: expected as many entries for each sequence, got {[len(row) for row in rows]}: repeat the last one"
        )
    return np.stack(rows)


def _pack(canvas: Canvas, bounds: np.ndarray) -> Packed:
    padded_len = max(canvas.n_rows * canvas.block_q, canvas.n_cols * canvas.block_kv)
    begins = bounds[:-1][np.diff(bounds) > 0]
    is_begin = np.zeros(padded_len, dtype=bool)
    is_begin[begins[1:]] = True
    return Packed(numbers=np.cumsum(is_begin), begins=begins, ends=np.append(begins[1:], padded_len))


def _candidates(canvas: Canvas, packed: Packed, *, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that hold a pair, ascending: from the first query's document to the last query's."""
    rows = np.arange(canvas.n_rows)
    first_query, last_query = canvas.row_span(rows)
    last_key = last_query if causal else packed.ends[packed.numbers[last_query]] - 1
    first, stop = canvas.cols_between(packed.begins[packed.numbers[first_query]], last_key)
    return spread(first, stop)


def _dedup_keys(canvas: Canvas, packed: Packed, rows: np.ndarray, cols: np.ndarray, *, causal: bool) -> np.ndarray:
    """int64 (blocks,), equal for blocks with equal bits: from document boundaries within a block and their distance."""
    numbers = packed.numbers
    is_begin = np.diff(numbers, prepend=numbers[:1]) > 0
    row_kinds = kinds_of_sides(is_begin[: canvas.n_rows * canvas.block_q], canvas.block_q)
    col_kinds = kinds_of_sides(is_begin[: canvas.n_cols * canvas.block_kv], canvas.block_kv)
    n_col_kinds = int(col_kinds.max(initial=0)) + 1
    # exceeds the number of documents in a block, and its reach beyond the diagonal
    span = canvas.block_q + canvas.block_kv
    apart = numbers[rows * canvas.block_q] - numbers[cols * canvas.block_kv]
    keys = (row_kinds[rows] * n_col_kinds + col_kinds[cols]) * (2 * span) + apart + span
    if causal:
        lowest, _ = canvas.distances(rows, cols)
        # blocks below the diagonal do not depend on the distance
        keys = keys * span - np.minimum(lowest, 0)
    return keys


def _bitmasks(canvas: Canvas, packed: Packed, rows: np.ndarray, cols: np.ndarray, *, causal: bool) -> np.ndarray:
    """int32 (blocks, block_q, words), from the first and last key of each query: its keys are one range."""
    # [block_kv + 1, words]: row n has the first n bits set
    keys = np.arange(canvas.block_kv + 1)[:, None] - np.arange(0, canvas.block_kv, 32)
    first_bits = LOW_BITS[np.clip(keys, 0, 32)]
    # [blocks, block_q]
    q_pos = rows[:, None] * canvas.block_q + np.arange(canvas.block_q)
    document = packed.numbers[q_pos]
    origin = cols[:, None] * canvas.block_kv
    stop = (q_pos + 1 if causal else packed.ends[document]) - origin
    words = first_bits.take(stop, axis=0, mode="clip")
    # keys before `stop`, without those before the document
    words ^= first_bits.take(packed.begins[document] - origin, axis=0, mode="clip") & words
    return words.view(np.int32)


@public
def documents(
    cu_seqlens: Boundaries,
    *,
    causal: bool = False,
    window: Window | None = None,
    prefix: int | Sequence[int] | np.ndarray | torch.Tensor | None = None,
    kv_cu_seqlens: Boundaries | None = None,
    length: Length | None = None,
    max_seqlen: int | None = None,
    block_size: BlockSize = 128,
) -> BlockLayout:
    """Each token attends to the tokens of its own document.

    Documents are packed end to end; document i holds the tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1, as in varlen
    attention calls. An empty document has no effect. Tokens after the last document attend to nothing.

    cu_seqlens=[0, 2, 5], plain and causal:
        1 1 0 0 0     1 0 0 0 0
        1 1 0 0 0     1 1 0 0 0
        0 0 1 1 1     0 0 1 0 0
        0 0 1 1 1     0 0 1 1 0
        0 0 1 1 1     0 0 1 1 1

    and causal with prefix=[1, 2]:
        1 0 0 0 0
        1 1 0 0 0
        0 0 1 1 0
        0 0 1 1 0
        0 0 1 1 1

    If cu_seqlens is a CUDA tensor, it stays on the GPU: kernels make the plan from it there, no call waits for the GPU,
    and a CUDA graph can capture the building of the layout, so that each replay uses the boundaries of that time. The
    lists of such a plan have room for the longest document, so give max_seqlen for long inputs: without it, or with
    kv_cu_seqlens, a plan takes 16 bytes for each of the (length / 128)^2 tiles. Bitmasks take 6 to 16 KB for 128
    queries, and with kv_cu_seqlens 8 to 14 KB for each document of these queries, at most 1 MB. Invalid boundaries
    there end in a device-side assert.

    cu_seqlens  int (documents + 1,): starts at 0, never decreases, ends at most at the length. Or int (batch,
                documents + 1), for sequences with boundaries of their own; repeat the last entry if one has fewer
    causal      True also requires that the key is not after the query: kv_pos <= q_pos, where positions are counted
                from the end of the document
    window      also requires that the key is at most `window` tokens before or after the query, or (left, right), where
                None is unlimited
    prefix      number of keys at the beginning of each document that all of its tokens attend to, whatever `causal`
                says (a packed prefix LM): an int, an int for each document, (documents,), or an array or tensor (batch,
                documents). A number above the document's length means the whole document. Needs causal=True, or a
                window (None, right) with a limit to the right alone. Where cu_seqlens is a CUDA tensor: an int or a
                tensor there, in which negative numbers count as 0
    kv_cu_seqlens  boundaries of the documents among the keys, as many; cu_seqlens is then that of the queries. Default:
                the same documents
    length      tokens, or (q_len, kv_len); default the last entry of cu_seqlens. Required for CUDA tensors
    max_seqlen  tokens of the longest document, at most. Default: not limited
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1 or batch, 1, q_len, kv_len), shared by every head, exact to the token
    raises      ValueError if cu_seqlens is empty, does not start at 0, decreases or exceeds the length, if a document
                is longer than max_seqlen, or if it looks like the document of each token: steps of 0 and 1, mostly 0;
                if prefix is negative, not one for each document, or without effect; TypeError unless all are ints

    Krell et al., "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027, section 3.2 (masking).

    >>> documents([0, 256, 512, 1024]).density
    0.375
    """
    causal = read_switch("causal", causal)
    left, right = (None, None) if window is None else read_window(window)
    right = 0 if causal else right
    if prefix is not None and (left is not None or right is None):
        raise ValueError(
            "prefix: expected None unless causal=True or window=(None, right) hides later keys, and none before: got "
            f"causal={causal} and window={window}. For a window that is limited to the left, unite two layouts with |"
        )
    if max_seqlen is not None:
        max_seqlen = read_integer("max_seqlen", max_seqlen, at_least=0, unit="tokens")
    for name, given in (("cu_seqlens", cu_seqlens), ("kv_cu_seqlens", kv_cu_seqlens), ("prefix", prefix)):
        if isinstance(given, torch.Tensor):
            check_dense(name, given)
    if isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.is_cuda:
        on_device = _on_device(cu_seqlens, kv_cu_seqlens, prefix, length, left, right, max_seqlen)
        if can_build(on_device):
            return PackedLayout.of(on_device, read_canvas(on_device[2:4], block_size).block_size)
    # with a length or other keys, few tokens may have many boundaries
    is_padded = length is not None or kv_cu_seqlens is not None
    bounds = _read_rows(cu_seqlens, "cu_seqlens", is_padded=is_padded)
    kv_bounds = bounds if kv_cu_seqlens is None else _read_rows(kv_cu_seqlens, "kv_cu_seqlens", is_padded=True)
    if kv_bounds.shape != bounds.shape:
        sizes = [each.shape[-1] if len(bounds) == len(kv_bounds) == 1 else each.shape for each in (bounds, kv_bounds)]
        raise ValueError(
            f"kv_cu_seqlens: expected as many entries as cu_seqlens, {sizes[0]}, got {sizes[1]}. A document without "
            "keys repeats its entry"
        )
    if length is None:
        length = int(bounds[:, -1].max()), int(kv_bounds[:, -1].max())
    canvas = read_canvas(length, block_size)
    for name, each, most in (("cu_seqlens", bounds, canvas.q_len), ("kv_cu_seqlens", kv_bounds, canvas.kv_len)):
        if each[:, -1].max() > most:
            raise ValueError(f"{name}: expected boundaries up to the length, {most}, got {each[:, -1].max()}")
        if max_seqlen is not None and np.diff(each).max(initial=0) > max_seqlen:
            raise ValueError(
                f"max_seqlen: expected at least the tokens of the longest document of {name}, "
                f"{np.diff(each).max()}, got {max_seqlen}"
            )
    # lower bound: the full blocks of each document, half of them if causal
    rows, cols = (
        np.maximum(np.diff(bounds) // canvas.block_q - 1, 0),
        np.maximum(np.diff(kv_bounds) // canvas.block_kv - 1, 0),
    )
    if left is None and right in (None, 0):
        check_nnz(int((rows * cols).sum()) // (1 if right is None else 2), least="at least ")
    fills_the_length = kv_bounds is bounds and canvas.q_len == canvas.kv_len == bounds[0, -1]
    if left is None and right in (None, 0) and prefix is None and fills_the_length and len(bounds) == 1:
        return _without_window(canvas, bounds[0], causal=right == 0)
    cu_q, cu_kv = (torch.from_numpy(np.ascontiguousarray(each)) for each in (bounds, kv_bounds))
    lengths = _read_prefix(prefix, (len(bounds), bounds.shape[1] - 1))
    documents = Documents(cu_q, cu_kv, canvas.q_len, canvas.kv_len, left, right, None, lengths)
    return layout_on_host(documents, canvas.block_size)


def _read_prefix_length(prefix: object) -> int:
    # no document is longer, and the number must fit into a tensor
    return min(read_integer("prefix", prefix, at_least=0, unit="tokens"), torch.iinfo(torch.int32).max)


def _read_prefix(
    prefix: int | Sequence[int] | np.ndarray | torch.Tensor | None, sizes: tuple[int, int]
) -> torch.Tensor | None:
    """int64 (batch, documents) on the CPU, checked."""
    if prefix is None:
        return None
    if isinstance(prefix, np.ndarray | torch.Tensor):
        shape, read = tuple(prefix.shape), read_integers("prefix", prefix.reshape(-1))
    elif isinstance(prefix, Sequence):
        read = read_integers("prefix", prefix)
        shape = read.shape
    else:
        shape, read = (), np.array(_read_prefix_length(prefix))
    if read.min(initial=0) < 0:
        raise ValueError(f"prefix: expected at least 0 tokens, got {read.min()}")
    if shape not in ((), sizes[1:], sizes):
        raise ValueError(
            f"prefix: expected an int, or one for each document, shape {sizes[1:]} or {sizes}, got shape {shape}"
        )
    return torch.from_numpy(np.array(np.broadcast_to(read.reshape(shape), sizes), np.int64))


def _on_device(
    cu_seqlens: torch.Tensor,
    kv_cu_seqlens: object,
    prefix: object,
    length: Length | None,
    left: int | None,
    right: int | None,
    max_seqlen: int | None,
) -> Documents:
    """Documents on a GPU. Only what needs no copy of the boundaries is checked."""
    both = {"cu_seqlens": cu_seqlens}
    if kv_cu_seqlens is not None:
        if not isinstance(kv_cu_seqlens, torch.Tensor) or kv_cu_seqlens.device != cu_seqlens.device:
            raise ValueError(
                f"kv_cu_seqlens: expected a tensor on {cu_seqlens.device}, like cu_seqlens, got "
                f"{kv_cu_seqlens.device if isinstance(kv_cu_seqlens, torch.Tensor) else type(kv_cu_seqlens).__name__}"
            )
        both["kv_cu_seqlens"] = kv_cu_seqlens
    for name, each in both.items():
        if each.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: expected int32 or int64, got {each.dtype}")
        if each.dim() not in (1, 2) or 0 in each.shape:
            raise ValueError(
                f"{name}: expected shape (documents + 1,) or (batch, documents + 1), got {tuple(each.shape)}"
            )
        if each.shape != cu_seqlens.shape:
            raise ValueError(
                f"{name}: expected the shape of cu_seqlens, {tuple(cu_seqlens.shape)}, got {tuple(each.shape)}"
            )
    if length is None:
        raise ValueError(
            "length: expected the number of tokens, such as length=q.shape[2], since cu_seqlens is on a GPU: reading "
            "its last entry would wait for the GPU. Got none"
        )
    q_len, kv_len = read_canvas(length, 128)[:2]
    if max(q_len, kv_len) > MAX_TOKENS:
        raise ValueError(
            f"length: expected at most {MAX_TOKENS} tokens for boundaries on a GPU, got {max(q_len, kv_len)}"
        )
    if kv_cu_seqlens is None and q_len != kv_len:
        raise ValueError(
            f"length: expected one number for the same documents on both sides, got {length}: give kv_cu_seqlens"
        )
    cu_q = torch.atleast_2d(cu_seqlens).contiguous()
    is_same = kv_cu_seqlens is None or (kv_cu_seqlens is cu_seqlens and q_len == kv_len)
    cu_kv = None if is_same else torch.atleast_2d(both["kv_cu_seqlens"]).contiguous()
    sizes = len(cu_q), cu_q.shape[1] - 1
    lengths = _prefix_on_device(prefix, sizes, cu_seqlens.device)
    return Documents(cu_q, cu_kv, q_len, kv_len, left, right, max_seqlen, lengths)


def _prefix_on_device(prefix: object, sizes: tuple[int, int], device: torch.device) -> torch.Tensor | None:
    """Integers (batch, documents) on the device; values below 0 count as 0 there."""
    if prefix is None:
        return None
    if not isinstance(prefix, torch.Tensor):
        return torch.full(sizes, _read_prefix_length(prefix), dtype=torch.int32, device=device)
    if prefix.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"prefix: expected int32 or int64, got {prefix.dtype}")
    if prefix.device != device:
        raise ValueError(f"prefix: expected a tensor on {device}, like cu_seqlens, got one on {prefix.device}")
    if prefix.shape not in (torch.Size(sizes[1:]), torch.Size(sizes)):
        raise ValueError(
            f"prefix: expected one for each document, shape {sizes[1:]} or {sizes}, got {tuple(prefix.shape)}"
        )
    return prefix.expand(sizes).contiguous()


def _without_window(canvas: Canvas, bounds: np.ndarray, *, causal: bool) -> BlockLayout:
    """The layout of the same documents on both sides, which fill the length."""
    packed = _pack(canvas, bounds)
    rows, cols = _candidates(canvas, packed, causal=causal)
    _, representatives, ids = np.unique(
        _dedup_keys(canvas, packed, rows, cols, causal=causal), return_index=True, return_inverse=True
    )
    words = _bitmasks(canvas, packed, rows[representatives], cols[representatives], causal=causal)
    # [n_rows + 1]
    ends = np.searchsorted(rows, np.arange(canvas.n_rows + 1))
    indptr, indices, bitmask_ids = (array.astype(np.int32) for array in (ends[None, None], cols, ids.reshape(-1)))
    return BlockLayout(
        *(torch.from_numpy(array) for array in (indptr, indices, bitmask_ids, words)),
        q_len=canvas.q_len,
        kv_len=canvas.kv_len,
        block_size=canvas.block_size,
    )
