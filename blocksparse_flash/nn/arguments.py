"""Checks of the arguments of layers, which raise a TypeError or ValueError that names the argument.

Those named check_* return None, the others the checked value. Two more functions say which kernels a layer may use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..blocks.checks import check_strided, check_tensor
from ..layout import BlockLayout
from ..packed import is_jagged
from ..plan import block_selection
from ..validation import MAX_HEAD_DIM, MAX_SCALE, check_device

# what a module holds, and what it takes: a specification becomes a LayoutByLength
HeldLayout = BlockLayout | Callable[[int], BlockLayout] | None
Layout = HeldLayout | str


# of rotary positions, whose angles are float32
MIN_BASE, MAX_BASE = 1e-30, 1e30


def positive_int(name: str, number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} must be an int, got {number!r}")
    if number < 1:
        raise ValueError(f"{name} must be 1 or more, got {number}")
    return number


def rotary_base(name: str, base: Any) -> float:
    if isinstance(base, bool) or not isinstance(base, int | float):
        raise TypeError(f"{name} must be a number, a base such as 10000.0, got {base!r} ({type(base).__name__})")
    if not MIN_BASE <= base <= MAX_BASE:
        raise ValueError(f"{name} must be a base above 0 that float32 can hold, such as 10000.0, got {base}")
    return float(base)


def probability(name: str, value: Any, *, below_one: bool = False) -> float:
    """A probability of dropping something; attention needs one below 1, nn.Dropout takes 1 too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__}); 0.0 drops nothing")
    if not 0 <= value <= 1 or (below_one and value == 1):
        allowed = "at least 0 and below 1" if below_one else "from 0 to 1"
        raise ValueError(f"{name} must be {allowed}, got {value}; 0.0 drops nothing")
    return value


def checked_alibi(alibi: Any, num_heads: int) -> bool | tuple[float, ...]:
    """Whether there are slopes, or the slopes of the heads."""
    if isinstance(alibi, bool):
        return alibi
    if not isinstance(alibi, list | tuple):
        kind = type(alibi).__name__
        raise TypeError(f"alibi must be True, False or a list of numbers, got {kind}; alibi.tolist() makes one")
    if len(alibi) != num_heads:
        raise ValueError(
            f"alibi must have num_heads={num_heads} slopes, one for each head, got {len(alibi)}; alibi=True has the "
            "published ones"
        )
    for slope in alibi:
        if isinstance(slope, bool) or not isinstance(slope, int | float):
            raise TypeError(f"alibi must be True, False or a list of numbers, got one with {slope!r}")
        # also refuses NaN
        if not abs(slope) <= MAX_SCALE:
            raise ValueError(
                f"alibi must have slopes that are finite as float32, got {slope}; 0.0 leaves the scores of a head as "
                "they are"
            )
    return tuple(float(slope) for slope in alibi)


def check_input(x: Any, embed_dim: int, *, may_be_jagged: bool = False) -> None:
    """Refuse an input of another shape."""
    check_features("x", x, may_be_jagged=may_be_jagged)
    if x.dim() != 3 or x.shape[2] != embed_dim:
        raise ValueError(f"x must have shape (batch, length, embed_dim={embed_dim}), got {tuple(x.shape)}")


def check_features(name: str, x: Any, *, may_be_jagged: bool = False) -> None:
    """Refuse what is not floating point in a dense tensor, or in a nested one of layout torch.jagged."""
    check_tensor(name, x)
    if x.is_nested and may_be_jagged and not is_jagged(x):
        raise ValueError(f"{name} must be a dense tensor or a nested one of layout torch.jagged, got layout {x.layout}")
    if x.is_nested and not may_be_jagged:
        raise ValueError(
            f"{name} must be a dense tensor, got a nested one: {name}.values()[None] with cu_seqlens={name}.offsets() "
            "holds its sequences as packed documents, for layers that take cu_seqlens"
        )
    if not x.is_nested and x.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got a {x.layout} one; {name}.to_dense() makes one")
    if not x.is_floating_point():
        raise ValueError(
            f"{name} must be floating point, the features of tokens, got {x.dtype}; nn.Embedding makes them"
        )


def check_gates(name: str, gates: Any, q: Tensor) -> None:
    """Refuse gates that cannot be multiplied with q; a number on the CPU can."""
    check_tensor(name, gates)
    if not gates.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {gates.dtype}; {name}.to(q.dtype) makes it")
    if gates.dim() or gates.device.type != "cpu":
        check_device(name, gates, q)


def check_positions(positions: Any) -> None:
    if not isinstance(positions, Tensor):
        kind = type(positions).__name__
        raise TypeError(f"positions must be a tensor of numbers, got {kind}; torch.as_tensor(positions) makes one")
    check_strided(positions, "positions")
    if positions.is_complex():
        raise ValueError(f"positions must be real numbers, got {positions.dtype}")
    if positions.dtype == torch.bool:
        raise ValueError(
            "positions must be real numbers, got torch.bool, which is a mask; positions.cumsum(0) counts; "
            "pass kv_lengths= for padded batches"
        )


def checked_layout(layout: Any) -> HeldLayout:
    """The layout; a specification for `masks.build` as a LayoutByLength."""
    if isinstance(layout, str):
        # at the top it would be circular
        from .layout_by_length import LayoutByLength

        return LayoutByLength(layout)
    if layout is not None and not isinstance(layout, BlockLayout) and not callable(layout):
        raise TypeError(
            "layout must be a BlockLayout, a specification such as 'local(window=256)', a function from a length to a "
            f"BlockLayout, or None, got {type(layout).__name__}"
        )
    return layout


class Heads(NamedTuple):
    """Checked head sizes of a layer."""

    embed_dim: int
    num_heads: int
    kv_heads: int
    head_dim: int
    rope: float | None

    @classmethod
    def of(
        cls, embed_dim: int, num_heads: int, kv_heads: int | None, head_dim: int | None, rope: float | None
    ) -> Heads:
        """The sizes of a layer from its arguments; None are defaults."""
        positive_int("embed_dim", embed_dim)
        positive_int("num_heads", num_heads)
        kv_heads = num_heads if kv_heads is None else positive_int("kv_heads", kv_heads)
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads unless head_dim is given, got {embed_dim} and {num_heads}"
            )
        if num_heads % kv_heads:
            raise ValueError(f"num_heads must be a multiple of kv_heads, got {num_heads} and {kv_heads}")
        features = embed_dim // num_heads if head_dim is None else positive_int("head_dim", head_dim)
        if features > MAX_HEAD_DIM:
            raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {features}: take more heads")
        if rope is not None and features % 2:
            raise ValueError(f"rope rotates pairs of features, so head_dim must be even, got {features}")
        return cls(embed_dim, num_heads, kv_heads, features, None if rope is None else rotary_base("rope", rope))

    def __str__(self) -> str:
        return (
            f"{self.embed_dim}, {self.num_heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, rope={self.rope}"
        )


def runs_kernels(tensor: Tensor) -> bool:
    """Whether the layers' own pointwise kernels take a tensor: on a GPU, without tracing or forward-mode gradients."""
    is_plain = block_selection.is_on_gpu(tensor) and forward_ad._current_level < 0
    return is_plain and tensor.dtype in block_selection.COMPARABLE


def takes_half_kernels(x: Tensor) -> bool:
    """Whether kernels that keep products in registers take x: float16 or bfloat16, last dimension <= 128, on a GPU."""
    # products of float32 would spill
    is_half = x.dtype in (torch.float16, torch.bfloat16)
    return is_half and x.shape[-1] <= 128 and block_selection.is_on_gpu(x)
