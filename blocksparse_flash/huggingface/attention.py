"""The attention function of transformers: one layer's attention under the Mask of its forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..functional import attention
from .config_layouts import of_layer
from .mask import Mask
from .mask_builder import mask_of_layer
from .model_hooks import record_attention
from .names import ATTENTION_NAME, CONFIG_KEY, HINT, running_layer
from .selection import attention_to_selection, check_call

# arguments that transformers passes to attention functions and that do not change the result
_HARMLESS = {
    "cache_position",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_ids",
    "return_dict",
    "use_cache",
}
_HINTS = {
    "output_attentions": "attention weights are never stored",
    "cache": "continuous batching keeps its cache in pages; model.generate does not",
    **dict.fromkeys(
        ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
        "packed sequences are recognized by position_ids that restart, if there is no attention_mask",
    ),
}


def _refuse(unread: dict[str, Any]) -> None:
    """ValueError for arguments that would change the result, and for unknown ones."""
    for name, value in unread.items():
        if value is not None and value is not False and name not in _HARMLESS:
            hint = _HINTS.get(name, "its meaning is unknown")
            given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"attn_implementation='{ATTENTION_NAME}' cannot attend with {name}, which is {given}: {hint}; "
                "attn_implementation='eager' uses transformers' own attention"
            )


def _check(mask: Any, q_len: int, kv_len: int, is_causal: bool | None, sliding_window: int | None) -> None:
    """Raises if a mask is no Mask, or contradicts the arguments of its layer."""
    if not isinstance(mask, Mask):
        raise TypeError(
            "attention_mask must be (batch, length), from which transformers makes the masks of layers, but "
            f"{running_layer()} attends with a {type(mask).__name__} of shape {tuple(getattr(mask, 'shape', ()))}: a "
            f"mask of pairs is a layout, config.{CONFIG_KEY} = blocksparse_flash.interop.from_huggingface(mask, "
            f"block_size=128); if none was given, the model makes a mask of its own: {HINT}"
        )
    if mask.shape is not None and mask.shape[2:] != (q_len, kv_len):
        raise ValueError(
            f"{running_layer()} attends with {q_len} queries to {kv_len} keys, but its model asked for a mask of "
            f"{mask.shape[2]} x {mask.shape[3]}, without positions for the others: {HINT}"
        )
    if mask.kind == "other":
        return
    if is_causal is not None and is_causal != (mask.kind == "causal"):
        raise ValueError(
            f"is_causal={is_causal} contradicts the mask that the model made, which is {mask.kind}, in "
            f"{running_layer()}: {HINT}"
        )
    if sliding_window is not None and mask.window is None and kv_len > sliding_window:
        raise ValueError(
            f"sliding_window={sliding_window} contradicts the mask that the model made, which has no window over its "
            f"{kv_len} keys"
        )


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    **unread: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers, with its argument names: `attention` with the Mask of the forward.

    module      the layer; its config gives the layout if there is no mask
    query       (batch, heads, q_len, head_dim)
    key, value  (batch, kv_heads, kv_len, ...), not repeated for grouped heads
    attention_mask  result of `attention_mask`; None if transformers requested none; or a float mask that the model adds
                to scores, as in Swin, (batch or 1, heads or 1, q_len or 1, kv_len), and which alone masks
    dropout, scaling, deterministic  dropout_p, scale and deterministic of `attention`
    is_causal, sliding_window  must agree with the mask
    s_aux, softcap, and position_bias in `unread`: sinks, softcap and pair_bias of `attention`; with dropout, refused
                if the mask has a selection. The bias of a Mask is added to position_bias
    returns     (out, None), out of shape (batch, q_len, heads, v_head_dim); attention weights are never stored
    raises      ValueError for another argument in `unread` that would change the result
    """
    bias = unread.pop("position_bias", None)
    _refuse(unread)
    mask: Any = attention_mask
    if isinstance(mask, Tensor) and mask.is_floating_point() and mask.dim() == 4:
        mask = mask.expand(-1, -1, query.shape[2], -1) if mask.shape[2] == 1 else mask
        bias = mask if bias is None else bias + mask
        # it also has the causality and the windows of the layer
        mask = mask_of_layer(module, query.shape[2], key.shape[2], False, query.device)._replace(kind="other")
    if mask is None:
        mask = mask_of_layer(module, query.shape[2], key.shape[2], is_causal, query.device)
    if isinstance(mask, Mask) and mask.bias is not None:
        bias = mask.bias if bias is None else bias + mask.bias
    if isinstance(mask, Mask) and mask.of_layers is not None:
        mask = of_layer(mask.of_layers, module)
    _check(mask, query.shape[2], key.shape[2], is_causal, sliding_window)
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"{running_layer()} attends with keys of {key.shape[1]} heads and {key.shape[2]} positions, but values of "
            f"{value.shape[1]} and {value.shape[2]}: {HINT}"
        )
    if mask.selection is not None:
        check_call(mask, dropout, s_aux, softcap, bias)
    record_attention(mask.owner)
    if mask.kv_len is not None:
        key, value = key[:, :, : mask.kv_len], value[:, :, : mask.kv_len]
        bias = None if bias is None else bias[..., : mask.kv_len]
    if mask.order is not None:
        order = mask.order[:, None, :, None]
        key, value = torch.take_along_dim(key, order, dim=2), torch.take_along_dim(value, order, dim=2)
        if mask.back is not None:
            query = torch.take_along_dim(query, order, dim=2)
        if bias is not None:
            bias = torch.take_along_dim(bias, mask.order[:, None, None], dim=3)
            bias = bias if mask.back is None else torch.take_along_dim(bias, order, dim=2)
    if mask.selection is not None:
        out = attention_to_selection(query, key, value, mask, scale=scaling, deterministic=deterministic)
    else:
        options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "deterministic": deterministic}
        options |= {"kv_lengths": mask.kv_lengths, "sinks": s_aux, "softcap": softcap, "pair_bias": bias}
        out = attention(query, key, value, mask.layout, causal=mask.is_causal, **options)
    if mask.back is not None:
        out = torch.take_along_dim(out, mask.back[:, None, :, None], dim=2)
    return out.transpose(1, 2).contiguous(), None
