"""Checks of the arguments that describe a layout. Each raises an error that names the argument."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

from ..runtime import tracing
from . import block_list
from .block_list import FULL, Array, Axis, Frame, Size

Kind = TypeVar("Kind")

# offsets into a layout's indices are int32
MAX_BLOCKS = 2**31 - 1
# the tensors of a layout, in the order of its fields
TENSORS = ("indptr", "indices", "bitmask_ids", "bitmasks")


def shown(value: object) -> str:
    """repr(value) for a message; torch.compile cannot print the values of a tensor."""
    return "a tensor" if isinstance(value, torch.Tensor) and torch.compiler.is_compiling() else repr(value)


def integer(value: object, name: str) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {shown(value)}")
    return int(value)


def boolean(value: object, name: str, hint: str = "") -> bool:
    """value, checked to be a bool; hint replaces the default advice at the end of the message."""
    if value is not True and value is not False:
        hint = hint or f"bool({name}) makes one"
        raise TypeError(f"{name} must be True or False, got {shown(value)} ({type(value).__name__}); {hint}")
    return value


def length(value: object, name: str) -> int:
    tokens = integer(value, name)
    if not 0 <= tokens < 2**31:
        raise ValueError(f"{name} must be in 0 .. 2**31 - 1 tokens, got {tokens}")
    return tokens


def position(value: object, size: int, name: str, hint: str) -> int:
    """An index below size; hint ends the message."""
    index = integer(value, name)
    if not 0 <= index < size:
        raise ValueError(f"{name} must be in 0 .. {size - 1}, got {index}{hint}")
    return index


def axis(value: object, name: str) -> int:
    size = 1 if value is None else integer(value, name)
    if not 1 <= size < 2**31:
        raise ValueError(f"{name} must be in 1 .. 2**31 - 1, or None for one layout shared by all, got {size}")
    return size


def sides(block_size: object, *, most: int | None = 256) -> Size:
    """(block_q, block_kv); most is the longest side, None for any."""
    pair = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(pair) != 2:
        raise ValueError(f"block_size must be an int or (block_q, block_kv), got {block_size!r}")
    block_q, block_kv = (integer(side, "block_size") for side in pair)
    for side in (block_q, block_kv):
        if side < 16 or side % 16 or (most is not None and side > most):
            limits = "" if most is None else f" from 16 to {most}"
            raise ValueError(
                f"block_size must be a multiple of 16{limits} on each side, got {block_size!r}; for example 128"
            )
    return block_q, block_kv


@contextlib.contextmanager
def renamed(inner: str, outer: str) -> Iterator[None]:
    """Errors that begin with the name of an inner function's argument begin with that of the caller's argument."""
    try:
        yield
    except (TypeError, ValueError) as error:
        name, _, problem = str(error).partition(" ")
        if name != inner:
            raise
        raise type(error)(f"{outer} {problem}") from error


def check_multiple(large: Size, small: Size, expected: str) -> None:
    """Refuse block sizes unless the large one is a multiple of the small one; `expected` completes the message."""
    if large[0] % small[0] or large[1] % small[1]:
        raise ValueError(f"block_size must {expected}; with_block_size() takes any size")


def frame(q_len: object, kv_len: object, block_size: object) -> Frame:
    """The frame of one batch and one head, checked."""
    return Frame(1, 1, length(q_len, "q_len"), length(kv_len, "kv_len"), sides(block_size))


def check_tensor(name: str, value: object, hint: str = "") -> None:
    """TypeError unless value is a tensor; the message ends with hint."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}{hint}")


def check_strided(tensor: torch.Tensor, name: str) -> None:
    """Refuse nested and sparse tensors."""
    if tensor.is_nested:
        raise ValueError(f"{name} is a nested tensor; pass {name}.to_padded_tensor(padding)")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is a sparse tensor ({tensor.layout}); pass {name}.to_dense()")


def check_in_memory(tensor: torch.Tensor, name: str) -> None:
    """Refuse nested, sparse and meta tensors."""
    check_strided(tensor, name)
    if tensor.device.type == "meta":
        raise ValueError(f"{name} is on the meta device, which holds no data; make it on the CPU or a GPU")


def values_of(tensor: torch.Tensor, name: str) -> Array:
    """The values of a tensor, on the host. Refuses those without values, such as fake ones."""
    check_in_memory(tensor, name)
    if not tracing.can_be_read(tensor):
        raise ValueError(
            f"{name} must have values that can be read now, got a tensor that is fake, traced or transformed: build "
            "the layout outside of the traced function, and pass it in"
        )
    with tracing.outside_transforms():
        array: Array = tensor.detach().cpu().numpy()
    return array


def integers(values: object, name: str) -> Array:
    """int64 (n,) copy of a tensor, an array or a list of integers."""
    if isinstance(values, torch.Tensor):
        check_in_memory(values, name)
        if values.is_floating_point():
            # before NumPy, which lacks bfloat16
            raise ValueError(f"{name} must be integers, got {values.dtype}")
        values = values_of(values, name)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):
        # lists of unequal lengths, or of tensors that NumPy cannot read
        raise ValueError(
            f"{name} must be a list of integers or a tensor with one axis, got a {type(values).__name__} that is "
            f"nested or holds something else; for example torch.tensor([0, 1])"
        ) from None
    if not isinstance(values, (torch.Tensor, np.ndarray)):
        if not array.size:
            array = array.astype(np.int64)
        # NumPy would read True as 1 among integers
        elif isinstance(values, Iterable) and any(isinstance(value, (bool, np.bool_)) for value in values):
            raise ValueError(f"{name} must be integers, got a bool in a {type(values).__name__}")
    check_not_masked(values, name, f"{name}.compressed() has its valid entries")
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(
            f"{name} must have one axis, got shape {array.shape}; pass a list of integers or a tensor with one axis"
        )
    return as_int64(array, name)


def check_not_masked(values: object, name: str, hint: str) -> None:
    """Refuse a masked array, whose mask NumPy functions may drop; hint says what makes a plain one."""
    if isinstance(values, np.ma.MaskedArray):
        raise ValueError(f"{name} must be a plain array, got a masked one: {hint}")


def as_int64(array: Array, name: str) -> Array:
    """A copy of an array of integers as int64; NumPy would make large ones negative."""
    largest = np.iinfo(np.int64).max
    if array.dtype.kind == "u" and array.max(initial=0) > largest:
        raise ValueError(f"{name} must be at most 2**63 - 1, got {array.max()}")
    return array.astype(np.int64)


def listed(values: object, kind: type[Kind], name: str) -> list[Kind]:
    """At least one value, all of one type, as a list."""
    if not isinstance(values, Iterable) or isinstance(values, torch.Tensor):
        raise TypeError(f"{name} must be {kind.__name__}s in a list, got {type(values).__name__}")
    found = list(values)
    for value in found:
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {kind.__name__}s in a list, got {type(value).__name__}")
    if not found:
        raise ValueError(f"{name} must hold at least one {kind.__name__}, got none")
    return found


def check_range(values: Array, limit: int, name: str, limit_name: str, of: str = "") -> None:
    """Refuse values outside 0 .. limit - 1; `of` ends the message."""
    outside = (values < 0) | (values >= limit)
    if outside.any():
        where = int(outside.argmax())
        raise ValueError(f"{name} must be in 0 .. {limit_name} - 1 = {limit - 1}, got {values[where]} at {where}{of}")


def check_distinct(keys: Array, frame: Frame, name: str) -> None:
    """Refuse ascending keys that name a block twice."""
    twice = keys[1:] == keys[:-1]
    if twice.any():
        _, row, col = (int(i) for i in frame.positions(keys[twice.argmax()]))
        raise ValueError(f"{name} must list each block once, but block (row {row}, col {col}) is repeated")


def bools(mask: object) -> Array:
    """The bool array of a mask, a tensor or an array with 2 to 4 axes, as (batch, heads, ., .)."""
    if not isinstance(mask, (torch.Tensor, np.ndarray)):
        raise TypeError(
            f"mask must be a torch.Tensor or a numpy.ndarray, got {type(mask).__name__}; "
            "torch.tensor(mask) makes one from nested lists"
        )
    if isinstance(mask, torch.Tensor):
        check_in_memory(mask, "mask")
    check_not_masked(mask, "mask", "mask.filled(False) leaves out the masked pairs")
    # comparing a NumPy dtype with a torch dtype takes microseconds
    if mask.dtype != (torch.bool if isinstance(mask, torch.Tensor) else np.bool_):
        raise ValueError(f"mask must be bool, True where a query attends to a key, got {mask.dtype}")
    if not 2 <= mask.ndim <= 4:
        raise ValueError(f"mask must have 2, 3 (heads first) or 4 (batch, heads first) axes, got shape {mask.shape}")
    array = values_of(mask, "mask") if isinstance(mask, torch.Tensor) else mask
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    if 0 in array.shape[:2]:
        raise ValueError(f"mask must have at least one batch and one head, got shape {tuple(mask.shape)}")
    return array


def check_nnz(nnz: int) -> None:
    if nnz > MAX_BLOCKS:
        raise ValueError(f"nnz must be below 2**31, but this layout would store {nnz} blocks: use a larger block_size")


def check_same(a: Frame, b: Frame, name: str) -> None:
    """Refuse layouts of different lengths or block sizes."""
    if a[2:4] != b[2:4]:
        raise ValueError(
            f"{name}: lengths must be equal, got {a.q_len} x {a.kv_len} and {b.q_len} x {b.kv_len}: build both for the "
            "same tokens, or use .crop() on the longer one"
        )
    if a.block_size != b.block_size:
        raise ValueError(
            f"{name}: block_size must be equal, got {a.block_size} and {b.block_size}: use .with_block_size()"
        )


def joint(a: Size, b: Size, name: str) -> Size:
    """(batch, heads) of two layouts, broadcast."""
    if any(x != y and 1 not in (x, y) for x, y in zip(a, b, strict=True)):
        raise ValueError(f"{name}: batch and heads must be equal or 1, got (batch, heads) {a} and {b}")
    return max(a[0], b[0]), max(a[1], b[1])


def stackable(frames: Sequence[Frame], axis: Axis) -> list[Frame]:
    """The frames, with the axis that is not stacked broadcast to one size."""
    shared: Size = (1, 1)
    for frame in frames:
        shared = joint(shared, (frame.batch, 1) if axis == "heads" else (1, frame.heads), "layouts")
    if axis == "heads":
        return [frame._replace(batch=shared[0]) for frame in frames]
    return [frame._replace(heads=shared[1]) for frame in frames]


def check_fields(tensors: Sequence[object], frame: Frame) -> None:
    """Refuse tensors without the types, shapes and common device of the fields of a layout with this frame."""
    found: list[torch.Tensor] = []
    for name, tensor in zip(TENSORS, tensors, strict=True):
        check_tensor(name, tensor, f"; torch.tensor({name}) makes one")
        assert isinstance(tensor, torch.Tensor)
        if tensor.device.type != "meta":
            check_in_memory(tensor, name)
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, got {tensor.dtype}")
        found.append(tensor)
        if tensor.device != found[0].device:
            raise ValueError(f"{name} must be on indptr's device {found[0].device}, got {tensor.device}")
    indptr, indices, ids, bitmasks = (tuple(tensor.shape) for tensor in found)
    n_rows, sides = frame.n_rows, frame.block_size
    if len(indptr) != 3 or indptr[2] != n_rows + 1 or 0 in indptr[:2]:
        raise ValueError(
            f"indptr must have shape (batch, heads, n_rows + 1 = {n_rows + 1}) for q_len {frame.q_len} and block_size "
            f"{sides}, got {indptr}"
        )
    if len(indices) != 1:
        raise ValueError(f"indices must have one axis, got shape {indices}")
    if ids != indices:
        raise ValueError(f"bitmask_ids must have the shape of indices, {indices}, got {ids}")
    words = block_list.words_per_query(sides[1])
    if len(bitmasks) != 3 or bitmasks[1:] != (sides[0], words):
        raise ValueError(
            f"bitmasks must have shape (distinct, {sides[0]}, {words}) for block_size {sides}, got {bitmasks}"
        )


def check_rows(indptr: Array, indices: Array, frame: Frame, *, is_padded: bool) -> Array:
    """Check CSR rows and return the number of blocks of each, (batch * heads, n_rows).

    is_padded  indices may have unused entries after the last block
    """
    n_rows = frame.n_rows
    flat = indptr.reshape(-1, n_rows + 1).astype(np.int64)
    if flat[0, 0] != 0 or (flat[1:, 0] != flat[:-1, -1]).any():
        raise ValueError("indptr must start at 0, and each head where the one before it ends")
    counts: Array = flat[:, 1:] - flat[:, :-1]
    if (counts < 0).any():
        raise ValueError(
            f"indptr must not decrease, but row {int((counts < 0).any(axis=0).argmax())} ends before it begins"
        )
    nnz = int(flat[-1, -1])
    if nnz > len(indices) or (nnz < len(indices) and not is_padded):
        raise ValueError(
            f"indptr must end at {'most at ' if is_padded else ''}the length of indices, {len(indices)}, got {nnz}"
            + ("" if is_padded else "; of a selected layout pass indices[:nnz] and bitmask_ids[:nnz]")
        )
    cols = indices[:nnz]
    check_range(cols, frame.n_cols, "indices", "n_cols", f"; kv_len is {frame.kv_len}, block_size {frame.block_size}")
    rows = np.repeat(np.arange(counts.size), counts.reshape(-1))
    falls = (rows[1:] == rows[:-1]) & (cols[1:] <= cols[:-1])
    if falls.any():
        where = int(falls.argmax())
        raise ValueError(
            f"indices must ascend in every row, without duplicates, got {cols[where]}, {cols[where + 1]} "
            f"at {where} in row {rows[where] % n_rows}"
        )
    return counts


def check_tensors(tensors: Sequence[torch.Tensor], frame: Frame) -> None:
    """Refuse tensors that are not the fields of a layout with this frame."""
    check_fields(tensors, frame)
    indptr, indices, ids, bitmasks = map(values_of, tensors, TENSORS)
    check_rows(indptr, indices, frame, is_padded=False)
    outside = (ids < FULL) | (ids >= len(bitmasks))
    if outside.any():
        raise ValueError(
            f"bitmask_ids must be -1 (full) or name one of {len(bitmasks)} bitmasks, "
            f"got {ids[outside.argmax()]} at {int(outside.argmax())}"
        )
