"""How do operator arguments become kernel arguments? Tensor references, scale, lengths, dropout; and what the GPU is.

Knows: torch tensors, Triton's descriptors. Does not know: what a kernel computes, layouts, autograd.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import copy_engine, philox
from . import launcher
from .scores import Scores

LOG2_E = 1.4426950408889634
# side of a plan's tile, in tokens
TILE = 128
# elements of q and k from which on descriptors pay
WORTH_DESCRIBING = 1 << 20


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


class Seen(NamedTuple):
    """What a launch must know of a tensor besides its address."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_aligned: bool


def see(tensor: torch.Tensor | None) -> Seen | None:
    """The facts about a tensor, which Triton compiles for: hashable. None for none."""
    if tensor is None:
        return None
    return Seen(tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16 == 0)


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
    told = tuple([None if other is None else (other.dtype, other.data_ptr() % 16 == 0) for other in others])
    return Options(scale, causal, dropout_p, allows_tf32(q.dtype), index, *device_limits(index), told)


class Describer:
    """Makes the descriptors of tensors of one kind, which move one kind of block.

    Past the end of any axis a descriptor reads zero and writes nothing. Called on a tensor it gives what a Launch takes for
    one: the descriptor is made when it must be.
    """

    def __init__(self, seen: Seen, block: tuple[int, ...]) -> None:
        strides = list(seen.strides)
        # the stride of an axis of size 1 is arbitrary, the descriptor wants a valid one
        for axis in range(len(strides) - 1):
            if seen.shape[axis] == 1:
                strides[axis] = 8 * -(-seen.shape[-1] // 8)
        self._arguments = (list(seen.shape), strides, list(block))
        self._fields: tuple[Any, dict[str, Any]] | None = None

    def __call__(self, tensor: Any) -> tuple[Describer, Any]:
        return self, tensor

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


def operands(describers: tuple[Describer, ...] | None, *tensors: torch.Tensor) -> tuple[Any, ...]:
    """The tensors as a launch wants them: as they are where there are no describers."""
    if describers is None:
        return tensors
    return tuple(zip(describers, tensors, strict=True))


class Launch:
    """One kernel, ready to launch on tensors of one kind.

    kernel    a jitted function whose parameters are the tensors, then the rest
    n_programs, rest   the grid, and everything but the tensors, by name

    Called with tensors, None, and what describers give. From the second call on the compiled kernel is launched directly:
    Triton's own launch would look at each argument anew, some 20 microseconds.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], rest: dict[str, Any]) -> None:
        self._kernel, self._rest = kernel, rest
        self._grid = (*grid, 1, 1)[:3]
        self._run: Callable[[Sequence[Any]], None] | None = None
        self._values = tuple(rest[name] for name in kernel.arg_names if name in rest)

    def __call__(self, *tensors: Any) -> None:
        if self._run is not None:
            self._run(tensors)
            return
        compiled = self._kernel[self._grid](*launcher.described(tensors), **self._rest)
        # the interpreter compiles nothing
        if compiled is not None:
            self._run = launcher.bind(compiled, self._grid, tensors, self._values)


def constants(head_dim: int, v_dim: int, group: int, tma: bool, options: Options) -> dict[str, Any]:
    """The arguments of every kernel that depend on neither lengths nor configuration.

    The scale is a positive base-2 factor and a sign, so that the maximum of raw scores can be scaled afterwards; scale 0
    multiplies the queries by 0 and the scores by 1.
    """
    scale, dropout_p = options.scale, options.dropout_p
    return {
        "scale_log2": abs(scale) * LOG2_E if scale != 0 else 1.0,
        "threshold": philox.threshold(dropout_p),
        "keep_scale": 1.0 / philox.kept_share(dropout_p),
        "SIGN": (scale > 0) - (scale < 0),
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


def score_arguments(options: Options, direction: int) -> dict[str, Any]:
    """The arguments of a kernel that the options of the scores give, and one of `constants` that a cap changes."""
    arguments: dict[str, Any] = {"cap": None, "tables_strides": None, "PIECE_Q": 0, "PIECE_KV": 0}
    scores = options.scores
    if scores is None:
        return arguments
    if scores.softcap > 0:
        # c tanh(s / c), in base 2
        arguments |= {"cap": scores.softcap * LOG2_E, "scale_log2": abs(options.scale) / scores.softcap}
    tables = scores.tables[direction]
    if scores.pieces is not None and tables is not None:
        arguments["tables_strides"] = axis_strides(tables.shape)
        arguments["PIECE_Q"], arguments["PIECE_KV"] = scores.pieces
    return arguments


def walk_strides(items: Seen | None) -> tuple[int, int]:
    """(batch, head) strides of a plan's records; 0 along an axis that all share, or without a plan."""
    return (0, 0) if items is None else axis_strides(items.shape)


def axis_strides(shape: tuple[int, ...]) -> tuple[int, int]:
    """(batch, head) strides of a contiguous tensor; 0 along an axis of size 1, which all share."""
    batch, heads, *rest = shape
    size = math.prod(rest)
    return (heads * size if batch > 1 else 0, size if heads > 1 else 0)


def see_walk(plan: list[torch.Tensor], first: int) -> tuple[Seen | None, bool]:
    """The facts about one direction of a plan: its records, and whether all of its tensors are aligned."""
    if not plan:
        return None, True
    addresses = 0
    for tensor in plan:
        addresses |= tensor.data_ptr()
    return see(plan[first]), addresses % 16 == 0


def walk(plan: list[torch.Tensor], first: int) -> tuple[torch.Tensor | None, ...]:
    """items, indices, ids, words of one direction of a plan: its rows (first = 0) or its columns (3). Empty is dense."""
    return (plan[first], plan[first + 1], plan[first + 2], plan[6]) if plan else (None,) * 4


def device_seed(seed: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """The seed on the device: a fill when it is on the host, never a wait."""
    if seed is None or seed.device == device:
        return seed
    return torch.full((1,), int(seed.item()), dtype=torch.int64, device=device)
