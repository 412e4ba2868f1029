"""The backend class for vLLM-Omni 0.30.0. Importing this module imports vLLM-Omni."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm_omni.diffusion.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata
from vllm_omni.diffusion.config import get_current_diffusion_config_or_none
from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available

from ..runtime import tracing
from .calling import VideoAttention

# defaults of BlockSparseSpec, which vLLM-Omni passes as backend_kwargs
DEFAULTS = {"sparsity": 0.8, "start_step": 0, "end_step": 0, "precision": "bf16", "skip_layers": ()}


class BlockSparseImpl(AttentionImpl):
    """The attention of one layer; vLLM-Omni passes the arguments."""

    def __init__(
        self,
        num_heads: int,  # noqa: ARG002
        head_size: int,  # noqa: ARG002
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,  # noqa: ARG002
        prefix: str = "",
        qkv_layout: str | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        role: str = "self",
        backend_explicit: bool = False,  # noqa: ARG002
    ) -> None:
        settings: dict[str, Any] = DEFAULTS | (backend_kwargs or {})
        if settings.keys() != DEFAULTS.keys():
            raise ValueError(f"backend_kwargs must be of {sorted(DEFAULTS)}, got {sorted(settings)}")
        precision = settings["precision"]
        for name, value, expected in (
            ("block_sparse.precision", precision, "bf16"),
            ("qkv_layout", qkv_layout, "BSND"),
        ):
            if value not in (expected, None):
                raise ValueError(f"{name} must be {expected!r}, got {value!r}")
        # the first number in a name such as blocks.7.attn1
        layer = next((int(part) for part in prefix.split(".") if part.isdigit()), None)
        sparsity = 0.0 if layer in settings["skip_layers"] else settings["sparsity"]
        ring = getattr(getattr(get_current_diffusion_config_or_none(), "parallel_config", None), "ring_degree", 1)
        if sparsity and ring > 1:
            raise ValueError(
                f"ring_degree must be 1 with block_sparse.sparsity above 0, got {ring}: ring attention does not call "
                "backends; use ulysses_degree"
            )
        self.needs_video = sparsity > 0 and role == "self"
        self.prefix, self.dense_steps = prefix, (settings["start_step"], settings["end_step"])
        common = BlockSparseBackend.options | {"scale": softmax_scale, "causal": causal}
        self.sparse, self.dense = VideoAttention(sparsity=sparsity, **common), VideoAttention(sparsity=0.0, **common)

    def forward_cuda(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: AttentionMetadata | None = None
    ) -> Tensor:
        is_video = attn_metadata is not None and attn_metadata.video_layout is not None
        if self.needs_video and not is_video and query.shape[1] == key.shape[1]:
            raise ValueError(
                f"{self.prefix or 'a layer'} has no video_layout in its metadata, so the pattern has no grid: set "
                "block_sparse.sparsity to 0 for dense attention, or choose another backend for this model"
            )
        attend = self.dense if is_video and self._is_dense_step() else self.sparse
        return attend(query, key, value, attn_metadata)

    @tracing.untraced
    def _is_dense_step(self) -> bool:
        first, last = self.dense_steps
        if not first and not last:
            return False
        context = get_forward_context() if is_forward_context_available() else None
        step, total = (getattr(context, name, None) for name in ("denoise_step_idx", "total_denoise_steps"))
        if step is None or (last and total is None):
            raise ValueError(
                "block_sparse.start_step needs a pipeline that publishes denoise_step_idx, and end_step also "
                f"total_denoise_steps, got start_step={first}, end_step={last} with {step} and {total}"
            )
        return step < first or bool(last and step >= total - last)


class BlockSparseBackend(AttentionBackend):
    """What vLLM-Omni reads of the backend; `register` sets `options`."""

    supported_platforms = ("cuda",)
    # valid_kv_length is read, so models need no mask for padding at the end
    supports_prefix_kv_slicing = True
    options: dict[str, Any]

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:  # noqa: ARG003
        return True

    @staticmethod
    def get_name() -> str:
        return "BLOCKSPARSE_FLASH"

    @staticmethod
    def get_impl_cls() -> type[BlockSparseImpl]:
        return BlockSparseImpl

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return list(range(1, 257))
