"""KVCache: keys and values of the tokens that a SelfAttention layer has read, for decoding."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import layout_crops, validation
from ..blocks.checks import check_tensor
from ..layout import BlockLayout
from .arguments import positive_int


class KVCache:
    """Keys and values of the tokens that one SelfAttention layer has read, in memory allocated once.

    batch       sequences; all have the same number of tokens
    max_length  tokens that fit
    kv_heads    key and value heads of the layer
    head_dim    features per head of the layer
    device      of the tensors; None is PyTorch's default device
    dtype       of the tensors, equal to that of the layer's keys; None is PyTorch's default dtype
    raises      TypeError, ValueError

    `layer.new_cache(batch, max_length)` makes one that fits the layer. `layer(x, cache=cache)` reads the next tokens: a
    whole prompt, one token, or several. Memory: 2 * batch * kv_heads * max_length * head_dim elements.

    A cache belongs to the first layer that uses it, and holds no gradients. `copy.deepcopy` copies it, for several
    continuations of one prompt.

    >>> cache = KVCache(2, 1024, kv_heads=4, head_dim=64)
    >>> cache.length, cache.max_length
    (0, 1024)
    """

    def __init__(
        self,
        batch: int,
        max_length: int,
        kv_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {"batch": batch, "kv_heads": kv_heads, "max_length": max_length, "head_dim": head_dim}
        shape = [positive_int(name, size) for name, size in sizes.items()]
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype must be a floating torch.dtype such as torch.bfloat16, got {dtype!r}")
        # tensors made in inference mode could not be written outside it
        with torch.inference_mode(False):
            self._k, self._v = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))
        self._length = 0
        self._owner: weakref.ref[Any] | None = None

    @property
    def length(self) -> int:
        """Tokens in the cache, which is also the index of the next token."""
        return self._length

    @property
    def max_length(self) -> int:
        """Tokens that fit."""
        return self._k.shape[2]

    @property
    def batch(self) -> int:
        """Sequences."""
        return self._k.shape[0]

    @property
    def k(self) -> Tensor:
        """The keys in the cache, after rotary positions: (batch, kv_heads, length, head_dim), a view."""
        return self._k[:, :, : self._length]

    @property
    def v(self) -> Tensor:
        """The values in the cache: (batch, kv_heads, length, head_dim), a view."""
        return self._v[:, :, : self._length]

    def truncate(self, length: int = 0) -> None:
        """Forgets all tokens but the first `length`; 0 empties the cache, for any layer to use.

        raises  ValueError if the cache has fewer tokens
        """
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"length must be an int, got {length!r}")
        if not 0 <= length <= self._length:
            raise ValueError(f"length must be from 0 to {self._length}, the tokens in the cache, got {length}")
        self._length = length
        if not length:
            self._owner = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of the next tokens, and returns those of all tokens, as views.

        k, v     (batch, kv_heads, tokens, head_dim), of the cache's dtype and device
        returns  k and v of the cache, (batch, kv_heads, length, head_dim)
        raises   TypeError, ValueError if they do not fit or there is no room, before anything is stored
        """
        self.check(k, v)
        stop = self._length + k.shape[2]
        self._k[:, :, self._length : stop] = k
        self._v[:, :, self._length : stop] = v
        self._length = stop
        return self.k, self.v

    def check(self, k: Tensor, v: Tensor) -> None:
        """Raises if `append(k, v)` would.

        k, v  (batch, kv_heads, tokens, head_dim)
        """
        batch, kv_heads, max_length, head_dim = self._k.shape
        for name, tensor in (("k", k), ("v", v)):
            check_tensor(name, tensor)
            shape = tuple(tensor.shape)
            if len(shape) != 4 or (shape[1], shape[3]) != (kv_heads, head_dim):
                raise ValueError(
                    f"{name} must have shape (batch={batch}, kv_heads={kv_heads}, tokens, head_dim={head_dim}), as the "
                    f"cache has, got {shape}; layer.new_cache(batch, max_length) makes a cache for a layer"
                )
            if shape[0] != batch:
                remedy = f"make a cache for it, layer.new_cache({shape[0]}, max_length={max_length})"
                raise ValueError(
                    f"the cache is for batch={batch}, got an input of batch {shape[0]}"
                    f"{': ' + remedy if shape[0] else ', which needs no cache'}"
                )
            if tensor.dtype != self._k.dtype or tensor.device != self._k.device:
                raise ValueError(
                    f"{name} must be {self._k.dtype} on {self._k.device}, as the cache is, got {tensor.dtype} on "
                    f"{tensor.device}: layer.new_cache(batch, max_length, dtype={tensor.dtype}) makes one of another "
                    "type, such as that of autocast, on the device of the layer"
                )
        if k.shape != v.shape:
            raise ValueError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}")
        if self._length + k.shape[2] > max_length:
            raise ValueError(
                f"the cache has room for max_length={max_length} tokens and holds {self._length}, but got "
                f"{k.shape[2]} more: make it longer, or cache.truncate() to begin a new sequence"
            )
        self.check_gradient("k", k)
        self.check_gradient("v", v)

    def check_gradient(self, name: str, tensor: Tensor | None) -> None:
        """ValueError if a tensor of a step would have a gradient: the next step changes the cache in place.

        name    of the argument, for the message
        tensor  None: the layer has none
        """
        if tensor is not None:
            validation.check_no_gradient(name, tensor)

    def claim(self, layer: Any) -> None:
        """Records the layer that uses this cache; ValueError if the cache holds tokens of another layer.

        layer  a module
        """
        owner = None if self._owner is None else self._owner()
        if self._length and owner is not None and owner is not layer:
            raise ValueError(
                "the cache holds the keys of another layer: make one for each layer, layer.new_cache(batch, "
                "max_length); nn.Decoder.new_caches makes them for all its blocks"
            )
        self._owner = weakref.ref(layer)

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """If the body raises, the cache holds the tokens from before it, so that the step can be repeated."""
        length, owner = self._length, self._owner
        try:
            yield
        except BaseException:
            # keys and values past the length are not used
            self._length, self._owner = length, owner
            raise

    def __getstate__(self) -> dict[str, Any]:
        # a weak reference cannot be pickled
        return {**self.__dict__, "_owner": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # as in __init__, also if it is unpickled in inference mode
        with torch.inference_mode(False):
            self._k, self._v = (each.clone() if each.is_inference() else each for each in (self._k, self._v))

    def __copy__(self) -> KVCache:
        """With memory of its own: two caches that share it would overwrite each other's tokens."""
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        # of the copy of its layer, if that was copied before
        owner = None if self._owner is None else self._owner()
        owner = memo.get(id(owner), owner)
        reference = None if owner is None else weakref.ref(owner)
        # as in __init__
        with torch.inference_mode(False):
            copied.__dict__.update(self.__dict__, _k=self._k.clone(), _v=self._v.clone(), _owner=reference)
        return copied

    def __repr__(self) -> str:
        batch, kv_heads, max_length, head_dim = self._k.shape
        return (
            f"KVCache(length={self._length}, {batch=}, {max_length=}, {kv_heads=}, {head_dim=}, "
            f"device='{self._k.device}', dtype={self._k.dtype})"
        )


def check_is_cache(cache: object, name: str = "cache") -> None:
    """TypeError for anything but a KVCache."""
    if not isinstance(cache, KVCache):
        raise TypeError(
            f"{name} must be a KVCache, as layer.new_cache(batch, max_length) makes it, got {type(cache).__name__}"
        )


# ---- layouts of the tokens in a cache ----


@functools.lru_cache(maxsize=16)
def _on_host(layout: BlockLayout) -> BlockLayout:
    """A layout on the CPU, where crops are made."""
    return layout.to("cpu")


@functools.lru_cache(maxsize=64)
def _check_causal(layout: BlockLayout) -> None:
    """ValueError for a layout in which a token attends to later ones. O(nnz), once for each layout."""
    try:
        layout.assert_causal()
    except ValueError as error:
        raise ValueError(f"a cache needs a causal layer, since it has no keys of tokens to come: {error}") from error


def check_layout(layout: BlockLayout | None, cache: KVCache, *, causal: bool) -> None:
    """ValueError if a layer with this layout cannot use a cache.

    layout  of the longest sequence: (1 | batch, 1 | heads, length, length), or None for every pair
    causal  whether the layer keeps only kv_pos <= q_pos
    """
    if layout is None:
        if not causal:
            raise ValueError(
                "a cache needs a causal layer, since it has no keys of tokens to come, but layout is None and causal "
                "is False: SelfAttention(..., causal=True)"
            )
        return
    if layout.q_len != layout.kv_len or layout.q_len < cache.max_length:
        raise ValueError(
            f"layout must cover all {cache.max_length} tokens of the cache, got {layout.q_len} x {layout.kv_len}: give "
            f"the layer a longer layout or a function of the length, or make the cache with max_length={layout.q_len}"
        )
    if not causal:
        _check_causal(layout)


def layout_of_step(
    layout: BlockLayout | None, cache: KVCache, n_tokens: int, device: torch.device, *, causal: bool
) -> tuple[BlockLayout | None, bool]:
    """(layout, causal) for `attention` of the next n_tokens to themselves and all tokens in the cache.

    layout, causal  as `check_layout`
    """
    check_layout(layout, cache, causal=causal)
    if layout is None:
        return None, True
    stop = cache.length + n_tokens
    layout = layout if layout.device.type == "cpu" else _on_host(layout)
    full = layout_crops.FullLayout(layout, layout.q_len, None, 0 if causal else None)
    # causality is in the crop
    return layout_crops.cropped(full, layout_crops.Crop(cache.length, n_tokens, 0, stop, device)), False
