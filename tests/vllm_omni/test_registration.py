"""`register` with stand-ins for vLLM-Omni 0.30.0: the class it looks up, and what that does in a layer."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import blocksparse_flash.vllm_omni as package
import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.vllm_omni import VideoAttention, register
from tests.support.vllm_omni_stand_in import (
    OVERRIDES,
    AttentionMetadata,
    Registered,
    Running,
    VideoTokenLayout,
    installed,
)

GRID, LENGTH = (4, 4, 6), 110
VIDEO = AttentionMetadata(video_layout=VideoTokenLayout(prefix_len=4, latent_grid=GRID))
# what vLLM-Omni makes of {"backend": "RAINFUSION_ATTN", "block_sparse": {"sparsity": 0.5}}
SETTINGS = {"sparsity": 0.5, "start_step": 0, "end_step": 0, "precision": "bf16"}


def diagonal(grid: tuple[int, int, int], sparsity: float) -> tuple[BlockLayout, None]:
    return masks.local(96, window=round(10 * sparsity), block_size=16), None


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Running, dict[str, ModuleType]]]:
    """vLLM-Omni as if it were installed; the file of the backend is imported anew."""
    sys.modules.pop(f"{package.__name__}.backend", None)
    yield installed(monkeypatch)
    sys.modules.pop(f"{package.__name__}.backend", None)


@pytest.fixture
def running(stand_in: tuple[Running, dict[str, ModuleType]]) -> Running:
    register(diagonal)
    return stand_in[0]


def layer(**changes: Any) -> Any:
    """The implementation that a layer of vLLM-Omni makes, with the arguments it gives."""
    settings = SETTINGS | changes.pop("settings", {})
    arguments = {"num_heads": 2, "head_size": 16, "softmax_scale": 0.5, "causal": False, "num_kv_heads": 1}
    arguments |= {"qkv_layout": "BSND", "prefix": "blocks.3.attn1", "backend_kwargs": settings, "role": "self"}
    return Registered.RAINFUSION_ATTN.get_class().get_impl_cls()(**arguments | {"backend_explicit": True} | changes)


def tensors(kv_len: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, *shape, 16, generator=generator) for shape in ((LENGTH, 2), (kv_len, 1), (kv_len, 1))]


def test_vllm_omni_finds_the_backend(running: Running) -> None:
    backend = Registered.RAINFUSION_ATTN.get_class()
    assert {*OVERRIDES} == {Registered.RAINFUSION_ATTN}
    assert backend.get_name() == "BLOCKSPARSE_FLASH" and backend.supported_platforms == ("cuda",)
    assert backend.supports_head_size(128) and not backend.supports_head_size(257)
    assert backend.supports_attention_mask() and backend.supports_prefix_kv_slicing


def test_a_layer_attends_with_the_pattern_and_sparsity(running: Running) -> None:
    out = layer().forward(*tensors(), VIDEO)
    assert torch.equal(out, VideoAttention(diagonal, sparsity=0.5, scale=0.5)(*tensors(), VIDEO))
    assert not torch.equal(out, layer(settings={"sparsity": 0.25}).forward(*tensors(), VIDEO))


def test_cross_attention_and_other_roles_are_dense(running: Running) -> None:
    dense = VideoAttention(scale=0.5)
    assert torch.equal(layer().forward(*tensors(kv_len=20)), dense(*tensors(kv_len=20)))
    assert torch.equal(layer(role="refiner").forward(*tensors()), dense(*tensors()))
    causal = layer(role="refiner", causal=True).forward(*tensors())
    assert torch.equal(causal, VideoAttention(scale=0.5, causal=True)(*tensors()))


def test_chosen_layers_are_dense(running: Running) -> None:
    dense = VideoAttention(sparsity=0, scale=0.5)(*tensors(), VIDEO)
    for prefix, is_dense in (("blocks.3.attn1", True), ("blocks.13.attn1", False), ("", False)):
        out = layer(prefix=prefix, settings={"skip_layers": [0, 3]}).forward(*tensors(), VIDEO)
        assert torch.equal(out, dense) == is_dense


@pytest.mark.parametrize(
    ("settings", "dense"),
    [({"start_step": 2}, [0, 1]), ({"end_step": 1}, [4]), ({"start_step": 1, "end_step": 2}, [0, 3, 4])],
    ids=str,
)
def test_first_and_last_steps_are_dense(running: Running, settings: dict[str, int], dense: list[int]) -> None:
    expected = VideoAttention(sparsity=0, scale=0.5)(*tensors(), VIDEO)
    module = layer(settings=settings)
    found = []
    for step in range(5):
        running.context = SimpleNamespace(denoise_step_idx=step, total_denoise_steps=5)
        if torch.equal(module.forward(*tensors(), VIDEO), expected):
            found.append(step)
    assert found == dense


@pytest.mark.parametrize("context", [None, SimpleNamespace(denoise_step_idx=3, total_denoise_steps=None)], ids=str)
def test_unknown_steps_are_refused(running: Running, context: Any) -> None:
    running.context = context
    with pytest.raises(ValueError, match="end_step also total_denoise_steps, got start_step=0, end_step=1 with"):
        layer(settings={"end_step": 1}).forward(*tensors(), VIDEO)
    # dense in every step
    layer(settings={"end_step": 1}).forward(*tensors(kv_len=20))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"topk": 64}}, "backend_kwargs must be of .*'topk'"),
        ({"settings": {"precision": "fp8"}}, "block_sparse.precision must be 'bf16', got 'fp8'"),
        ({"settings": {"sparsity": 1.0}}, "sparsity must be .*below 1, got 1.0"),
        ({"qkv_layout": "BNSD"}, "qkv_layout must be 'BSND', got 'BNSD'"),
    ],
    ids=str,
)
def test_other_settings_are_refused(running: Running, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(**changes)


def test_ring_attention_is_refused_because_it_would_be_dense(running: Running) -> None:
    running.ring_degree = 2
    with pytest.raises(ValueError, match=r"ring_degree must be 1 .*got 2"):
        layer()
    layer(settings={"sparsity": 0.0})


def test_self_attention_without_a_grid_is_refused(running: Running) -> None:
    with pytest.raises(ValueError, match=r"blocks\.3\.attn1 has no video_layout"):
        layer().forward(*tensors(), AttentionMetadata())
    dense = layer(settings={"sparsity": 0.0}).forward(*tensors(), AttentionMetadata())
    assert torch.equal(dense, VideoAttention(scale=0.5)(*tensors()))


def test_registering_again_changes_later_layers(running: Running) -> None:
    before = layer()
    register(lambda grid, sparsity: (None, None), backend="eager")
    after = layer()
    assert (before.sparse.pattern, before.sparse.backend) == (diagonal, "auto")
    assert after.sparse.backend == after.dense.backend == "eager"
    dense = VideoAttention(sparsity=0, scale=0.5, backend="eager")(*tensors(), VIDEO)
    assert torch.equal(after.forward(*tensors(), VIDEO), dense)


def test_other_platforms_are_not_claimed(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    module = layer()
    monkeypatch.setattr(type(module), "platform", "npu")
    with pytest.raises(NotImplementedError):
        module.forward(*tensors(), VIDEO)


# ---- other versions ----


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("attention.backends.abstract", "AttentionImpl"),
        ("attention.backends.registry", "register_diffusion_backend"),
        ("forward_context", "get_forward_context"),
    ],
)
def test_a_missing_part_is_named(stand_in: Any, path: str, name: str) -> None:
    delattr(stand_in[1][path], name)
    with pytest.raises(ImportError, match=rf"was written for vllm-omni 0\.30\.0.*{name}"):
        register(diagonal)
    assert not OVERRIDES


def test_a_missing_member_is_named(stand_in: Any) -> None:
    stand_in[1]["attention.backends.registry"].DiffusionAttentionBackendEnum = {}
    with pytest.raises(ImportError, match="RAINFUSION_ATTN"):
        register(diagonal)


def test_a_new_field_of_the_metadata_is_named(stand_in: Any) -> None:
    fields = [(field.name, Any) for field in dataclasses.fields(AttentionMetadata)]
    other = dataclasses.make_dataclass("AttentionMetadata", [*fields, ("sinks", Any)])
    stand_in[1]["attention.backends.abstract"].AttentionMetadata = other
    with pytest.raises(ImportError, match="fields of AttentionMetadata differ: sinks"):
        register(diagonal)


def test_without_vllm_omni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_omni", None)
    with pytest.raises(ImportError, match=r"was written for vllm-omni 0\.30\.0"):
        register(diagonal)


def test_arguments_are_checked_first() -> None:
    with pytest.raises(ValueError, match="pattern must be a function"):
        register("sliding_tile")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend must be one of"):
        register(diagonal, backend="cudnn")
