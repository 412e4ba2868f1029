"""Interception of the attention of diffusers. All private parts of diffusers that the package uses are in this file.

Processors with an attribute `_attention_backend` call the dispatcher of diffusers, to which `connect` adds an entry.
Others call torch's scaled_dot_product_attention, which a function mode replaces while their layer runs.
"""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

BACKEND_NAME = "blocksparse_flash"
TESTED = "0.36 to 0.42"


class _Running(threading.local):
    """The layer that runs in this thread, a `using._Call`."""

    attention: Any = None


class _Traced:
    """The layer that torch.compile traces. Graphs do not read it: it is written before."""

    attention: Any = None


_running = _Running()


def _exchanged(attention: Any) -> Any:
    """Sets the running layer, and returns the one before."""
    holder: Any = _Traced if torch.compiler.is_compiling() else _running
    before, holder.attention = holder.attention, attention
    return before


def _dispatched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """The entry of diffusers' dispatcher: tensors (batch, length, heads, head_dim)."""
    if return_lse:
        raise ValueError(f"return_lse must be False for attention backend '{BACKEND_NAME}': it returns no lse")
    if _parallel_config is not None:
        raise ValueError(
            f"parallel_config must be None for attention backend '{BACKEND_NAME}', which has no context parallelism in "
            "diffusers: call model.disable_parallelism(), or remove() what `use` returned"
        )
    attention = _exchanged(None)
    try:
        if attention is None:
            raise ValueError(
                f"attention backend '{BACKEND_NAME}' attends in layers that were given to "
                "blocksparse_flash.diffusers.use, but this is none of them: call `use` again, or "
                "model.reset_attention_backend() for the model's own attention"
            )
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out = attention.attend(q, k, v, attn_mask, dropout_p, is_causal, scale)
        if out is not None:
            return out.transpose(1, 2)
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        return dispatch_attention_fn(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, backend=attention.own_backend
        )
    finally:
        _exchanged(attention)


class _Intercepting(TorchFunctionMode):
    """Replaces torch's scaled_dot_product_attention by that of the running layer."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention:
            return function(*args, **kwargs)
        out = self.attention.attend(*args, **kwargs)
        return function(*args, **kwargs) if out is None else out


@functools.cache
def _backend() -> Any:
    """The name of this package among the backends of diffusers, with its entry in their registry."""
    import diffusers

    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

        names: Any = AttentionBackendName
        # a new member of the enumeration, as the dispatcher looks names up there
        name = str.__new__(names, BACKEND_NAME)
        name._name_, name._value_ = BACKEND_NAME.upper(), BACKEND_NAME
        names._member_names_.append(name._name_)
        names._member_map_[name._name_] = names._value2member_map_[name._value_] = name
        registry: Any = _AttentionBackendRegistry
        registry.register(name)(_dispatched)
        if names(BACKEND_NAME) is not name or registry._backends[name] is not _dispatched:
            raise AttributeError("the dispatcher does not find the backend")
    except (ImportError, AttributeError, TypeError, KeyError, ValueError) as error:
        raise ImportError(
            f"blocksparse_flash.diffusers was tested with diffusers {TESTED}, and cannot add its backend to "
            f"{diffusers.__version__} ({error}): install one of these versions"
        ) from error
    return name


def connect(module: Any, *, is_shared: bool) -> Any:
    """Makes the dispatcher call this package for a layer whose processor uses it, and returns its own backend.

    is_shared  whether other layers have the same processor, as after set_attn_processor: this one then gets a copy
    """
    if not hasattr(module.processor, "_attention_backend"):
        return None
    if is_shared:
        module.processor = copy.copy(module.processor)
    processor = module.processor
    own, processor._attention_backend = processor._attention_backend, _backend()
    return own


def disconnect(processor: Any, own_backend: Any) -> None:
    """Undoes `connect`, unless another backend was set meanwhile."""
    if getattr(processor, "_attention_backend", None) == BACKEND_NAME:
        processor._attention_backend = own_backend


def holder_of(module: Any, function: Any) -> tuple[Any, str] | None:
    """(object, attribute) that holds the forward of a module with this function; None if none does.

    Hooks of diffusers, such as those of caches, and of accelerate replace `module.forward`. They keep the one before,
    to call it, and put it back when they are removed.
    """
    hooks = getattr(getattr(module, "_diffusers_hook", None), "_fn_refs", ())
    holders = [(hook, name) for hook in hooks for name in ("forward", "original_forward")]
    for holder, name in ((module, "forward"), *holders, (module, "_old_forward")):
        if getattr(getattr(holder, name, None), "__func__", None) is function:
            return holder, name
    return None


def skips_scores(module: Any) -> bool:
    """Whether a hook of diffusers gives each query its own value alone, as for perturbed attention guidance.

    It does so in torch's scaled_dot_product_attention.
    """
    hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
    return any(getattr(hook, "skip_attention_scores", False) for hook in hooks.values())


def run(forward: Any, processor: Any, attention: Any, args: Any, kwargs: Any) -> Any:
    """Calls the forward of a layer, with `attention` in place of its own."""
    if hasattr(processor, "_attention_backend"):
        before = _exchanged(attention)
        try:
            return forward(*args, **kwargs)
        finally:
            _exchanged(before)
    with _Intercepting(attention):
        return forward(*args, **kwargs)
