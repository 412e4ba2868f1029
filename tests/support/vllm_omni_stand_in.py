"""Stand-ins for the parts of vLLM-Omni 0.30.0 that the package uses: names, fields, signatures and dispatch.

vLLM-Omni itself needs vllm to be imported. `installed` puts these into sys.modules.
"""

from __future__ import annotations

import enum
import importlib
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@dataclass(frozen=True)
class VideoTokenSpan:
    start: int
    latent_grid: tuple[int, int, int]
    role: str


@dataclass(frozen=True)
class VideoTokenLayout:
    prefix_len: int | None = None
    latent_grid: tuple[int, int, int] | None = None
    used_len: int | None = None
    video_spans: tuple[VideoTokenSpan, ...] = ()


@dataclass
class AttentionMetadata:
    attn_mask: Any = None
    joint_attn_mask: Any = None
    joint_query: Any = None
    joint_key: Any = None
    joint_value: Any = None
    joint_strategy: str = "front"
    extra: dict[str, Any] = field(default_factory=dict)
    full_attn_spans: Any = None
    query_ranges: Any = None
    video_layout: VideoTokenLayout | None = None
    packed_padding: Any = None


class AttentionBackend(ABC):
    supports_prefix_kv_slicing = False
    supported_platforms: tuple[str, ...] | None = None

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> Any: ...

    @staticmethod
    @abstractmethod
    def get_supported_head_sizes() -> list[int]: ...

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes


class AttentionImpl(ABC):
    platform = "cuda"

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        qkv_layout: str | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        **extra_impl_args: Any,
    ) -> None: ...

    def forward(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
        return getattr(self, f"forward_{self.platform}")(query, key, value, attn_metadata)

    def forward_cuda(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
        raise NotImplementedError

    def forward_npu(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
        raise NotImplementedError


class Registered(enum.Enum):
    TORCH_SDPA = "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"
    RAINFUSION_ATTN = "vllm_omni.diffusion.attention.backends.rainfusion_attn.RainFusionAttentionBackend"

    def get_class(self) -> Any:
        module, _, name = OVERRIDES.get(self, self.value).rpartition(".")
        return getattr(importlib.import_module(module), name)


OVERRIDES: dict[Registered, str] = {}


def register_diffusion_backend(backend: Registered, class_path: str | None = None) -> Any:
    assert class_path is not None
    OVERRIDES[backend] = class_path


@dataclass
class Running:
    """What the tests set: the parallel config and the denoising step."""

    ring_degree: int = 1
    context: Any = None


def installed(monkeypatch: pytest.MonkeyPatch) -> tuple[Running, dict[str, ModuleType]]:
    """Puts the stand-ins into sys.modules, by their path after "vllm_omni.diffusion", until the test ends."""
    running = Running()
    contents: dict[str, dict[str, Any]] = {
        "": {},
        "attention": {},
        "attention.backends": {},
        "attention.backends.abstract": {
            each.__name__: each for each in (AttentionBackend, AttentionImpl, AttentionMetadata)
        },
        "attention.backends.registry": {
            "DiffusionAttentionBackendEnum": Registered,
            "register_diffusion_backend": register_diffusion_backend,
        },
        "config": {
            "get_current_diffusion_config_or_none": lambda: SimpleNamespace(
                parallel_config=SimpleNamespace(ring_degree=running.ring_degree)
            )
        },
        "forward_context": {
            "is_forward_context_available": lambda: running.context is not None,
            "get_forward_context": lambda: running.context,
        },
    }
    modules = {}
    monkeypatch.setitem(sys.modules, "vllm_omni", ModuleType("vllm_omni"))
    for path, names in contents.items():
        full = f"vllm_omni.diffusion.{path}".rstrip(".")
        modules[path] = ModuleType(full)
        vars(modules[path]).update(names)
        monkeypatch.setitem(sys.modules, full, modules[path])
    OVERRIDES.clear()
    return running, modules
