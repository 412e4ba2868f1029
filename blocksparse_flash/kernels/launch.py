"""How do operator arguments become kernel arguments? Tensor references, scale, lengths, dropout; and what the GPU is.

Knows: torch tensors, Triton's descriptors. Does not know: what a kernel computes, layouts, autograd.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import copy_engine, philox
from ..seen import Seen, see
from . import launcher
from .scores import Scores

LOG2_E = 1.4426950408889634
# side of a plan's tile, in tokens
TILE = 128
# elements of q and k from which on descriptors pay
WORTH_DESCRIBING = 1 << 20


Shape = tuple[int, ...]
# of one direction of a plan: the shape of its records, None without a plan; which of its tensors are aligned, () for all
Walk = tuple[Shape | None, tuple[bool, ...]]


@dataclass(frozen=True)
class Config:
    """One launch configuration: the part of a tile that a program holds, and Triton's launch options."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    @functools.cached_property
    def arguments(self) -> dict[str, int]:
        """The compile-time and launch arguments by name; read only."""
        return {
            "BLOCK_Q": self.block_q,
            "BLOCK_KV": self.block_kv,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


@functools.cache
def device_limits(index: int | None) -> tuple[int, int]:
    """(major compute capability, bytes of shared memory a program may take); (0, unlimited) for the interpreter."""
    if index is None:
        return 0, 2**31
    properties = torch.cuda.get_device_properties(index)
    # missing in PyTorch's stubs
    return properties.major, properties.shared_memory_per_block_optin  # type: ignore[attr-defined]


@functools.cache
def multiprocessors(index: int | None) -> int:
    """How many the GPU has; 1 for the interpreter."""
    return 1 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


def padded_dim(head_dim: int) -> int:
    """Columns a program holds for `head_dim`: the next power of two, at least 16 (tensor cores want 16)."""
    return max(16, triton.next_power_of_2(head_dim))


def allows_tf32(dtype: torch.dtype) -> bool:
    """float32 products are IEEE unless torch's matmul precision allows TF32 (its older switches set this one too)."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


class Memory(NamedTuple):
    """New memory to be had from an `allocator`: plain tuples, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def seen(self) -> Seen:
        """What will be seen of it: new memory is aligned."""
        return Seen(self.dtype, self.shape, self.strides, True)


@functools.lru_cache(maxsize=4096)
def contiguous(dtype: torch.dtype, *shape: int, row: int | None = None) -> Memory:
    """Memory for a contiguous tensor, or for one whose last axis is a part of a row of so many elements."""
    lengths = [*shape[1:-1], shape[-1] if row is None else row]
    strides = [math.prod(lengths[i:]) for i in range(len(shape) - 1)]
    return Memory(shape, (*strides, 1), dtype)


def allocator(tensor: torch.Tensor) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """What makes new memory on a tensor's device, of a shape, strides and a dtype. A GPU must be the current one.

    On a GPU what TorchInductor's code calls: without the dispatcher, in less than half of the time. Nothing could see the
    difference but the option to fill new memory, which is looked for here.
    """
    if tensor.is_cuda and not torch.are_deterministic_algorithms_enabled():
        return torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
    device = tensor.device
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def wants_descriptors(major: int, *tensors: Seen) -> bool:
    """Whether the copy engine (TMA, sm90 and later) should read all of these (batch, heads, length, head_dim) tensors.

    Making a descriptor costs the host time, which small tensors do not repay.
    """
    if major < 9 or math.prod(tensors[0].shape) + math.prod(tensors[1].shape) < WORTH_DESCRIBING:
        return False
    return all(copy_engine.takes(t.dtype.itemsize, t.shape, t.strides, t.is_aligned) for t in tensors)


class SeenScores(NamedTuple):
    """What a launch must know of the options of the scores.

    tables  the biases that each kernel reads, by direction
    wanted  which of the gradients of sinks, slopes and bias are
    """

    softcap: float
    pieces: tuple[int, int] | None
    changes: bool
    tables: tuple[Seen | None, ...]
    others: tuple[Seen | None, ...]
    wanted: tuple[bool, ...]


def see_scores(scores: Scores, *tables: torch.Tensor | None, wanted: Sequence[bool] = ()) -> SeenScores:
    """The facts about the options of the scores, and about the tables that go with them."""
    changes = scores.softcap > 0 or scores.alibi_slopes is not None or scores.block_bias is not None
    others = see(scores.sinks), see(scores.alibi_slopes)
    return SeenScores(scores.softcap, scores.pieces, changes, tuple(map(see, tables)), others, tuple(wanted))


def tell(other: torch.Tensor | None) -> tuple[torch.dtype, bool] | None:
    """What tells tensors apart whose shapes follow: type and alignment."""
    return None if other is None else (other.dtype, other.data_ptr() % 16 == 0)


class Options(NamedTuple):
    """What a launch must know besides q, k, v, dout and the plan; `others`, of further tensors, only tell calls apart."""

    scale: float
    causal: bool
    dropout_p: float
    tf32: bool
    device: int | None
    major: int
    shared_memory: int
    others: tuple[tuple[torch.dtype, bool] | None, ...]
    scores: SeenScores | None = None

    @property
    def changes_scores(self) -> bool:
        """Whether something is done to scores between product and mask."""
        return self.scores is not None and self.scores.changes


def options_of(q: torch.Tensor, scale: float, causal: bool, dropout_p: float, *others: torch.Tensor | None) -> Options:
    """The options of a call on q's type and device, with `others` among its tensors, whose shapes follow."""
    index = q.device.index
    told = tuple([tell(other) for other in others])
    return Options(scale, causal, dropout_p, allows_tf32(q.dtype), index, *device_limits(index), told)


class Describer:
    """Makes the descriptors of tensors of one kind, which move one kind of block.

    Past the end of any axis a descriptor reads zero and writes nothing.
    """

    def __init__(self, seen: Seen, block: tuple[int, ...]) -> None:
        strides = list(seen.strides)
        # the stride of an axis of size 1 is arbitrary, the descriptor wants a valid one
        for axis in range(len(strides) - 1):
            if seen.shape[axis] == 1:
                strides[axis] = 8 * -(-seen.shape[-1] // 8)
        self._arguments = (list(seen.shape), strides, list(block))
        self._fields: tuple[Any, dict[str, Any]] | None = None

    def describe(self, tensor: torch.Tensor) -> Any:
        """The descriptor of a tensor."""
        if self._fields is None:
            made = self.make(tensor)
            # without the tensor, which would never be freed
            self._fields = type(made), {**made.__dict__, "base": None}
            return made
        # what the class checks was checked: 0.8 microseconds instead of 3.3
        kind, fields = self._fields
        made = object.__new__(kind)
        made.__dict__.update(fields, base=tensor)
        return made

    def make(self, tensor: torch.Tensor) -> Any:
        """The descriptor, checked."""
        return TensorDescriptor(tensor, *self._arguments)


class Launch:
    """One kernel, ready to launch on tensors of one kind.

    kernel    a jitted function whose parameters are the tensors, and integers that change from call to call, then the rest
    n_programs, rest   the grid, and everything but those, by name
    describers         of the tensors that are handed on as descriptors, by name

    Called with tensors, None and those integers. From the second call on the compiled kernel is launched directly:
    Triton's own launch would look at each argument anew, some 20 microseconds.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        rest: dict[str, Any],
        describers: Mapping[str, Describer] | None = None,
    ) -> None:
        self._kernel, self._rest = kernel, rest
        self._describers = tuple((describers or {}).get(name) for name in kernel.arg_names if name not in rest)
        self._grid = (*grid, 1, 1)[:3]
        self._run: Callable[[Sequence[Any]], None] | None = None
        self._values = tuple(rest[name] for name in kernel.arg_names if name in rest)

    def __call__(self, *tensors: Any) -> None:
        if self._run is not None:
            self._run(tensors)
            return
        compiled = self._kernel[self._grid](*launcher.described(tensors, self._describers), **self._rest)
        # the interpreter compiles nothing
        if compiled is not None:
            self._run = launcher.bind(compiled, self._grid, tensors, self._describers, self._values)


def scaling(scale: float) -> dict[str, Any]:
    """A forward's scale: a positive base-2 factor, and a sign for the raw scores, whose maximum is scaled afterwards.

    Scale 0 multiplies the scores by 0, then by 1.
    """
    return {"scale_log2": abs(scale) * LOG2_E if scale != 0 else 1.0, "SIGN": (scale > 0) - (scale < 0)}


def constants(head_dim: int, v_dim: int, group: int, tma: bool, options: Options) -> dict[str, Any]:
    """The arguments of every portable kernel that depend on neither lengths, configuration nor scale."""
    dropout_p = options.dropout_p
    return {
        "threshold": philox.threshold(dropout_p),
        "keep_scale": 1.0 / philox.kept_share(dropout_p),
        "GROUP": group,
        "CAUSAL": options.causal,
        "DROPOUT": dropout_p > 0.0,
        "PRECISION": "tf32" if options.tf32 else "ieee",
        "TMA": tma,
        "HEAD_DIM": head_dim,
        "V_DIM": v_dim,
        "DIM": padded_dim(head_dim),
        "DIM_V": padded_dim(v_dim),
    }


def columns_of_values(dim: int, dim_v: int, element_size: int, major: int) -> int:
    """DIM_V of a kernel that multiplies p by values; more than it must be on sm90, in 16 bits.

    Of narrower values whose rows neither the copy engine nor cp.async takes, the ptxas of Triton 3.6 and 3.7 loses the address in
    shared memory: it reads a register that nothing wrote (head_dim 100 with 3, an H200: wrong numbers, others at each call).
    """
    return max(dim_v, min(dim, 64)) if major == 9 and element_size == 2 else dim_v


def score_arguments(options: Options, direction: int, *, scale: float) -> dict[str, Any]:
    """The arguments of a kernel that the options of the scores give, and scale_log2 where a cap changes it.

    scale  the factor on this kernel's scores: without its sign where that is multiplied first (see `scaling`)
    """
    arguments: dict[str, Any] = {"cap": None, "tables_strides": None, "PIECE_Q": 0, "PIECE_KV": 0}
    scores = options.scores
    if scores is None:
        return arguments
    if scores.softcap > 0:
        # c tanh(s / c), in base 2
        arguments |= {"cap": scores.softcap * LOG2_E, "scale_log2": scale / scores.softcap}
    tables = scores.tables[direction]
    if scores.pieces is not None and tables is not None:
        arguments["tables_strides"] = axis_strides(tables.shape)
        arguments["PIECE_Q"], arguments["PIECE_KV"] = scores.pieces
    return arguments


def walk_strides(items: Shape | None) -> tuple[int, int]:
    """(batch, head) strides of a plan's records; 0 along an axis that all share, or without a plan."""
    return (0, 0) if items is None else axis_strides(items)


def axis_strides(shape: tuple[int, ...]) -> tuple[int, int]:
    """(batch, head) strides of a contiguous tensor; 0 along an axis of size 1, which all share."""
    batch, heads, *rest = shape
    size = math.prod(rest)
    return (heads * size if batch > 1 else 0, size if heads > 1 else 0)


def walk(plan: list[torch.Tensor], first: int) -> tuple[torch.Tensor | None, ...]:
    """items, indices, ids, words of one direction of a plan: its rows (first = 0) or its columns (3). Empty is dense."""
    return (plan[first], plan[first + 1], plan[first + 2], plan[6]) if plan else (None,) * 4


def see_walk(walked: tuple[torch.Tensor | None, ...]) -> Walk:
    """The facts about one direction of a plan."""
    items = walked[0]
    if items is None:
        return None, ()
    addresses = [tensor.data_ptr() for tensor in walked]  # type: ignore[union-attr]
    off = (addresses[0] | addresses[1] | addresses[2] | addresses[3]) % 16
    return items.shape, tuple([address % 16 == 0 for address in addresses]) if off else ()


def device_seed(seed: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """The seed on the device: a fill when it is on the host, never a wait."""
    if seed is None or seed.device == device:
        return seed
    return torch.full((1,), int(seed.item()), dtype=torch.int64, device=device)
