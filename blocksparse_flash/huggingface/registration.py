"""`register()`, which adds attn_implementation="blocksparse" to transformers."""

from __future__ import annotations

from .attention import attention_function
from .mask_builder import attention_mask
from .model_hooks import watch_models
from .names import NAME


def register() -> None:
    """Makes `attn_implementation="blocksparse"` known to transformers, for every model that looks its attention up by name.

    The model's config says what is attended to, in `attention_layout`: a BlockLayout; a specification for `masks.build`, such
    as "butterfly | local(window=512)", which is saved with the config; or None, for attention to all. It is over positions
    0 .. length - 1, of which each forward takes those it has; a specification is built for config.max_position_embeddings
    where there is such a number. What the model asks for, causality, windows and padding, holds as well.

    Call it before models are made or loaded: those made from now on, or put into another module, report a layout that they
    would ignore. ValueError, when one is made or at its first forward, if it computes its own attention; UserWarning at its
    first forward, if its attn_implementation is another, such as "sdpa".

    Calling it again changes nothing. Needs transformers (`pip install 'blocksparse_flash[huggingface]'`).

    >>> register()  # doctest: +SKIP
    >>> config = transformers.LlamaConfig(attention_layout="butterfly | local(window=512)")  # doctest: +SKIP
    >>> transformers.LlamaForCausalLM._from_config(config, attn_implementation="blocksparse")  # doctest: +SKIP
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, attention_mask)
    watch_models()
