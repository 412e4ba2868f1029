"""Evaluation of a predicate over positions on the blocks of a list."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from . import block_list, checks
from .block_list import Array, BlockList, Frame

# pairs evaluated at once: with 4 M positions the temporaries of a predicate take tens of megabytes
_PAIRS_AT_ONCE = 1 << 22
# a second or more on the host: from here on from_predicate warns and shows progress, unless `within` or `dedup_key` is
# given
MANY_PAIRS = 10**8

_LOGGER = logging.getLogger("blocksparse_flash")

Predicate = Callable[..., torch.Tensor]
DedupKey = Callable[[Array, Array], Any]


def check(fn: object, dedup_key: object) -> None:
    if not callable(fn):
        raise TypeError(f"fn must be a function of positions, got {type(fn).__name__}")
    if dedup_key is not None and not callable(dedup_key):
        raise TypeError(f"dedup_key must be a function of rows and cols, got {type(dedup_key).__name__}")


def warn_if_long(frame: Frame) -> bool:
    """Whether evaluating every pair takes a second or more; warns the caller of from_predicate if so."""
    n_pairs = frame.batch_heads * frame.q_len * frame.kv_len
    if n_pairs <= MANY_PAIRS:
        return False
    warnings.warn(
        f"from_predicate evaluates fn for {n_pairs:,} pairs; a builder of blocksparse_flash.masks, within= or "
        "dedup_key= takes a small part of that time",
        stacklevel=3,
    )
    return True


def accepts(fn: Predicate, n_arguments: int) -> bool:
    """Whether a function takes this many positional arguments; True if that is unknown."""
    try:
        inspect.signature(fn).bind(*range(n_arguments))
    except TypeError:
        return False
    except ValueError:
        # a function without a signature
        return True
    return True


def _arity_error(fn: Predicate, n_given: int) -> TypeError:
    """The error for a function that does not take its positions."""
    name = getattr(fn, "__name__", type(fn).__name__)
    if n_given == 2 and accepts(fn, 4):
        return TypeError(
            f"fn must take (q_pos, kv_pos), but {name} takes 4 arguments, as FlexAttention's mask_mod(batch, head, "
            "q_pos, kv_pos) does: give heads=1, or as many heads= and batch= as it depends on"
        )
    if n_given == 4 and accepts(fn, 2):
        return TypeError(
            f"fn must take (batch, head, q_pos, kv_pos), since heads= or batch= was given, but {name} takes 2 "
            "arguments: leave out heads= and batch= for one layout that all share, or add the arguments"
        )
    return TypeError(f"fn must take {'(q_pos, kv_pos)' if n_given == 2 else '(batch, head, q_pos, kv_pos)'}: {name}")


_TRUTH = (
    "took one truth value of a tensor of many pairs, as Python's and, or, not, if, max, min and chained comparisons "
    "do: use (a) & (b), (a) | (b), ~a, torch.where, torch.maximum, and (0 <= d) & (d < 5) for 0 <= d < 5"
)
_NUMBER = (
    "made one number of a tensor of many pairs, as int(), float(), range() and indices of lists do: use operations on "
    "tensors, and torch.as_tensor(table)[q_pos] for a table"
)
# a part of PyTorch's message: what the predicate did, and what to do instead
_NOT_VECTORIZED = {
    "Boolean value of Tensor": _TRUTH,
    "converted to Python scalars": _NUMBER,
    "converted to Scalar": _NUMBER,
    "converted to an index": _NUMBER,
    # of torch.vmap
    "data-dependent control flow": _TRUTH,
    "calling .item() on a Tensor": _NUMBER,
}


def _evaluated(fn: Predicate, positions: list[torch.Tensor]) -> object:
    """fn(*positions); errors of functions that were written for one pair say how to write them for many."""
    try:
        return fn(*positions)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, TypeError) and not accepts(fn, len(positions)):
            raise _arity_error(fn, len(positions)) from error
        for part, advice in _NOT_VECTORIZED.items():
            if part in str(error):
                raise ValueError(f"fn must compute with tensors of many pairs, but it {advice}") from error
        raise


def _logged(starts: range) -> Iterator[int]:
    """The starts, with a line in the log at each tenth."""
    for number, start in enumerate(starts):
        if number * 10 // len(starts) > (number - 1) * 10 // len(starts):
            _LOGGER.info("from_predicate: %d %% of the pairs evaluated", number * 100 // len(starts))
        yield start


def _with_progress(starts: range) -> Iterable[int]:
    """The starts with a progress bar of tqdm, or with lines in the log where tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return _logged(starts)
    bar: Iterable[int] = tqdm(starts, desc="from_predicate")
    return bar


def causal(frame: Frame) -> tuple[Predicate, DedupKey]:
    """(fn, dedup_key) of the causal mask kv_pos <= q_pos + (kv_len - q_len), aligned bottom-right."""
    ahead = frame.kv_len - frame.q_len
    block_q, block_kv = frame.block_size
    return (
        lambda q_pos, kv_pos: kv_pos <= q_pos + ahead,
        # how far the first query of a block sees past its first key, clipped where blocks are empty or full
        lambda row, col: np.clip(row * block_q + ahead - col * block_kv, -block_q, block_kv),
    )


def evaluate(
    fn: Predicate, keys: Array, frame: Frame, dedup_key: DedupKey | None, *, by_head: bool, shows_progress: bool = False
) -> BlockList:
    """The canonical list of the pairs for which fn is true, in the blocks `keys` (ascending).

    fn       fn(q_pos, kv_pos), or fn(batch, head, q_pos, kv_pos) if by_head; int64 tensors that broadcast to
             (blocks, block_q, block_kv), clamped to positions that exist
    dedup_key  dedup_key(row, col) -> int64: blocks with equal keys and equal edge kinds have equal pairs, so fn is
             evaluated for one of them
    shows_progress  a progress bar, or a log without tqdm
    """
    kinds = block_list.edge_kinds(keys, frame)
    if dedup_key is not None and len(keys):
        chosen, number = _representatives(dedup_key, keys, kinds, frame)
    else:
        chosen = number = np.arange(len(keys))
    collector = block_list.BitmaskCollector(block_list.in_bounds_bitmasks(frame))
    block_q, block_kv = frame.block_size
    step = max(1, _PAIRS_AT_ONCE // (block_q * block_kv))
    # explicit, since the caller may have set another default device
    q_step, kv_step = (torch.arange(side, device="cpu") for side in frame.block_size)
    starts = range(0, len(chosen), step)
    for start in _with_progress(starts) if shows_progress else starts:
        part = chosen[start : start + step]
        batch_heads, rows, cols = (torch.from_numpy(index)[:, None, None] for index in frame.positions(keys[part]))
        q_pos = (rows * block_q + q_step[:, None]).clamp_(max=frame.q_len - 1)
        kv_pos = (cols * block_kv + kv_step).clamp_(max=frame.kv_len - 1)
        axes = [batch_heads // frame.heads, batch_heads % frame.heads] if by_head else []
        bits = _checked(_evaluated(fn, [*axes, q_pos, kv_pos]), (len(part), block_q, block_kv))
        collector.add(block_list.pack(bits.numpy()) & collector.in_bounds[kinds[part]], kinds[part])
    return collector.canonical(keys, number)


def _representatives(dedup_key: DedupKey, keys: Array, kinds: Array, frame: Frame) -> tuple[Array, Array]:
    """(which, number): the index of one key per distinct (dedup key, edge kind, batch_head), and for each key the index
    into `which` of its representative.
    """
    batch_heads, rows, cols = frame.positions(keys)
    numbers = np.asarray(dedup_key(rows, cols))
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"dedup_key must return integers, one for each block, got {numbers.dtype}")
    try:
        numbers = np.broadcast_to(numbers, keys.shape).astype(np.int64)
    except ValueError:
        raise ValueError(
            f"dedup_key must return one number for each block, shape {keys.shape}, got shape {numbers.shape}"
        ) from None
    lowest = int(numbers.min())
    n_numbers, n_batch_heads = int(numbers.max()) - lowest + 1, int(batch_heads[-1]) + 1
    if n_numbers * n_batch_heads * 4 >= 2**63:
        numbers, lowest = np.unique(numbers, return_inverse=True)[1], 0
        n_numbers = len(numbers)
    codes = ((numbers - lowest) * n_batch_heads + batch_heads) * 4 + kinds
    values, number = block_list.distinct(codes, n_numbers * n_batch_heads * 4)
    which = np.empty(len(values), np.int64)
    which[number] = np.arange(len(keys))
    return which, number


def _checked(result: object, shape: tuple[int, ...]) -> torch.Tensor:
    """The result of a predicate as a bool tensor of this shape on the host."""
    if not isinstance(result, torch.Tensor):
        raise TypeError(
            f"fn must return a bool tensor, got {type(result).__name__}: compute with the positions it is given, and "
            "make tables tensors, torch.as_tensor(table)[q_pos]"
        )
    checks.check_in_memory(result, "the result of fn")
    if result.dtype != torch.bool:
        raise ValueError(f"fn must return a bool tensor, True where a query attends to a key, got {result.dtype}")
    try:
        return result.detach().cpu().broadcast_to(shape).contiguous()
    except RuntimeError:
        raise ValueError(
            f"fn must return a tensor that broadcasts to the positions, {shape}, got shape {tuple(result.shape)}"
        ) from None
