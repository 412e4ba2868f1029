"""Block-sparse attention in diffusion models of vLLM-Omni: `register(pattern)`. `VideoAttention` works without it.

Experimental: tested with stand-ins for the classes of vLLM-Omni 0.30.0, not with its models.
"""

from __future__ import annotations

import dataclasses
import importlib

from .calling import Pattern, VideoAttention, select_blocks

__all__ = ["VideoAttention", "register", "select_blocks"]

VERSION = "0.30.0"
# runs only on Ascend NPUs, and is the only backend of vLLM-Omni that has a sparsity among its settings
REPLACED = "RAINFUSION_ATTN"
# all fields of AttentionMetadata: a new one might change results
FIELDS = {
    *("attn_mask", "joint_attn_mask", "joint_query", "joint_key", "joint_value", "joint_strategy", "extra"),
    *("full_attn_spans", "query_ranges", "video_layout", "packed_padding"),
}


def register(pattern: Pattern = select_blocks, *, backend: str = "auto") -> None:
    """Replaces vLLM-Omni's backend RAINFUSION_ATTN, which needs an Ascend NPU, by this package's attention on CUDA.

    pattern  as in `VideoAttention`; its sparsity is `block_sparse.sparsity` of vLLM-Omni's attention config
    backend  as in `blocksparse_flash.attention`
    raises   ImportError for versions of vLLM-Omni whose interface differs from 0.30.0; ValueError, as `VideoAttention`

    Each process of vLLM-Omni must call this before it creates a model: call it in a function that is an entry point of
    the group "vllm_omni.general_plugins". Then use an attention config such as {"per_role": {"self": {"backend":
    "RAINFUSION_ATTN", "block_sparse": {"sparsity": 0.8, "start_step": 10, "skip_layers": "0-1"}}}}, in which the first
    10 steps and layers 0 and 1 are dense. A second call changes the pattern of layers that are created later.

    >>> register(select_blocks)  # doctest: +SKIP
    """
    VideoAttention(pattern, backend=backend)
    try:
        backends = "vllm_omni.diffusion.attention.backends"
        abstract, registry = (importlib.import_module(f"{backends}.{name}") for name in ("abstract", "registry"))
        found = {field.name for field in dataclasses.fields(abstract.AttentionMetadata)}
        if found != FIELDS:
            raise AttributeError(f"fields of AttentionMetadata differ: {', '.join(sorted(found ^ FIELDS))}")
        module = importlib.import_module(f"{__name__}.backend")
        member = registry.DiffusionAttentionBackendEnum[REPLACED]
        registry.register_diffusion_backend(member, f"{module.__name__}.BlockSparseBackend")
    # vLLM-Omni's enumeration raises ValueError for an unknown name
    except (ImportError, AttributeError, KeyError, ValueError) as error:
        raise ImportError(
            f"blocksparse_flash.vllm_omni was written for vllm-omni {VERSION}, and cannot register with the installed "
            f"version ({error}): install {VERSION}"
        ) from error
    module.BlockSparseBackend.options = {"pattern": pattern, "backend": backend}
