"""`use`: layouts for the self-attention of a transformer of diffusers."""

from __future__ import annotations

import inspect
import re
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..dispatch import BACKENDS
from ..functional import attention
from ..layout import BlockLayout
from ..runtime import tracing
from . import dispatching
from .selecting import Choice

# where transformers that attend to image or video and text in one sequence put the text
TEXT_PLACES = {
    "ChromaTransformer2DModel": "first",
    "CogVideoXTransformer3DModel": "first",
    "FluxTransformer2DModel": "first",
    "HunyuanVideoTransformer3DModel": "last",
    "QwenImageTransformer2DModel": "first",
    "SD3Transformer2DModel": "last",
}
# the blocks of a transformer, but not those that prepare its text
BLOCKS = r"^\w+\.\d+\."
_USE = "_blocksparse_flash_use"
# numbers of text tokens for which a `use` keeps layouts: some pipelines do not pad prompts to one length
_MAX_SEQUENCES = 32


class _Sequence(NamedTuple):
    """What calls with one number of text tokens share; tokens come in the order of `use`, then text."""

    # int64 (length,): the token at each position, and its inverse; None for the order of the model
    tokens: Tensor | None
    places: Tensor | None
    layout: BlockLayout | None


class Use:
    """What `use` returns: its layers, and a switch. As a context manager, it removes the layout at the end.

    layers    names of the attention modules, prefixed with the name of the transformer if a pipeline has two
    is_dense  True: the next calls use the model's own attention. Set by `dense_steps` at each step, if that is not 0;
              otherwise yours, such as in callback_on_step_end
    layout, order, backend  arguments of `use`, which makes these objects
    """

    def __init__(self, layout: BlockLayout | Choice | None, order: Tensor | None, backend: str) -> None:
        self.is_dense = False
        # whether a layer has attended, or has been given to another `use`
        self._has_attended = False
        self.layers: tuple[str, ...] = ()
        self._layout, self._order, self._backend = layout, order, backend
        self._removals: list[Callable[[], None]] = []
        self._sequences: dict[tuple[int | None, int, str | None, torch.device], _Sequence] = {}
        # the last mask that was checked, and its lengths
        self._mask: tuple[weakref.ref[Tensor], int, Tensor | None] | None = None

    def remove(self) -> None:
        """Gives the layers their own attention again."""
        while self._removals:
            self._removals.pop()()

    def __enter__(self) -> Use:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()

    def __deepcopy__(self, _: dict[int, Any]) -> Use:
        # the layers of a copied model share their Use with those of the original
        return self

    def __reduce__(self) -> Any:
        raise ValueError(
            "a model or pipeline must have its own attention to be pickled, but `use` gave it a layout: call remove() "
            "of what `use` returned, and `use` again after loading; or save its weights, by save_pretrained"
        )

    def __repr__(self) -> str:
        return f"Use({self._layout!r}, {len(self.layers)} layers)"

    @property
    def _tokens(self) -> int | None:
        """Tokens of the image or video; None without a layout and order, which fit every length."""
        if self._order is not None:
            return len(self._order)
        return self._layout.q_len if isinstance(self._layout, BlockLayout) else None

    def _sequence(self, n_tokens: int | None, n_text: int, place: str | None, device: torch.device) -> _Sequence:
        key = n_tokens, n_text, place if n_text else None, device
        if key not in self._sequences:
            if torch.compiler.is_compiling():
                raise ValueError(
                    f"torch.compile cannot make the layout for {n_text} text tokens on {device}: call the model once "
                    "with them before it is compiled"
                )
            # a later forward may train with what one in inference mode made
            with tracing.outside_transforms():
                made = self._new_sequence(*key)
            if len(self._sequences) >= _MAX_SEQUENCES:
                # the oldest
                self._sequences.pop(next(iter(self._sequences)), None)
            self._sequences[key] = made
            return made
        return self._sequences[key]

    def _new_sequence(self, n_tokens: int | None, n_text: int, place: str | None, device: torch.device) -> _Sequence:
        tokens: Tensor | None = None
        if n_tokens is not None and (self._order is not None or place == "first"):
            own = torch.arange(n_tokens, device="cpu") if self._order is None else self._order
            ahead = n_text if place == "first" else 0
            text = torch.arange(n_text, device="cpu") + (0 if place == "first" else n_tokens)
            tokens = torch.cat([own + ahead, text])
        layout = self._layout if isinstance(self._layout, BlockLayout) else None
        if layout is not None:
            if n_text:
                # imports the mask builders
                from ..masks import global_tokens

                length = layout.q_len + n_text
                text_pairs = global_tokens(length, tokens=range(layout.q_len, length), block_size=layout.block_size)
                layout = layout.to("cpu").pad((0, n_text), (0, n_text)) | text_pairs
            layout = layout.to(device)
        if tokens is None:
            return _Sequence(None, None, layout)
        return _Sequence(tokens.to(device), torch.argsort(tokens).to(device), layout)

    def _kv_lengths(self, mask: Tensor, k: Tensor, tokens: Tensor | None, layer: str) -> Tensor | None:
        """The lengths (batch,) of a mask of padded keys; None if it masks nothing."""
        is_compiling = torch.compiler.is_compiling()
        # layers share the mask of a forward; one that changes in place without a version is checked each time
        version = -1 if is_compiling or mask.is_inference() else mask._version
        if version >= 0 and self._mask and self._mask[0]() is mask and self._mask[1] == version:
            return self._mask[2]
        if mask.dtype != torch.bool:
            raise ValueError(f"attn_mask must be bool or None, got {mask.dtype} in {layer}: {_OWN}")
        is_key = mask
        if mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1:
            is_key = mask[:, 0, 0]
        if not is_compiling and bool(mask.all()):
            lengths = None
        elif is_key.shape not in ((k.shape[0], k.shape[2]), (1, k.shape[2])):
            raise ValueError(
                f"attn_mask must be one of padded keys, (batch, 1, 1, {k.shape[2]}), got {tuple(mask.shape)} in "
                f"{layer}: {_OWN}"
            )
        else:
            if tokens is not None:
                is_key = is_key[:, tokens]
            lengths = is_key.sum(1)
            is_last = (is_key[:, 1:] <= is_key[:, :-1]).all()
            message = f"attn_mask must mask only text, at its end, but masks other keys in {layer}: {_OWN}"
            if is_compiling:
                torch._assert_async(is_last, message)
            elif not is_last:
                raise ValueError(message)
            lengths = lengths.expand(k.shape[0])
        if version >= 0:
            self._mask = weakref.ref(mask), version, lengths
        return lengths

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float | None,
        layer: _Layer,
        own_len: int | None = None,
    ) -> Tensor:
        """Self-attention of one layer, tensors (batch, heads, length, head_dim) in the order of the model.

        own_len  tokens beside the text, if the layer tells them
        """
        self._has_attended = True
        n_tokens = self._tokens
        if self._layout is None and n_tokens is None and mask is not None and layer.text == "first":
            # padded text must come last
            n_tokens = own_len
        n_text = 0 if n_tokens is None else q.shape[2] - n_tokens
        if n_text < 0:
            raise ValueError(
                f"{layer.name} attends to {q.shape[2]} tokens, but the layout is for {n_tokens}: give `use` a layout "
                "of the grid that this resolution has, or only the layers that it fits: layers=..."
            )
        if n_text and layer.text is None:
            raise ValueError(
                f"{layer.name} attends to {q.shape[2]} tokens, {n_text} more than the {n_tokens} of the layout: give "
                "`use` a layout of the grid that this resolution has; or, if the others are text in the same sequence, "
                'where it is: text="first" or text="last"'
            )
        sequence = self._sequence(n_tokens, n_text, layer.text, q.device)
        lengths = None if mask is None else self._kv_lengths(mask, k, sequence.tokens, layer.name)
        options: dict[str, Any] = {"scale": scale, "kv_lengths": lengths, "backend": self._backend}
        if sequence.tokens is not None:
            q, k, v = (_reordered(tensor, sequence.tokens) for tensor in (q, k, v))
        if self._layout is None or isinstance(self._layout, BlockLayout):
            out = attention(q, k, v, sequence.layout, **options)
        else:
            out = self._attend_chosen(q, k, v, n_tokens, options)
        return out if sequence.places is None else _reordered(out, sequence.places)

    @tracing.untraced
    def _attend_chosen(self, q: Tensor, k: Tensor, v: Tensor, n_tokens: int | None, options: dict[str, Any]) -> Tensor:
        """Attention with a layout that is chosen from q and k; text comes after n_tokens tokens."""
        assert callable(self._layout)
        own = q[:, :, :n_tokens]
        with torch.no_grad():
            layout = self._layout(own, k)
        if not isinstance(layout, BlockLayout):
            raise ValueError(f"layout must be a function that returns a BlockLayout, got {type(layout).__name__}")
        out = attention(own, k, v, layout, **options)
        if q.shape[2] > own.shape[2]:
            out = torch.cat([out, attention(q[:, :, n_tokens:], k, v, **options)], dim=2)
        return out


def _reordered(tensor: Tensor, tokens: Tensor) -> Tensor:
    """Tokens of (batch, heads, length, head_dim), with all heads of a token together, as diffusers stores them."""
    return tensor.transpose(1, 2).index_select(1, tokens).transpose(1, 2)


_OWN = "leave this layer to the model's own attention, by layers=... or dense_layers=..."


class _Layer(NamedTuple):
    """An attention module of a transformer."""

    name: str
    use: Use
    # where the text is, if the sequence has some
    text: str | None


class _Call:
    """The attention of one forward of a layer.

    is_own  whether all of it is left to diffusers
    """

    def __init__(
        self, layer: _Layer, hidden: Tensor | None, encoder: Tensor | None, own_backend: Any, *, is_own: bool = False
    ) -> None:
        self.layer, self.own_backend, self.is_own = layer, own_backend, is_own
        self.was_called = False
        # queries of a cross-attention, or of a joint one without its text; Lumina gives the same tensor twice for
        # self-attention
        is_cross = encoder is not None and encoder is not hidden and hidden is not None and hidden.ndim == 3
        # without text, a joint attention is one of the image alone
        is_cross = is_cross and encoder is not None and encoder.shape[1] > 0
        self.cross_len = hidden.shape[1] if is_cross and hidden is not None else None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: ARG002  `attention` needs no permission
    ) -> Tensor | None:
        """As torch's scaled_dot_product_attention; None leaves the call to diffusers."""
        self.was_called = True
        use = self.layer.use
        if self.is_own:
            use._has_attended = True
            return None
        if use.is_dense or query.shape[2] != key.shape[2] or query.shape[2] == self.cross_len:
            return None
        for name, given, expected in (("dropout_p", dropout_p, 0.0), ("is_causal", is_causal, False)):
            if given != expected:
                raise ValueError(f"{name} must be {expected}, got {given} in {self.layer.name}: {_OWN}")
        if self.layer.text and self.cross_len is not None and use._tokens not in (None, self.cross_len):
            raise ValueError(
                f"{self.layer.name} has {self.cross_len} tokens beside the text, but the layout is for {use._tokens}: "
                "give `use` a layout of the grid that this resolution has"
            )
        return use._attend(query, key, value, attn_mask, scale, self.layer, self.cross_len)


def _argument(parameters: list[str], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    index = parameters.index(name) if name in parameters else len(args)
    return args[index] if index < len(args) else None


def _wrap(module: nn.Module, layer: _Layer, *, is_shared: bool) -> None:
    """Replaces the forward of an attention module, until `layer.use.remove()` or another `use`.

    is_shared  whether other modules have the same processor
    """
    if hasattr(module, _USE):
        # of the module, or of the module that it was copied from
        getattr(module, _USE)(module)
    plain = type(module).forward
    # below the hooks of caches and offloading, which may skip it and keep it when they are removed; other replacements
    # are called from here. The class's own forward also works in copies of the module
    own = dispatching.holder_of(module, plain)
    holder, name = own or (module, "forward")
    replaced = None if own else module.forward
    parameters = list(inspect.signature(plain).parameters)[1:]
    connection = dispatching.connect(module, is_shared=is_shared)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner, inner_args = (replaced, args) if replaced else (plain, (self, *args))
        # another `use` may come after a hook that replaced this forward and still calls it
        if getattr(self, _USE, None) is not remove:
            return inner(*inner_args, **kwargs)
        hidden, encoder = (
            _argument(parameters, name, args, kwargs) for name in ("hidden_states", "encoder_hidden_states")
        )
        if isinstance(encoder, tuple):
            # text, and the images of IP-Adapters
            encoder = encoder[0]
        call = _Call(layer, hidden, encoder, connection, is_own=dispatching.skips_scores(self))
        out = dispatching.run(inner, self.processor, call, inner_args, kwargs)
        if not call.was_called:
            raise ValueError(
                f"{layer.name} ({type(self).__name__}, {type(self.processor).__name__}) did not call attention: it has "
                "another attention backend or processor than when `use` was called, so call `use` again; or it "
                "computes attention by itself, so leave it out of layers=..."
            )
        return out

    def remove(target: Any = module) -> None:
        if getattr(target, _USE, None) is not remove:
            return
        delattr(target, _USE)
        layer.use._has_attended = True
        dispatching.disconnect(target.processor, connection)
        found = dispatching.holder_of(target, forward)
        if found == (target, "forward"):
            del target.forward
            if replaced is not None and target is module:
                target.forward = replaced
        elif found:
            setattr(*found, replaced if replaced is not None and target is module else types.MethodType(plain, target))

    setattr(module, _USE, remove)
    setattr(holder, name, types.MethodType(forward, module))
    layer.use._removals.append(remove)


def _models(pipe_or_model: Any) -> dict[str, nn.Module]:
    """The transformers to change, by the prefix of the names of their layers."""
    if isinstance(pipe_or_model, nn.Module):
        return {"": pipe_or_model}
    names = ("transformer", "transformer_2")
    found = {name: getattr(pipe_or_model, name, None) for name in names}
    models = {name: model for name, model in found.items() if isinstance(model, nn.Module)}
    if not models:
        raise TypeError(
            "pipe_or_model must be a pipeline of diffusers with a transformer, or a model, such as pipe.unet, got "
            f"{type(pipe_or_model).__name__}"
        )
    return models if len(models) > 1 else dict(zip([""], models.values(), strict=True))


def _checked_order(order: Any, layout: Any) -> Tensor | None:
    if order is None:
        if layout is not None and not isinstance(layout, BlockLayout):
            raise ValueError(
                "order is required with a layout that is chosen in each call, such as masks.tile_order(grid, "
                "tile=(4, 4, 4)), got None: torch.arange(tokens) keeps the order of the model"
            )
        return None
    if not isinstance(order, Tensor) or order.ndim != 1 or order.dtype != torch.int64:
        got = f"{order.dtype} {tuple(order.shape)}" if isinstance(order, Tensor) else type(order).__name__
        raise TypeError(f"order must be an int64 tensor (tokens,), as masks.tile_order returns it, got {got}")
    own = order.detach().cpu().clone()
    if not torch.equal(own.sort().values, torch.arange(len(own), device="cpu")):
        raise ValueError(f"order must have each token from 0 to {len(own) - 1} once, as masks.tile_order returns it")
    if isinstance(layout, BlockLayout) and layout.q_len != len(own):
        raise ValueError(f"order must have the {layout.q_len} tokens of the layout, got {len(own)}")
    return own


def _check_pattern(argument: str, pattern: Any) -> None:
    if pattern is None and argument == "dense_layers":
        return
    if not isinstance(pattern, str):
        raise TypeError(f"{argument} must be a regular expression, a str, got {type(pattern).__name__}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{argument} must be a regular expression, got {pattern!r}: {error}") from None


def _check_layout(layout: Any) -> None:
    if layout is not None and not isinstance(layout, BlockLayout) and not callable(layout):
        raise TypeError(
            "layout must be a BlockLayout, top_blocks(...), top_p(...), a function from q and k to a BlockLayout, or "
            f"None for dense attention, got {type(layout).__name__}"
        )
    if isinstance(layout, BlockLayout) and layout.q_len != layout.kv_len:
        raise ValueError(f"layout must be square, over the tokens of the grid, got {layout.shape}")


class _Watch:
    """Reports a layout that no layer of a model uses, after a forward without torch.compile."""

    def __init__(self, use: Use) -> None:
        self.use = use

    def __call__(self, model: nn.Module, *_: Any) -> None:
        if not (torch.compiler.is_compiling() or self.use.is_dense or self.use._has_attended):
            raise ValueError(
                f"none of the chosen layers of {type(model).__name__} has self-attention, such as "
                f"{self.use.layers[0]}: choose others by layers=..."
            )


class _FollowSteps:
    """Sets `use.is_dense` before each forward of a transformer of a pipeline, or of a copy of it."""

    def __init__(self, use: Use, pipe: Any, dense_steps: int) -> None:
        self.use, self.dense_steps = use, dense_steps
        # weak: a copy of the transformer alone does not copy the pipeline
        self.pipe = weakref.ref(pipe)

    def __call__(self, *_: Any) -> None:
        pipe = self.pipe()
        if pipe is None:
            raise ValueError(
                "dense_steps follows the scheduler of a pipeline that no longer exists: call `use` with the pipeline "
                "that has this transformer now"
            )
        step = pipe.scheduler.step_index
        # None before the first step; begin_index is where image-to-image starts
        done = 0 if step is None else step - (getattr(pipe.scheduler, "begin_index", None) or 0)
        self.use.is_dense = done < self.dense_steps

    def __deepcopy__(self, memo: dict[int, Any]) -> _FollowSteps:
        pipe = self.pipe()
        return _FollowSteps(self.use, memo.get(id(pipe), pipe), self.dense_steps)


# as torch.compiler.disable, which would import the compiler
for _name, _value in (
    ("_torchdynamo_disable", True),
    (
        "_torchdynamo_disable_msg",
        "dense_steps follows the scheduler: compile blocks, model.compile_repeated_blocks(), not the model",
    ),
):
    setattr(_FollowSteps.__call__, _name, _value)


def use(
    pipe_or_model: Any,
    layout: BlockLayout | Choice | None = None,
    *,
    order: Tensor | None = None,
    text: str | None = None,
    layers: str = BLOCKS,
    dense_layers: str | None = None,
    dense_steps: int = 0,
    backend: str = "auto",
) -> Use:
    """Block-sparse self-attention in the transformer of a diffusers pipeline, until `remove()`.

    pipe_or_model  pipeline, whose `transformer` (and `transformer_2`) changes, or a model
    layout       BlockLayout of tokens x tokens, the tokens of the image or video; or `top_blocks(...)`, `top_p(...)` or
                 another function, which chooses a layout in each call; None: dense attention by this package's kernels
    order        int64 (tokens,): the token, in the row-major order of the grid, at each position of the layout, as from
                 `masks.tile_order`. None: the layout is in row-major order
    text         "first" or "last": where text tokens are in a sequence of image or video and text. They attend to all,
                 and all attend to them. None: known for Flux, SD3, CogVideoX, HunyuanVideo, Qwen-Image and Chroma
    layers       regular expression, searched in names of attention modules such as "blocks.7.attn1"; the default are
                 all blocks of the transformer. Their self-attention gets the layout, cross-attention stays as it is
    dense_layers regular expression: modules matched by `layers` that keep the model's own attention
    dense_steps  first denoising steps that keep the model's own attention, by the step_index of the scheduler of
                 pipe_or_model, a pipeline. Another pipeline with the same transformer needs a `use` of its own
    backend      as in `blocksparse_flash.attention`
    returns      Use, with `remove()` and the switch `is_dense`
    raises       TypeError, ValueError, before anything changes; later, in a forward: ValueError for a sequence that the
                 layout does not fit, for masks other than of padded text, for dropout, causal attention and context
                 parallelism, and for layers whose attention cannot be replaced. ImportError for other versions of
                 diffusers than those tested, where they differ

    Weights, cross-attention and everything else stay unchanged. Call it again with other `layers` for several layouts;
    with the same ones, it replaces their layout, and `remove()` then gives them their own attention, not the earlier
    layout.

    >>> order = masks.tile_order((21, 45, 80), tile=(6, 8, 8))  # doctest: +SKIP
    >>> layout = masks.sliding_tile((21, 45, 80), kernel=(18, 24, 24), tile=(6, 8, 8), order=order)  # doctest: +SKIP
    >>> use(pipe, layout, order=order, dense_steps=10, dense_layers=r"^blocks\\.[01]\\.")  # doctest: +SKIP
    """
    _check_layout(layout)
    if text not in (None, "first", "last"):
        raise ValueError(f'text must be "first", "last" or None, got {text!r}')
    if isinstance(dense_steps, bool) or not isinstance(dense_steps, int) or dense_steps < 0:
        raise ValueError(f"dense_steps must be an int of 0 or more, got {dense_steps!r}")
    scheduler = getattr(pipe_or_model, "scheduler", None)
    if dense_steps and not hasattr(scheduler, "step_index"):
        raise ValueError(
            f"dense_steps must be 0, got {dense_steps}, unless pipe_or_model is a pipeline whose scheduler has a "
            f"step_index, got {type(scheduler or pipe_or_model).__name__}: set is_dense of what `use` returns instead, "
            "such as in callback_on_step_end"
        )
    if backend not in BACKENDS:
        raise ValueError(f'backend must be one of {BACKENDS}, got {backend!r}; "auto" chooses')
    for argument, pattern in (("layers", layers), ("dense_layers", dense_layers)):
        _check_pattern(argument, pattern)
    found = Use(layout, _checked_order(order, layout), backend)
    chosen: list[tuple[nn.Module, _Layer]] = []
    n_users: Counter[int] = Counter()
    for prefix, model in _models(pipe_or_model).items():
        place = text or TEXT_PLACES.get(type(model).__name__)
        if text is not None and text != TEXT_PLACES.get(type(model).__name__, text):
            raise ValueError(f"text must be {TEXT_PLACES[type(model).__name__]!r} or None for {type(model).__name__}")
        attentions = {
            name: each for name, each in model.named_modules() if getattr(each, "processor", None) is not None
        }
        n_users.update(id(each.processor) for each in attentions.values())
        is_dense = {name: dense_layers is not None and bool(re.search(dense_layers, name)) for name in attentions}
        for name, module in attentions.items():
            if re.search(layers, name) and not is_dense[name]:
                chosen.append((module, _Layer(f"{prefix}.{name}" if prefix else name, found, place)))
        for argument, pattern in (("layers", layers), ("dense_layers", dense_layers)):
            if pattern and not any(re.search(pattern, name) for name in attentions):
                names = ", ".join(list(attentions)[:4]) or "none"
                raise ValueError(
                    f"{argument} must match attention modules of {type(model).__name__}, got {pattern!r}: it has "
                    f"{names}, ..."
                )
    if not chosen:
        raise ValueError(f"dense_layers must leave some of the layers, got {dense_layers!r}, which matches all of them")
    try:
        for module, layer in chosen:
            _wrap(module, layer, is_shared=n_users[id(module.processor)] > 1)
        for model in _models(pipe_or_model).values():
            found._removals.append(model.register_forward_hook(_Watch(found)).remove)
            if dense_steps:
                hook = _FollowSteps(found, pipe_or_model, dense_steps)
                found._removals.append(model.register_forward_pre_hook(hook).remove)
    except BaseException:
        found.remove()
        raise
    found.layers = tuple(layer.name for _, layer in chosen)
    return found
