"""Mask: what passes through a model in place of its attention mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..layout import BlockLayout
from .names import ATTENTION_NAME, HINT, running_layer


class _Fields(NamedTuple):
    """The fields of `Mask`."""

    layout: BlockLayout | None
    is_causal: bool
    kind: str
    window: int | None = None
    kv_lengths: Tensor | None = None
    order: Tensor | None = None
    back: Tensor | None = None
    owner: str | None = None
    shape: tuple[int, ...] | None = None
    of_layers: tuple[Any, ...] | None = None
    selection: Any = None
    cu_seqlens: Tensor | None = None
    kv_len: int | None = None
    bias: Tensor | None = None


class Mask(_Fields):
    """Passes through a model in place of its attention mask.

    layout      of the queries and keys of this forward, causality included; None attends everywhere
    is_causal   True: also kv_pos <= q_pos + (kv_len - q_len). False if the layout already includes it
    kind        kind that transformers requested: "causal", "bidirectional" or "other"
    window      sliding window as transformers counts it, or None
    kv_lengths  int64 (batch,): number of keys that are tokens; `order` moves them to the front. None means all
    order       int64 (batch, slots): slots of keys, first those of `kv_lengths`; None keeps the order
    back        int64 (batch, q_len): inverse of `order`, if it also applies to the queries; otherwise None
    owner       class name of the config that holds the layout
    shape       (batch, 1, q_len, kv_len), the shape of the dense mask it replaces
    of_layers   the Mask of each layer, if their layouts differ; None means that all layers share this one
    selection   the Selection with which queries choose among the blocks of these keys; None means that they do not
    cu_seqlens  int64 (batch, documents + 1): boundaries of the packed documents among which queries choose; None means
                that the tokens of a sequence are one document
    kv_len      number of keys, the first ones, to which the other fields apply; the rest is unused room of a static
                cache. None: all
    bias        (batch or 1, heads or 1, q_len, kv_len) that the model added to the mask, as BEiT does: attention adds
                it to the scores. None: nothing

    A model that receives the mask from another accepts it as a dense mask, by `ndim` and `shape`, and may add a bias to
    it. A model that computes with it otherwise gets an error that names the layer, from tensor attributes, torch
    functions and operators alike.
    """

    __slots__ = ()

    ndim = 4

    # defining __eq__ would remove it
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            raise TypeError(_computed_with("=="))
        return tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def contiguous(self) -> Mask:
        """The mask itself: `generate` makes the masks of static caches contiguous."""
        return self

    def __add__(self, bias: Any) -> Any:
        if not isinstance(bias, Tensor) or bias.ndim != 4 or not bias.is_floating_point():
            raise TypeError(_computed_with("+"))
        return self._replace(bias=bias if self.bias is None else self.bias + bias)

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.add and len(args) == 2 and isinstance(args[1], Mask) and not kwargs:
            return args[1] + args[0]
        raise TypeError(_computed_with(f"torch's {getattr(function, '__name__', function)}"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # an AttributeError, so that hasattr returns False
        raise AttributeError(_computed_with(f".{name}"))


def _computed_with(what: str) -> str:
    """The message for code that uses a Mask as a tensor."""
    return (
        f"{running_layer()} computes with the attention mask itself ({what}), but "
        f"attn_implementation='{ATTENTION_NAME}' has a Mask in its place, which only its own attention reads: {HINT}"
    )


def _refuses(name: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise TypeError(_computed_with(name))

    return refuse


_OPERATORS = {
    "sub": "-", "mul": "*", "truediv": "/", "pow": "**", "and": "&", "or": "|", "xor": "^",
    "rsub": "-", "rmul": "*", "rtruediv": "/", "rand": "&", "ror": "|", "rxor": "^",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neg": "-", "invert": "~", "getitem": "[...]",
}  # fmt: skip
for _name, _sign in _OPERATORS.items():
    setattr(Mask, f"__{_name}__", _refuses(_sign))
