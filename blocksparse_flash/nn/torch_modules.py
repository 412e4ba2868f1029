"""Drop-in replacements for torch.nn.MultiheadAttention and TransformerEncoderLayer, with a layout."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import linear

from ..blocks.checks import boolean
from ..functional import attention
from ..runtime import tracing
from .arguments import Layout, check_features, checked_layout, positive_int, probability
from .layout_buffers import HoldsLayout


def _lengths(key_padding_mask: Tensor, batch: int, kv_len: int) -> Tensor:
    """int64 (batch,): number of keys that are not padding; they must come first."""
    shape = f"(batch={batch}, kv_len={kv_len})"
    if not isinstance(key_padding_mask, Tensor):
        kind = type(key_padding_mask).__name__
        raise TypeError(f"key_padding_mask must be a tensor {shape}, got {kind}; torch.as_tensor makes one")
    if key_padding_mask.shape != (batch, kv_len):
        raise ValueError(f"key_padding_mask must have shape {shape}, got {tuple(key_padding_mask.shape)}")
    if key_padding_mask.dtype != torch.bool and not key_padding_mask.is_floating_point():
        raise ValueError(f"key_padding_mask must be bool, or float with 0 and -inf only, got {key_padding_mask.dtype}")
    if torch.compiler.is_compiling():
        raise ValueError(
            "key_padding_mask cannot be read while torch.compile traces: give kv_lengths, the number of keys of each "
            "sequence that are not padding"
        )
    is_padding = key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask == -torch.inf
    if not tracing.has_values(key_padding_mask):
        return (~is_padding).sum(dim=1)
    if key_padding_mask.dtype != torch.bool and bool((key_padding_mask[~is_padding] != 0).any()):
        raise ValueError("key_padding_mask must be bool, or float with 0 and -inf only; add other values to attn_mask")
    if bool((is_padding[:, :-1] & ~is_padding[:, 1:]).any()):
        raise ValueError(
            "key_padding_mask must be True for the last keys of a sequence only, got padding in front of keys: pad on "
            "the right, or give a layout per batch"
        )
    return (~is_padding).sum(dim=1)


def _check_heads(names: tuple[str, str], embed_dim: Any, num_heads: Any) -> None:
    if positive_int(names[0], embed_dim) % positive_int(names[1], num_heads):
        raise ValueError(f"{names[0]} must be a multiple of {names[1]}={num_heads}, got {embed_dim}")


def _check_sizes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse inputs (batch, length, features) of other batches, or keys and values of other lengths."""
    for name, given in (("key", key), ("value", value)):
        if given.shape[0] != query.shape[0]:
            raise ValueError(f"{name} must have the batch of query, {query.shape[0]}, got {given.shape[0]}")
    if key.shape[1] != value.shape[1]:
        raise ValueError(f"value must have as many tokens as key, {key.shape[1]}, got {value.shape[1]}")


def _pair_bias(attn_mask: Tensor, heads: int, q: Tensor, k: Tensor) -> Tensor:
    """A float attn_mask of torch as (1, 1, q_len, kv_len) or (batch, heads, q_len, kv_len)."""
    if not isinstance(attn_mask, Tensor) or not attn_mask.is_floating_point():
        raise ValueError(
            "attn_mask must be None or float, added to scores, or come with is_causal=True: make a layout of a bool "
            "mask once, BlockLayout.from_dense(~attn_mask, block_size=64), and give it to the constructor"
        )
    lengths = q.shape[2], k.shape[2]
    if attn_mask.shape not in (lengths, (q.shape[0] * heads, *lengths)):
        raise ValueError(
            f"attn_mask must have shape {tuple(lengths)} or {(q.shape[0] * heads, *lengths)}, (batch * heads, q_len, "
            f"kv_len), got {tuple(attn_mask.shape)}"
        )
    # as torch, which converts it to the dtype of the query
    attn_mask = attn_mask.to(q.dtype)
    return attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, heads))


class MultiheadAttention(HoldsLayout, torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention over a layout. Same arguments; state dicts load both ways.

    embed_dim, num_heads, dropout, bias, ...  as torch.nn.MultiheadAttention
    add_bias_kv, add_zero_attn  must be False: they add keys that are not in the layout
    layout   BlockLayout of q_len x kv_len; a specification such as "local(window=256)", from which a LayoutByLength
             builds the layout of as many queries and keys; a function from the number of queries to a layout; or None:
             every pair attends
    causal   True keeps only kv_pos <= q_pos + (kv_len - q_len)
    raises   TypeError, ValueError

    Attention weights are never stored, so need_weights defaults to False and must not be True.

    >>> MultiheadAttention(64, 4, batch_first=True, causal=True)(*[torch.zeros(2, 256, 64)] * 3)[0].shape
    torch.Size([2, 256, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        *others: Any,
        layout: Layout = None,
        causal: bool = False,
        **named: Any,
    ) -> None:
        for name, value in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if value:
                raise ValueError(f"{name} must be False, got {value!r}: it adds a key that is not in the layout")
        probability("dropout", dropout, below_one=True)
        _check_heads(("embed_dim", "num_heads"), embed_dim, num_heads)
        for name, size in {**dict(zip(("kdim", "vdim"), others, strict=False)), **named}.items():
            if name in ("kdim", "vdim") and size is not None:
                positive_int(name, size)
        super().__init__(embed_dim, num_heads, dropout, bias, False, False, *others, **named)
        self.layout, self.causal = checked_layout(layout), boolean(causal, "causal")
        self._is_packed = self._qkv_same_embed_dim
        # False keeps torch's encoders from their fused path, which would compute dense attention
        self._qkv_same_embed_dim = False
        self._keep_layout_placed()

    def _reset_parameters(self) -> None:
        """As torch, which asks whether the weights are packed."""
        kept = self._qkv_same_embed_dim
        # torch's constructor calls this before _is_packed exists
        self._qkv_same_embed_dim = getattr(self, "_is_packed", kept)
        super()._reset_parameters()
        self._qkv_same_embed_dim = kept

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q, k, v (batch, heads, length, head_dim)."""
        if self._is_packed:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [
            rearrange(linear(x, weight, bias), "batch length (heads d) -> batch heads length d", heads=self.num_heads)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        ]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        # ignored, since there are no weights to average
        average_attn_weights: bool = True,  # noqa: ARG002
        is_causal: bool = False,
        *,
        kv_lengths: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Returns (out, None), where out has the shape of query.

        query, key, value  (length, batch, features), batch first with batch_first=True, or (length, features)
        key_padding_mask   (batch, kv_len), True or -inf for padding, which must be at the end. Waits for its device and
                           cannot be compiled; kv_lengths avoids both
        need_weights       must be False
        attn_mask          float (q_len, kv_len) or (batch * heads, q_len, kv_len), added to the scores as pair_bias.
                           Not bool, since the layout is the mask. Ignored with is_causal=True, where torch requires the
                           causal mask
        average_attn_weights  ignored
        is_causal          as the constructor's causal, for this call
        kv_lengths         int32 or int64 (batch,): keys from kv_lengths[b] on are padding
        """
        if need_weights:
            raise ValueError("need_weights must be False: attention weights are never stored")
        if key_padding_mask is not None and kv_lengths is not None:
            raise ValueError("key_padding_mask and kv_lengths describe the same padding: give one of them")
        for name, given in (("query", query), ("key", key), ("value", value)):
            check_features(name, given, may_be_jagged=True)
        if not query.dim() == key.dim() == value.dim() or query.dim() not in (2, 3):
            raise ValueError(
                "query, key and value must all have 3 axes (2 without a batch), got "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        sizes = self.embed_dim, self.kdim, self.vdim
        for name, given, size in zip(("query", "key", "value"), (query, key, value), sizes, strict=True):
            if given.shape[-1] != size:
                raise ValueError(f"{name} must have {size} features per token, got shape {tuple(given.shape)}")
        boolean(is_causal, "is_causal")
        if query.is_nested and not self.batch_first:
            raise ValueError("query is a nested tensor, which needs batch_first=True in the constructor")
        if query.is_nested and self.layout is not None:
            raise ValueError(
                "the layer's layout must be None for a nested query, whose sequences attend to themselves; "
                "torch.nested.to_padded_tensor(query, 0.0) pads the sequences"
            )
        masks_given = {"key_padding_mask": key_padding_mask, "kv_lengths": kv_lengths, "attn_mask": attn_mask}
        for name, mask in masks_given.items():
            if query.is_nested and mask is not None:
                raise ValueError(f"{name} must be None for a nested query, whose sequences attend to themselves")
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = query[None], key[None], value[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if not query.is_nested:
            _check_sizes(query, key, value)
        q, k, v = self._project(query, key, value)
        if key_padding_mask is not None:
            is_row = not is_batched and isinstance(key_padding_mask, Tensor)
            kv_lengths = _lengths(key_padding_mask[None] if is_row else key_padding_mask, q.shape[0], k.shape[2])
        swapped = (
            "looks like (length, batch, embed_dim); use transpose(0, 1), or batch_first=False"
            if self.batch_first
            else "looks like (batch, length, embed_dim); give batch_first=True to the constructor"
        )
        layout = self.layout_for(q.shape[2], q.shape[0] if is_batched else None, swapped)
        bias = None if attn_mask is None or is_causal else _pair_bias(attn_mask, self.num_heads, q, k)
        options: dict[str, Any] = {"kv_lengths": kv_lengths, "dropout_p": self.dropout if self.training else 0.0}
        out = attention(q, k, v, layout, causal=self.causal or is_causal, pair_bias=bias, **options)
        out = self.out_proj(rearrange(out, "batch heads length d -> batch length (heads d)"))
        if not is_batched:
            return out[0], None
        return out if self.batch_first else out.transpose(0, 1), None


class TransformerEncoderLayer(torch.nn.TransformerEncoderLayer):
    """torch.nn.TransformerEncoderLayer over a layout, also inside torch.nn.TransformerEncoder.

    layout, causal  as in MultiheadAttention
    the rest        as torch.nn.TransformerEncoderLayer; state dicts load both ways

    >>> TransformerEncoderLayer(64, 4, batch_first=True)(torch.zeros(2, 256, 64)).shape
    torch.Size([2, 256, 64])
    """

    def __init__(self, *arguments: Any, layout: Layout = None, causal: bool = False, **named: Any) -> None:
        given = {**dict(zip(("d_model", "nhead", "dim_feedforward", "dropout"), arguments, strict=False)), **named}
        if "d_model" in given and "nhead" in given:
            _check_heads(("d_model", "nhead"), given["d_model"], given["nhead"])
        if "dropout" in given:
            probability("dropout", given["dropout"], below_one=True)
        super().__init__(*arguments, **named)
        theirs = self.self_attn
        own = {"dropout": theirs.dropout, "bias": theirs.in_proj_bias is not None, "batch_first": theirs.batch_first}
        own |= {"device": theirs.out_proj.weight.device, "dtype": theirs.out_proj.weight.dtype}
        self.self_attn = MultiheadAttention(theirs.embed_dim, theirs.num_heads, **own, layout=layout, causal=causal)
