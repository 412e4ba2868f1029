"""Layouts survive files, processes and writes to their copies; damaged state is refused."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
import pickle
import pickletools
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout, attention
from blocksparse_flash.blocks.checks import TENSORS as FIELDS_OF_TENSORS
from blocksparse_flash.plan_format import Plan
from tests.support.meaning import TENSORS

ROOT = Path(__file__).parents[1]


def topk(cols: Any, q_len: int = 300, kv_len: int = 300, block_size: Any = 128) -> BlockLayout:
    return BlockLayout.from_topk(torch.tensor(cols), q_len, kv_len, block_size=block_size)


def scored(axes: tuple[int, int], length: int, block_size: int, **options: Any) -> BlockLayout:
    n = -(-length // block_size)
    scores = torch.randn(*axes, n, n, generator=torch.Generator().manual_seed(0))
    return BlockLayout.from_scores(scores, length, length, block_size=block_size, **options)


# selections with and without unused entries
SELECTED: dict[str, Callable[[], BlockLayout]] = {
    "padded": lambda: topk([[[[2, -1], [0, 1], [-1, -1]]]]),
    "twice": lambda: topk([[[[2, 2, 0], [1, 1, 1], [0, 1, 2]]]]),
    "all-used": lambda: topk([[[[2, 0], [0, 1], [1, 2]]]]),
    "long-row": lambda: topk([[[list(range(10)), *[[0] + [-1] * 9] * 9]]], 1280, 1280),
    "nothing": lambda: topk([[[[-1], [-1], [-1]]]]),
    "no-queries": lambda: BlockLayout.from_topk(torch.zeros(1, 2, 0, 3, dtype=torch.int32), 0, 300, block_size=64),
    "wide": lambda: topk([[[[1, 0, -1], [-1, 1, 1]]]], 500, 300, (256, 128)),
    "causal-scores": lambda: scored((1, 1), 640, 128, k=3, causal=True),
    "heads": lambda: scored((2, 3), 300, 64, k=2, causal=True),
    "all-scores": lambda: scored((1, 2), 300, 64, k=5),
}
CANONICAL: dict[str, Callable[[], BlockLayout]] = {
    "empty": lambda: BlockLayout.from_dense(torch.zeros(300, 200, dtype=torch.bool), block_size=64),
    "no-blocks": lambda: BlockLayout.from_blocks([], [], 300, 0, block_size=64),
    "one-pair": lambda: BlockLayout.from_dense(torch.ones(1, 1, dtype=torch.bool), block_size=64),
    "causal": lambda: masks.causal(300, block_size=64),
    "heads-and-full": lambda: BlockLayout.stack_heads(
        [masks.local(200, window=70), masks.random(200, density=0.5, seed=0)]
    ),
}


class Holder(torch.nn.Module):
    def __init__(self, layout: BlockLayout) -> None:
        super().__init__()
        self.layout = layout


def through_a_file(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def through_safetensors(layout: BlockLayout) -> BlockLayout:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    saved = safetensors.save({name: torch.as_tensor(value) for name, value in layout.state_dict().items()})
    return BlockLayout.from_state_dict(safetensors.load(saved))


WAYS: dict[str, Callable[[BlockLayout], BlockLayout]] = {
    "state-dict": lambda layout: BlockLayout.from_state_dict(layout.state_dict()),
    "pickle": lambda layout: pickle.loads(pickle.dumps(layout)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch-load": through_a_file,
    "torch-load-state": lambda layout: BlockLayout.from_state_dict(through_a_file(layout.state_dict())),
    "safetensors": through_safetensors,
    "process": lambda layout: ForkingPickler.loads(ForkingPickler.dumps(layout)),
    "module": lambda layout: copy.deepcopy(Holder(layout)).layout,
    "module-file": lambda layout: through_a_file(Holder(layout), weights_only=False).layout,
}


def assert_same_plans(one: Plan, other: Plan) -> None:
    assert all(map(torch.equal, one, other))


def outputs(layout: BlockLayout, bias: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch, heads, q_len, kv_len = layout.shape
    q, k, v = (torch.randn(batch, heads, length, 8, generator=generator) for length in (q_len, kv_len, kv_len))
    return [attention(q, k, v, layout, block_bias=bias, causal=causal, backend="eager") for causal in (False, True)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*SELECTED, *CANONICAL])
def test_copies_and_loaded_layouts_are_equal(name: str, way: str) -> None:
    layout = {**SELECTED, **CANONICAL}[name]()
    again = WAYS[way](layout)
    assert again is not layout and again == layout and hash(again) == hash(layout)
    assert again.capacity == layout.capacity and again.device == layout.device
    one, other = layout.state_dict(), again.state_dict()
    assert list(one) == list(other)
    for key, value in one.items():
        assert torch.equal(value, other[key]) if isinstance(value, Tensor) else value == other[key], key
    for causal in (False, True):
        assert_same_plans(again.plan("cpu", causal=causal), layout.plan("cpu", causal=causal))
    bias = torch.linspace(-3, 3, layout.capacity)
    assert all(map(torch.equal, outputs(again, bias), outputs(layout, bias)))


def test_a_moved_selection_survives_its_state_dict(device: torch.device) -> None:
    for make in SELECTED.values():
        moved = make().to(device)
        again = BlockLayout.from_state_dict(moved.state_dict())
        assert again == make() and again.capacity == moved.capacity and again.device == device


def test_torch_load_reads_layouts_once_the_package_is_imported(tmp_path: Path) -> None:
    """With weights_only=True, and among other values."""
    layout, chosen = masks.causal(300), topk([[[[2, -1], [0, 1], [-1, -1]]]])
    torch.save({"layouts": [layout, chosen], "step": 3}, tmp_path / "file.pt")
    program = (
        "import sys, torch, blocksparse_flash; found = torch.load(sys.argv[1]); "
        "print(*map(hash, found['layouts']), found['step'])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "file.pt")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == [str(hash(layout)), str(hash(chosen)), "3"]


def test_a_pickle_calls_no_builtin() -> None:
    arguments = [str(argument) for _, argument, _ in pickletools.genops(pickle.dumps(masks.causal(300), protocol=2))]
    assert "blocksparse_flash.layout restored" in arguments and not [each for each in arguments if "builtin" in each]


class Narrow(BlockLayout):
    """A subclass defined by a user."""


def test_a_copy_is_of_the_same_class() -> None:
    layout = Narrow.from_blocks([0], [0], 64, 64, block_size=64)
    for again in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert type(again) is Narrow and again == layout


def test_a_meta_layout_is_copied() -> None:
    for layout in (masks.causal(300), SELECTED["padded"]()):
        moved = copy.deepcopy(layout.to("meta"))
        assert moved.device.type == "meta" and moved.shape == layout.shape and moved.capacity == layout.capacity


def test_a_meta_layout_has_a_repr_and_refuses_to_be_read() -> None:
    layout = masks.causal(300).to("meta")
    assert repr(layout) == "BlockLayout(300 x 300 tokens, block_size=(128, 128), batch=1, heads=1) on the meta device"
    for read in (hash, BlockLayout.to_dense, BlockLayout.__invert__, BlockLayout.describe, masks.causal(300).__eq__):
        with pytest.raises(ValueError, match="layout is on the meta device, which holds no data"):
            read(layout)


# ---- damaged state


def fields(layout: BlockLayout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in (*TENSORS, "q_len", "kv_len", "block_size")}


def unchecked(layout: BlockLayout, **changes: Any) -> BlockLayout:
    """The layout with changed fields, unchecked."""
    found = BlockLayout._bare(*(fields(layout) | changes).values())
    if "selection" in layout._cache:
        found._cache["selection"] = layout._cache["selection"]
    return found


def changed(at: int, value: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[at] = value
        return tensor

    return change


# for canonical layouts and selections: field, its change, and a part of the error besides the field's name
TAMPERED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "indptr-short": ("indptr", lambda t: t[..., :-1].clone(), "shape"),
    "indptr-long": ("indptr", lambda t: torch.cat([t, t[..., -1:]], dim=2), "shape"),
    "indptr-2-axes": ("indptr", lambda t: t[0].clone(), "shape"),
    "indptr-no-heads": ("indptr", lambda t: t[:, :0].clone(), "shape"),
    "indptr-int64": ("indptr", lambda t: t.long(), "int32"),
    "indptr-from-1": ("indptr", changed(0, 1), "start at 0"),
    "indptr-falls": ("indptr", changed(1, 10**6), "decrease"),
    "indptr-negative": ("indptr", changed(1, -1), "decrease"),
    "indptr-beyond": ("indptr", changed(-1, 10**6), "end at"),
    "indices-unsorted": ("indices", lambda t: torch.cat([t[:1], t[1:3].flip(0), t[3:]]), "ascend"),
    "indices-twice": ("indices", lambda t: t.clone().index_copy_(0, torch.tensor([2]), t[1:2]), "ascend"),
    "indices-large": ("indices", changed(0, 77), "n_cols"),
    "indices-negative": ("indices", changed(2, -1), "n_cols"),
    "indices-float": ("indices", lambda t: t.float(), "int32"),
    "indices-2-axes": ("indices", lambda t: t[None].clone(), "axis"),
    "ids-high": ("bitmask_ids", changed(1, 9), "-1"),
    "ids-low": ("bitmask_ids", changed(1, -2), "-1"),
    "ids-short": ("bitmask_ids", lambda t: t[1:].clone(), "shape"),
    "ids-int64": ("bitmask_ids", lambda t: t.long(), "int32"),
    "bitmasks-int64": ("bitmasks", lambda t: t.long(), "int32"),
    "bitmasks-flat": ("bitmasks", lambda t: t.reshape(-1), "shape"),
    "bitmasks-rows": ("bitmasks", lambda t: t[:, 1:].clone(), "shape"),
    "bitmasks-words": ("bitmasks", lambda t: t.repeat(1, 1, 2), "shape"),
    "bitmasks-unused": ("bitmasks", lambda t: torch.cat([t, t.new_ones(1, *t.shape[1:])]), "canonical|full"),
    "q_len-longer": ("q_len", lambda n: 3 * n, "n_rows"),
    "q_len-shorter": ("q_len", lambda n: n // 2, "n_rows"),
    "q_len-negative": ("q_len", lambda n: -n, "0 .."),
    "kv_len-shorter": ("kv_len", lambda n: n // 4, "n_cols"),
    "kv_len-huge": ("kv_len", lambda n: 2**40, "0 .."),
    "block_size-smaller": ("block_size", lambda sides: (32, 32), "n_rows"),
    "block_size-larger": ("block_size", lambda sides: (256, 256), "n_rows"),
    "block_size-narrow": ("block_size", lambda sides: (sides[0], 16), "bitmasks"),
    "block_size-odd": ("block_size", lambda sides: (sides[0], 40), "multiple of 16"),
    "block_size-of-3": ("block_size", lambda sides: (*sides, 64), "block_q"),
}
TAMPERED_SELECTION: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "indices-unused": ("indices", changed(-1, 1), "0 after the last"),
    "indices-short": ("indices", lambda t: t[:-1].clone(), "shape of indices"),
    "ids-partial": ("bitmask_ids", changed(-1, 0), "-1"),
    "block_size-48": ("block_size", lambda sides: (48, 48), "n_rows|divide 128"),
}
TAMPERED_CANONICAL: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "indptr-early": ("indptr", lambda t: changed(-1, int(t[0, 0, -1]) - 1)(t), "end at the length"),
    "bitmasks-empty": ("bitmasks", torch.zeros_like, "canonical"),
    "bitmasks-equal": ("bitmasks", lambda t: t[:1].repeat(len(t), 1, 1), "canonical"),
    "bitmasks-swapped": ("bitmasks", lambda t: t.flip(0), "canonical"),
}


def for_tampering(kind: str) -> BlockLayout:
    if kind == "selected":
        return topk([[[[2, 0, 1], [0, 1, 1], [2, -1, 0]]]])
    q, kv = torch.arange(300)[:, None], torch.arange(300)
    return BlockLayout.from_dense((kv <= q) & ((q - kv) % 97 > 3), block_size=64)


@pytest.mark.parametrize(
    ("kind", "case"),
    [("canonical", case) for case in (*TAMPERED, *TAMPERED_CANONICAL)]
    + [("selected", case) for case in (*TAMPERED, *TAMPERED_SELECTION)],
)
def test_every_way_refuses_a_damaged_field(kind: str, case: str) -> None:
    layout = for_tampering(kind)
    name, change, message = {**TAMPERED, **TAMPERED_SELECTION, **TAMPERED_CANONICAL}[case]
    value = change(getattr(layout, name))
    damaged = unchecked(layout, **{name: value})
    # the error may be about another field, which no longer fits; the message names both
    expected = (
        f"(?s){'' if name in FIELDS_OF_TENSORS else '.*'}{name}.*"
        if message not in ("n_rows", "n_cols", "bitmasks")
        else name
    )
    for way in ("pickle", "copy", "deepcopy", "torch-load", "module", "module-file", "process"):
        with pytest.raises(ValueError, match=expected) as raised:
            WAYS[way](damaged)
        assert any(part in str(raised.value) for part in message.split("|")), (way, raised.value)
    state = layout.state_dict() | {name: value}
    with pytest.raises(ValueError, match=name):
        BlockLayout.from_state_dict(state)


def test_a_selection_must_have_k_entries_per_row_and_use_at_most_those() -> None:
    layout = topk([[[[0], [1], [2]]]])
    with pytest.raises(ValueError, match="indptr must give each row of this selection at most k = 1 blocks, got 2"):
        pickle.loads(pickle.dumps(unchecked(layout, indptr=torch.tensor([[[0, 2, 3, 3]]], dtype=torch.int32))))
    longer = {
        name: torch.cat([getattr(layout, name), getattr(layout, name)[:1]]) for name in ("indices", "bitmask_ids")
    }
    with pytest.raises(ValueError, match=r"indices must have k entries for each of the 3 rows of all heads .* got 4"):
        pickle.loads(pickle.dumps(unchecked(layout, **longer)))


@pytest.mark.parametrize("change", [{"selected": 3}, {"selected": torch.tensor(2)}, {"selected": None}])
def test_selected_must_be_a_bool(change: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="selected must be True or False"):
        BlockLayout.from_state_dict(SELECTED["padded"]().state_dict() | change)


def test_a_selection_is_not_read_as_canonical() -> None:
    state = SELECTED["padded"]().state_dict()
    del state["selected"]
    with pytest.raises(ValueError, match=r"indptr must end at the length of indices, 6, got 3; .* indices\[:nnz\]"):
        BlockLayout.from_state_dict(state)
    with pytest.raises(ValueError, match="bitmasks must be none for selected blocks"):
        BlockLayout.from_state_dict(masks.causal(300).state_dict() | {"selected": True})


@pytest.mark.parametrize("kind", ["canonical", "selected"])
@pytest.mark.parametrize("name", [*TENSORS, "q_len", "kv_len", "block_size"])
def test_a_changed_pickle_is_refused_even_if_it_is_a_valid_layout(kind: str, name: str) -> None:
    layout = for_tampering(kind) if kind == "selected" else masks.causal(300, block_size=64)
    # other values with the same shapes
    other: dict[str, Any] = {"q_len": 299, "kv_len": 1000, "block_size": (128, 128)}
    function, (state, checksums, *_) = layout.__reduce__()[:2]  # type: ignore[misc]
    wrong = state | {name: other[name] if name in other else state[name] + (1 if name != "bitmasks" else 0)}
    if name == "bitmasks":
        wrong[name] = torch.zeros_like(state[name]) if len(state[name]) else state[name].new_zeros(1, 128, 4)
    if name == "block_size" and kind == "selected":
        wrong[name] = (128, 256)
    with pytest.raises(ValueError, match=name):
        function(wrong, checksums)
    assert function(state, checksums) == layout


@pytest.mark.parametrize("kind", ["canonical", "selected"])
def test_a_file_may_be_loaded_onto_the_meta_device(kind: str) -> None:
    layout = for_tampering(kind) if kind == "selected" else masks.causal(300, block_size=64)
    file = io.BytesIO()
    torch.save({"layout": layout, "weight": torch.ones(3)}, file)
    file.seek(0)
    found = torch.load(file, map_location="meta")["layout"]
    assert found.device.type == "meta" and found.shape == layout.shape and found.block_size == layout.block_size


def test_torch_load_trusts_only_the_function_that_checks_layouts() -> None:
    known = torch.serialization.get_safe_globals()
    assert [value for value in known if getattr(value, "__module__", "").startswith("blocksparse_flash")] == [
        BlockLayout.from_blocks([0], [0], 64, 64, block_size=64).__reduce__()[0]
    ]


# ---- processes


class Layouts(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[int, BlockLayout]:
        if index % 2:
            return index, topk([[[[index % 3, -1], [0, 1], [-1, -1]]]])
        return index, masks.local(300, window=1 + index, block_size=64)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts file descriptors as Linux lists them")
def test_layouts_from_workers_hold_no_file_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    loader = torch.utils.data.DataLoader(Layouts(), num_workers=2, batch_size=20, collate_fn=list)
    kept, most = [], 0
    for batch in loader:
        kept += batch
        most = max(most, len(os.listdir("/proc/self/fd")) - before)
    assert len(kept) == 400 and most < 40, most
    assert all(layout == Layouts()[index][1] for index, layout in kept[::37])


# ---- frozen


def spoil(layout: BlockLayout) -> None:
    """Writes to everything that a layout returns, in every way that tensors allow."""
    for name in TENSORS:
        getattr(layout, name).fill_(1)
        getattr(layout, name).numpy()[...] = 1
        getattr(layout, name).data.zero_()
        getattr(layout, name).untyped_storage().fill_(1)
    for value in layout.state_dict().values():
        if isinstance(value, Tensor):
            value.fill_(1)
    if layout.nnz:
        layout.indices[-1] = 1
    matrix = layout.to_scipy()
    for array in (matrix.data, matrix.indices, matrix.indptr):
        array[...] = 1
    layout.to_dense().zero_()


MADE: dict[str, Callable[[], BlockLayout]] = {
    **CANONICAL,
    "padded": SELECTED["padded"],
    "all-used": SELECTED["all-used"],
    "heads-selected": SELECTED["heads"],
    "direct": lambda: BlockLayout(**fields(masks.causal(300, block_size=64))),
    "loaded": lambda: BlockLayout.from_state_dict(masks.causal(300, block_size=64).state_dict()),
    "blocks": lambda: BlockLayout.from_blocks([0, 1, 2], [2, 0, 1], 300, 300, block_size=128),
    "intersection": lambda: masks.causal(300, block_size=64) & masks.causal(300, block_size=64),
    "transposed": lambda: masks.causal(300, block_size=64).T,
    "received": lambda: ForkingPickler.loads(ForkingPickler.dumps(masks.causal(300, block_size=64))),
    "selection-received": lambda: ForkingPickler.loads(ForkingPickler.dumps(SELECTED["padded"]())),
}


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_writes_to_returned_tensors_do_not_change_a_layout(name: str, is_used: bool) -> None:
    layout, twin = MADE[name](), MADE[name]()
    if is_used:
        hash(layout)
        layout.plan("cpu")
    spoil(layout)
    assert layout == twin and hash(layout) == hash(twin) and repr(layout) == repr(twin) and layout.nnz == twin.nnz
    assert torch.equal(layout.to_dense(), twin.to_dense())
    assert (layout.to_scipy() != twin.to_scipy()).nnz == 0
    for causal in (False, True):
        assert_same_plans(layout.plan("cpu", causal=causal), twin.plan("cpu", causal=causal))
    other = ~MADE[name]()
    assert (layout | other, layout & other, layout - other) == (twin | other, twin & other, twin - other)
    assert ~layout == ~twin and twin.T == layout.T and layout.crop(layout.q_len // 2) == twin.crop(layout.q_len // 2)
    assert layout.with_block_size(32) == twin.with_block_size(32) and str(layout.describe()) == str(twin.describe())
    for way in ("state-dict", "pickle", "deepcopy", "process"):
        assert WAYS[way](layout) == twin
    for field in TENSORS:
        assert torch.equal(getattr(layout, field), getattr(twin, field))
    bias = torch.linspace(-3, 3, layout.capacity)
    assert all(map(torch.equal, outputs(layout, bias), outputs(twin, bias)))


def test_a_changed_copy_makes_another_layout() -> None:
    layout = BlockLayout.from_blocks([0, 1], [0, 0], 256, 256, block_size=128)
    indices = layout.indices
    indices[1] = 1
    moved = dataclasses.replace(layout, indices=indices)
    assert moved == BlockLayout.from_blocks([0, 1], [0, 1], 256, 256, block_size=128) != layout


def test_a_selection_follows_writes_of_a_graph_replay() -> None:
    """The replay of a CUDA graph writes to the same tensors again, without notice to the layout."""
    layout, other = topk([[[[2, -1], [0, 1], [-1, -1]]]]), topk([[[[0, 1], [2, -1], [1, 0]]]])
    hash(layout)
    for mine, new in zip(layout._cache["selection"][:3], other._cache["selection"][:3], strict=True):
        mine.copy_(new)
    assert layout == other and hash(layout) == hash(other) and torch.equal(layout.to_dense(), other.to_dense())
    assert torch.equal(layout.indices, other.indices) and pickle.loads(pickle.dumps(layout)) == other


def test_compiled_code_makes_and_reads_layouts() -> None:
    """In one graph, where reads also give copies."""
    scores = torch.randn(1, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    q, fixed = (
        torch.randn(1, 2, 300, 8, generator=torch.Generator().manual_seed(1)),
        masks.local(300, window=70).to("cpu"),
    )

    def step(q: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layout = BlockLayout.from_scores(scores, 300, 300, k=2, block_size=128)
        read = fixed.indices
        read.add_(layout.indices[0])
        return attention(q, q, q, fixed), layout.indptr, read

    expected, before = step(q, scores), hash(copy.copy(fixed))
    for found, wanted in zip(
        torch.compile(step, backend="aot_eager", fullgraph=True)(q, scores), expected, strict=True
    ):
        torch.testing.assert_close(found, wanted)
    assert hash(copy.copy(fixed)) == before
