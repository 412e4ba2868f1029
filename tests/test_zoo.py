"""Every backend is accurate for every layout, dtype, head grouping and head dimension, forward and backward.

The cases are the product of BACKENDS, cases.LAYOUTS (and no layout) and CALLS, with one tolerance. By default a part of
them runs: on `eager` each layout, and on `triton` each family of layouts, is tested with every value of every axis,
since Triton's interpreter is slow. --zoo=full runs all. On a GPU of compute capability 9.0 the calls that `hopper`
supports run on `hopper` too.

Every input is a view into a larger buffer full of NaN, and new memory is full of NaN, so that out-of-bounds reads fail.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse_flash import BlockLayout, dispatch
from blocksparse_flash.functional import attention_with_lse
from blocksparse_flash.plan_format import FINE_TILE, GATHERED_TILE, TILE
from tests.support import cases, plain
from tests.support.closeness import as_rows, assert_as_accurate, assert_in_input_order, buried, buried_inputs
from tests.support.forced_tiles import force_tile

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
BACKENDS = ("eager", "triton", *(["hopper"] if HAS_HOPPER else []))
NAMES = ("out", "lse", "dq", "dk", "dv")
# more than 32 bits
SEED = 2**40 + 7
FEW_ROUNDINGS = range(2)


@dataclass(frozen=True)
class Call:
    """Arguments of a call besides its layout and backend."""

    dtype: torch.dtype = torch.float32
    # 4: as many as query heads; 1 and 2: shared by 4 query heads
    kv_heads: int = 4
    head_dim: int = 64
    v_dim: int | None = None
    causal: bool = False
    has_kv_lengths: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    has_sinks: bool = False
    softcap: float | None = None
    has_slopes: bool = False
    # without a gradient of the slopes, `hopper` runs its own backward
    are_slopes_fixed: bool = False
    # block_bias, with a layout: "" none, "blocks" shared, "heads" per head, "batch" per batch and head
    bias: str = ""
    # pair_bias: "" none, "one" shared, "heads" per head, "batch" per batch, "all" per batch and head
    pairs: str = ""

    def __str__(self) -> str:
        words = [str(self.dtype).removeprefix("torch."), "mha" if self.kv_heads == 4 else "gqa", str(self.head_dim)]
        words += [f"v{self.v_dim}"] if self.v_dim is not None else []
        words += [name for name in ("causal", "has_kv_lengths") if getattr(self, name)]
        words += [f"dropout{self.dropout_p}"] if self.dropout_p else []
        words += [f"scale{self.scale}"] if self.scale is not None else []
        words += [name for name in ("has_sinks", "has_slopes", "are_slopes_fixed") if getattr(self, name)]
        words += [f"softcap{self.softcap}"] if self.softcap is not None else []
        words += [f"bias_of_{self.bias}"] if self.bias else []
        words += [f"pairs_of_{self.pairs}"] if self.pairs else []
        return "-".join(words)

    @property
    def has_scores(self) -> bool:
        """Whether the call uses a score mod."""
        return self.has_sinks or self.softcap is not None or self.has_slopes or bool(self.bias or self.pairs)


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
# head_dim 16: the smallest for tensor cores; 40: padded to 64; 64, 128: used by models. Grouped heads are 4 to 1. Any
# four in a row have both dtypes, both groupings and all head dimensions
PRODUCT = [
    Call(dtype=dtype, kv_heads=kv_heads, head_dim=head_dim)
    for start in range(4)
    for head_dim, (dtype, kv_heads) in zip(
        (16, 40, 64, 128),
        # each start pairs the sizes differently with these four
        itertools.islice(itertools.cycle([(FLOAT32, 4), (BFLOAT16, 1), (BFLOAT16, 4), (FLOAT32, 1)]), start, start + 4),
        strict=True,
    )
]
EXTRAS = [
    Call(head_dim=1),
    Call(head_dim=96, dtype=BFLOAT16, kv_heads=1),
    Call(head_dim=256, dtype=BFLOAT16, kv_heads=1),
    Call(head_dim=64, v_dim=24, kv_heads=1, dtype=BFLOAT16),
    Call(head_dim=24, v_dim=80),
    Call(head_dim=64, dtype=torch.float16),
]
OPTIONS = [
    Call(head_dim=32, causal=True, kv_heads=1),
    Call(head_dim=64, causal=True, dtype=BFLOAT16),
    Call(head_dim=64, has_kv_lengths=True, dtype=BFLOAT16),
    Call(head_dim=32, has_kv_lengths=True, causal=True, kv_heads=1),
    Call(head_dim=32, dropout_p=0.3),
    Call(head_dim=64, dropout_p=0.3, causal=True, has_kv_lengths=True, dtype=BFLOAT16, kv_heads=1),
    Call(head_dim=16, scale=-0.3),
    Call(head_dim=16, scale=0.0),
]
# float16: Triton's interpreter truncates bfloat16 instead of rounding, which adds up in sums over a block
SCORES = [
    Call(head_dim=32, bias="blocks"),
    Call(head_dim=64, bias="heads", dtype=torch.float16, kv_heads=1),
    Call(head_dim=64, has_sinks=True, dtype=torch.float16),
    Call(head_dim=32, bias="batch", has_sinks=True, softcap=2.0, has_slopes=True, causal=True),
    Call(head_dim=32, softcap=1.5, kv_heads=1),
    Call(head_dim=32, has_slopes=True, causal=True, dtype=torch.float16),
    Call(
        head_dim=64,
        bias="heads",
        has_sinks=True,
        softcap=3.0,
        has_slopes=True,
        has_kv_lengths=True,
        dropout_p=0.3,
        dtype=torch.float16,
        kv_heads=1,
    ),
    Call(
        head_dim=16,
        bias="blocks",
        has_sinks=True,
        softcap=1.0,
        has_slopes=True,
        scale=-0.3,
        has_kv_lengths=True,
        kv_heads=1,
    ),
    Call(head_dim=32, softcap=5.0, has_sinks=True, scale=0.0, dtype=torch.float16),
    Call(head_dim=32, bias="batch", causal=True, has_kv_lengths=True, dropout_p=0.2),
    Call(head_dim=32, has_sinks=True, has_kv_lengths=True, causal=True, kv_heads=1),
    Call(head_dim=32, pairs="heads"),
    Call(head_dim=64, pairs="one", causal=True, dtype=torch.float16, kv_heads=1),
    Call(head_dim=16, pairs="batch", scale=-0.3, has_kv_lengths=True, dropout_p=0.2),
    Call(
        head_dim=32, pairs="all", bias="heads", has_sinks=True, softcap=2.0, has_slopes=True, causal=True, dropout_p=0.2
    ),
]
CALLS = [*PRODUCT, *EXTRAS, *OPTIONS, *SCORES]
# `hopper` supports 16-bit dtypes, no dropout, no pair_bias, and block_bias in large blocks only: see below
HOPPER_CALLS = [
    *(call for call in CALLS if call.dtype != FLOAT32 and not call.dropout_p and not call.bias + call.pairs),
    Call(head_dim=128, causal=True, has_kv_lengths=True, dtype=BFLOAT16, kv_heads=1),
    Call(head_dim=64, scale=-0.3, dtype=BFLOAT16),
    Call(head_dim=128, scale=0.0, dtype=torch.float16),
    Call(head_dim=128, v_dim=64, dtype=BFLOAT16),
    Call(head_dim=8, v_dim=72, dtype=torch.float16),
    Call(head_dim=72, v_dim=40, dtype=BFLOAT16),
    Call(head_dim=128, v_dim=96, causal=True, dtype=torch.float16, kv_heads=2),
    Call(head_dim=96, dtype=BFLOAT16),
    # token strides of 200 and 6 bytes, not multiples of 16
    Call(head_dim=100, v_dim=3, dtype=BFLOAT16),
    Call(head_dim=256, causal=True, has_kv_lengths=True, dtype=BFLOAT16, kv_heads=1),
    Call(head_dim=64, v_dim=256, scale=-0.3, dtype=torch.float16),
    Call(head_dim=128, softcap=50.0, causal=True, dtype=BFLOAT16, kv_heads=1),
    Call(head_dim=64, softcap=2.0, has_sinks=True, has_kv_lengths=True, scale=-0.3, dtype=torch.float16),
    Call(head_dim=128, has_slopes=True, are_slopes_fixed=True, causal=True, dtype=torch.float16, kv_heads=1),
    Call(
        head_dim=64,
        softcap=3.0,
        has_slopes=True,
        are_slopes_fixed=True,
        has_sinks=True,
        has_kv_lengths=True,
        dtype=BFLOAT16,
        kv_heads=2,
    ),
    Call(head_dim=256, softcap=900.0, has_slopes=True, has_sinks=True, dtype=torch.float16),
]
# block_bias on `hopper`, whose blocks have multiples of 128 tokens per side
BIAS_CALLS = [
    Call(head_dim=64, bias="blocks", dtype=BFLOAT16),
    Call(head_dim=128, bias="heads", causal=True, dtype=BFLOAT16, kv_heads=1),
    Call(head_dim=64, bias="batch", has_kv_lengths=True, dtype=torch.float16, kv_heads=2),
    Call(
        head_dim=128, bias="batch", has_sinks=True, softcap=2.0, has_slopes=True, are_slopes_fixed=True, causal=True,
        dtype=torch.float16,
    ),
    # the gradient of the slopes, and with it that of the bias, is computed by `triton`
    Call(head_dim=64, bias="heads", softcap=3.0, has_slopes=True, dtype=torch.float16),
    Call(head_dim=96, bias="heads", softcap=1.5, has_kv_lengths=True, dtype=BFLOAT16, kv_heads=1),
    Call(head_dim=40, v_dim=100, bias="batch", has_sinks=True, scale=-0.3, dtype=torch.float16),
    Call(head_dim=128, bias="blocks", scale=0.0, dtype=BFLOAT16, kv_heads=2),
    Call(head_dim=192, v_dim=128, bias="heads", causal=True, dtype=torch.float16, kv_heads=1),
    Call(head_dim=192, bias="blocks", softcap=2.0, has_sinks=True, dtype=torch.float16),
    Call(head_dim=256, bias="batch", has_kv_lengths=True, causal=True, dtype=BFLOAT16, kv_heads=1),
    Call(
        head_dim=256, bias="heads", softcap=5.0, has_slopes=True, are_slopes_fixed=True, dtype=torch.float16, kv_heads=2
    ),
]  # fmt: skip


def _large_blocks(block_size: int | tuple[int, int], *, heads: int = 1, batch: int = 1) -> BlockLayout:
    """Random blocks of 650 queries and 590 keys, different in each head and batch; some rows and columns are empty."""
    block_q, block_kv = (block_size, block_size) if isinstance(block_size, int) else block_size
    grid = -(-650 // block_q), -(-590 // block_kv)
    mask = torch.rand(batch, heads, *grid, generator=torch.Generator().manual_seed(grid[0] + heads)) < 0.6
    mask[..., 1, :] = False
    # not the first column, which has all keys of the shorter kv_lengths
    mask[:, ::2, :, 2] = False
    return BlockLayout.from_block_mask(mask, 650, 590, block_size=block_size)


BIAS_LAYOUTS = [
    *(case for case in cases.LAYOUTS if not any(side % TILE for side in case.build().block_size)),
    cases.Case("large-blocks", lambda: _large_blocks(128)),
    cases.Case("larger-blocks", lambda: _large_blocks((256, 128))),
    cases.Case("large-blocks-of-heads", lambda: _large_blocks(128, heads=4)),
    cases.Case("larger-blocks-of-batches", lambda: _large_blocks((128, 256), batch=2)),
]

# lengths without a layout: no tail; both tails ragged, q or kv longer; less than a tile
DENSE = [(256, 256), (113, 203), (203, 113), (7, 300), (300, 5)]

Layout = cases.Case | tuple[int, int]


def name_of(layout: Layout) -> str:
    return str(layout) if isinstance(layout, cases.Case) else f"dense-{layout[0]}x{layout[1]}"


def family_of(layout: Layout) -> str:
    """Family of a layout: its name up to the first dash."""
    return name_of(layout).split("-")[0]


def calls_for(index: int, backend: str) -> list[Call]:
    """The calls of the spread for the layout of this index: a rotating part of each list."""
    others = [*OPTIONS, *EXTRAS]
    if backend == "hopper":
        # seven: prime to the number of calls, so that neighbors differ
        return [HOPPER_CALLS[(index + 7 * turn) % len(HOPPER_CALLS)] for turn in range(3)]
    if backend == "eager":
        start = 4 * index % len(PRODUCT)
        return [*PRODUCT[start : start + 4], others[index % len(others)], SCORES[index % len(SCORES)]]
    # seven: prime to the number of SCORES, so that neighbors differ
    scores = [SCORES[7 * (index // 2) % len(SCORES)]] if index % 2 == 0 else []
    if index % 3 == 2:
        return [others[index // 3 % len(others)], *scores]
    return [PRODUCT[(index // 3 * 2 + index % 3) % len(PRODUCT)], *scores]


def zoo(which: str) -> list[tuple[str, Layout, Call]]:
    layouts: list[Layout] = [*cases.LAYOUTS, *DENSE]
    if which == "full":
        return [
            (backend, layout, call)
            for backend in BACKENDS
            for layout in layouts
            for call in (HOPPER_CALLS if backend == "hopper" else CALLS)
        ]
    return [
        (backend, layout, call)
        for backend in BACKENDS
        for index, layout in enumerate(layouts)
        for call in calls_for(index, backend)
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "call" in metafunc.fixturenames:
        entries = zoo(metafunc.config.getoption("--zoo"))
        ids = [f"{backend}-{name_of(layout)}-{call}" for backend, layout, call in entries]
        metafunc.parametrize(("backend", "layout", "call"), entries, ids=ids)


def sizes_of(layout: Layout, call: Call) -> tuple[int, int, int, int]:
    """batch, heads, q_len, kv_len, with as few batches and heads as layout and call need."""
    batch, heads, q_len, kv_len = layout.build().shape if isinstance(layout, cases.Case) else (2, 1, *layout)
    return max(batch, 2 if call.has_kv_lengths else 1), max(heads, 4 if call.kv_heads < 4 else 2), q_len, kv_len


def inputs(layout: Layout, call: Call) -> dict[str, Tensor]:
    """q, k, v, dout, dlse in the dtype of the call, contiguous on the CPU; k and v beyond kv_lengths are NaN."""
    batch, heads, q_len, kv_len = sizes_of(layout, call)
    kv_heads = call.kv_heads if call.kv_heads < 4 else heads
    v_dim = call.head_dim if call.v_dim is None else call.v_dim
    generator = torch.Generator().manual_seed(q_len * 1000 + kv_len + call.head_dim)
    shapes = {
        "q": (batch, heads, q_len, call.head_dim),
        "k": (batch, kv_heads, kv_len, call.head_dim),
        "v": (batch, kv_heads, kv_len, v_dim),
        "dout": (batch, heads, q_len, v_dim),
        "dlse": (batch, heads, q_len),
    }
    tensors = {name: torch.randn(shape, generator=generator).to(call.dtype) for name, shape in shapes.items()}
    if call.has_kv_lengths:
        for i, length in enumerate(kv_lengths(layout, call, torch.device("cpu")).tolist()):
            tensors["k"][i, :, length:] = torch.nan
            tensors["v"][i, :, length:] = torch.nan
    return tensors


def kv_lengths(layout: Layout, call: Call, device: torch.device) -> Tensor:
    """One length in the last key tile, the other after a few keys."""
    kv_len = sizes_of(layout, call)[3]
    return torch.tensor([max(0, kv_len - 3), min(kv_len, 9)], dtype=torch.int32, device=device)


def score_mods(layout: Layout, call: Call, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """The sinks, alibi_slopes, block_bias and pair_bias that the call uses."""
    batch, heads, q_len, kv_len = sizes_of(layout, call)
    generator = torch.Generator().manual_seed(heads)
    tensors = {}
    if call.has_sinks:
        tensors["sinks"] = torch.randn(heads, generator=generator)
    if call.has_slopes:
        tensors["alibi_slopes"] = 2.0 ** -torch.arange(3, heads + 3)
    if call.bias and isinstance(layout, cases.Case):
        built = layout.build()
        shape = {"blocks": (), "heads": (heads,), "batch": (batch, heads)}[
            call.bias if built.shape[:2] == (1, 1) else "blocks"
        ]
        tensors["block_bias"] = torch.randn(*shape, built.capacity, generator=generator)
    if call.pairs:
        axes = {"one": (1, 1), "heads": (1, heads), "batch": (batch, 1), "all": (batch, heads)}[call.pairs]
        pairs = torch.randn(*axes, q_len, kv_len, generator=generator)
        # some pairs are removed, and all of the second query
        pairs[..., 1:2, :] = -torch.inf
        tensors["pair_bias"] = pairs.masked_fill(pairs < -2, -torch.inf)
    # at least float32, like such parameters in models; 16 bits would round them before any computation
    dtype = torch.promote_types(dtype, FLOAT32)
    return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}


@lru_cache(maxsize=64)
def blocks_of(layout: Layout) -> plain.BlockOfPairs | None:
    return plain.block_of_pairs(layout.build()) if isinstance(layout, cases.Case) else None


def run(
    backend: str,
    layout: Layout,
    call: Call,
    tensors: dict[str, Tensor],
    device: torch.device,
    *,
    deterministic: bool = False,
) -> list[Tensor]:
    """out, lse, dq, dk, dv, and the gradients of the score mods."""
    options = score_mods(layout, call, call.dtype, device)
    options = {name: buried(tensor) if name == "pair_bias" else tensor for name, tensor in options.items()}
    trained = [options[name].requires_grad_() for name in trained_mods(options, call)]
    leaves = [tensors[name].requires_grad_() for name in ("q", "k", "v")]
    out, lse = attention_with_lse(
        *leaves,
        layout.build() if isinstance(layout, cases.Case) else None,
        causal=call.causal,
        scale=call.scale,
        kv_lengths=kv_lengths(layout, call, device) if call.has_kv_lengths else None,
        dropout_p=call.dropout_p,
        seed=SEED,
        # never None: poisoned memory turns determinism on, with which `hopper` runs another backward
        deterministic=deterministic,
        backend=backend,
        softcap=call.softcap,
        **options,
    )
    grads = torch.autograd.grad((out, lse), [*leaves, *trained], (tensors["dout"], tensors["dlse"].to(lse.dtype)))
    if backend != "reference":
        assert_in_input_order(leaves, out, grads[:3])
    return [out.detach(), lse.detach(), *grads]


# cached, since every backend gets the same calls
@lru_cache(maxsize=64)
def expected(
    layout: Layout, call: Call, device: torch.device, roundings: range | None = None
) -> list[tuple[list[Tensor], Tensor]]:
    """For each result: plain PyTorch in the dtype of the call (lse in float32 at least), and in float64.

    roundings  as in plain.results
    """
    tensors = [tensor.to(device) for tensor in inputs(layout, call).values()]
    mask = layout.build().to_dense().to(device) if isinstance(layout, cases.Case) else None
    options = {
        "causal": call.causal,
        "scale": call.scale,
        "kv_lengths": kv_lengths(layout, call, device) if call.has_kv_lengths else None,
        "dropout_p": call.dropout_p,
        "seed": torch.tensor([SEED], device=device),
        "blocks": blocks_of(layout) if call.bias else None,
        "softcap": call.softcap,
        "score_mods": score_mods(layout, call, call.dtype, device),
    }
    plains = plain.results(*tensors, mask, **options, roundings=roundings)
    return list(zip(plains, plain.truths(*tensors, mask, **options), strict=True))


def assert_backend_is_accurate(
    backend: str, layout: Layout, call: Call, device: torch.device, *, deterministic: bool = False
) -> None:
    """Raises unless out, lse, dq, dk and dv are within the tolerance of closeness.py."""
    tensors = {name: tensor.to(device) for name, tensor in inputs(layout, call).items()}
    tensors = buried_inputs(tensors)
    assert_accurate(run(backend, layout, call, tensors, device, deterministic=deterministic), layout, call, device)


def trained_mods(mods: Iterable[str], call: Call) -> list[str]:
    """The names of the score mods that have gradients."""
    return [name for name in mods if name != "alibi_slopes" or not call.are_slopes_fixed]


def assert_accurate(actual: list[Tensor], layout: Layout, call: Call, device: torch.device) -> None:
    """Raises unless the results of `run` are within the tolerance of closeness.py."""
    if call.dtype in (torch.float16, BFLOAT16) and score_mods(layout, call, call.dtype, device):
        # most results need few of the roundings, each of which takes time
        with contextlib.suppress(AssertionError):
            _assert_within(expected(layout, call, device, FEW_ROUNDINGS), actual, layout, call, device)
            return
    _assert_within(expected(layout, call, device), actual, layout, call, device)


def _assert_within(
    allowed: list[tuple[list[Tensor], Tensor]], actual: list[Tensor], layout: Layout, call: Call, device: torch.device
) -> None:
    mods = score_mods(layout, call, call.dtype, device)
    truths = dict(zip([*NAMES, *(f"d{name}" for name in mods)], allowed, strict=True))
    names = [*NAMES, *(f"d{name}" for name in trained_mods(mods, call))]
    for name, result in zip(names, actual, strict=True):
        plains, truth = truths[name]
        if result.dim() >= 3 and name != "dblock_bias":
            assert_as_accurate(result, plains, truth, name=name)
        else:
            # one number per head or block, compared like lse
            assert_as_accurate(as_rows(result), [as_rows(plain) for plain in plains], as_rows(truth), name=name)


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of 128 x 128 tiles, whatever the layout."""
    force_tile(monkeypatch, TILE)


def values_of(backend: str, layout: Layout, call: Call) -> set[Any]:
    """What a sample of the spread has: on each backend each data type, and each option used and not used."""
    used = {(backend, option, value not in (None, False, 0.0, "")) for option, value in asdict(call).items()}
    return {(backend, call.dtype), (backend, call.kv_heads), *used}


@pytest.mark.sweep(by=values_of)
def test_is_as_accurate_as_the_reference(backend, layout, call, device):
    assert_backend_is_accurate(backend, layout, call, device)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0; other backends have one backward")
@pytest.mark.parametrize("hopper_call", HOPPER_CALLS, ids=str)
@pytest.mark.parametrize("wanted", [(256, 256), (113, 203), "causal", "full-ragged", "one-block"], ids=str)
def test_the_deterministic_backward_of_hopper_is_accurate(wanted, hopper_call, device):
    (layout,) = [each for each in [*cases.LAYOUTS, *DENSE] if wanted in (each, getattr(each, "name", None))]
    assert_backend_is_accurate("hopper", layout, hopper_call, device, deterministic=True)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0; tests/kernels/hopper has a simulator")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bias_call", BIAS_CALLS, ids=str)
@pytest.mark.parametrize("each", BIAS_LAYOUTS, ids=str)
def test_block_bias_on_hopper_is_accurate(each, bias_call, deterministic, device):
    assert_backend_is_accurate("hopper", each, bias_call, device, deterministic=deterministic)


def fine_calls(backend: str, tile: int) -> list[Call]:
    """The calls that may iterate over tiles of `tile`, smaller than 128 x 128."""
    of_backend = HOPPER_CALLS if backend == "hopper" else CALLS
    return [
        call
        for call in of_backend
        if dispatch.has_fine_tiles(backend, call.head_dim, call.v_dim or call.head_dim, has_block_bias=bool(call.bias))
        # the gradient of slopes is computed by `triton`, which has no gathered tiles
        and (tile != GATHERED_TILE or not call.has_slopes or call.are_slopes_fixed)
    ]


def values_in_smaller_tiles(name: str, tile: int, index: int) -> set[Any]:
    """What a case of the test below adds to a sample: which options the first call has."""
    calls = fine_calls(name, tile)
    call = calls[index % len(calls)]
    return {(name, option, value not in (None, False, 0.0, "")) for option, value in asdict(call).items()}


# tests/kernels/hopper/test_protocol.py has the backend without a GPU
ON_HOPPER = [("hopper", FINE_TILE), ("hopper", GATHERED_TILE)] if HAS_HOPPER else []


@pytest.mark.sweep(by=lambda name, tile, index: {(tile, value) for value in values_in_smaller_tiles(name, tile, index)})
@pytest.mark.parametrize(("name", "tile"), [("triton", FINE_TILE), *ON_HOPPER])
@pytest.mark.parametrize("index", range(len(cases.LAYOUTS)), ids=[str(layout) for layout in cases.LAYOUTS])
def test_smaller_tiles_are_as_accurate(name, tile, index, device, monkeypatch):
    pytest.importorskip("triton", reason="needs Triton")
    force_tile(monkeypatch, tile)
    calls = fine_calls(name, tile)
    # a step that shares no divisor with their number reaches every call; the interpreter is slow
    step = next(step for step in (7, 11, 13) if math.gcd(step, len(calls)) == 1)
    for turn in range(3 if device.type == "cuda" else 1):
        assert_backend_is_accurate(name, cases.LAYOUTS[index], calls[(index + step * turn) % len(calls)], device)


def test_the_spread_covers_every_value_of_every_axis():
    entries = zoo("spread")
    layouts: list[Layout] = [*cases.LAYOUTS, *DENSE]
    axes = ("dtype", "kv_heads", "head_dim")
    values = {axis: {getattr(call, axis) for call in PRODUCT} for axis in axes}
    for layout in layouts:
        calls = [call for backend, other, call in entries if backend == "eager" and other is layout]
        assert all({getattr(call, axis) for call in calls} >= values[axis] for axis in axes), name_of(layout)
    for backend in BACKENDS:
        expected_calls = HOPPER_CALLS if backend == "hopper" else CALLS
        assert {call for name, _, call in entries if name == backend} == set(expected_calls)
    for family in {family_of(layout) for layout in layouts}:
        calls = [call for backend, layout, call in entries if backend == "triton" and family_of(layout) == family]
        if len(calls) >= 4:
            assert {call.dtype for call in calls} >= values["dtype"], family
            assert {call.kv_heads for call in calls} >= values["kv_heads"], family


def test_the_full_zoo_is_the_full_product():
    entries = zoo("full")
    n_calls = 2 * len(CALLS) + HAS_HOPPER * len(HOPPER_CALLS)
    assert len(entries) == len(set(entries)) == (len(cases.LAYOUTS) + len(DENSE)) * n_calls
    assert set(zoo("spread")) < set(entries)
    assert {(call.dtype, call.kv_heads, call.head_dim) for call in PRODUCT} == set(
        itertools.product((FLOAT32, BFLOAT16), (4, 1), (16, 40, 64, 128))
    )


(PER_HEAD,) = [case for case in cases.LAYOUTS if case.name == "per-head"]
# tile columns by length are 1, 2, 3, 0 in the first head, a permutation that is not its own inverse
CYCLES = cases.Case(
    "cycles",
    lambda: BlockLayout.from_block_mask(
        torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 1, 0]]).bool()[None, :, None],
        40,
        450,
        block_size=128,
    ),
)


@pytest.mark.parametrize("layout", [PER_HEAD, CYCLES, (40, 50)], ids=name_of)
@pytest.mark.parametrize("name", BACKENDS)
def test_several_kv_heads_each_serve_a_group(name, layout, device):
    """With 1 or 4 KV heads, a kernel with a wrong head index could still be correct."""
    call = Call(head_dim=16, kv_heads=2, dtype=torch.float16 if name == "hopper" else FLOAT32)
    assert_backend_is_accurate(name, layout, call, device)


# the diagonal masks one pair of a step of 32 keys, or all but one
@pytest.mark.parametrize("layout", [(70, 100), (70, 103)], ids=name_of)
def test_a_diagonal_near_the_edge_of_a_step_is_accurate(layout, device):
    assert_backend_is_accurate("triton", layout, Call(head_dim=16, causal=True), device)


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_gradients_may_be_expanded(name, device):
    """out.sum() gives a gradient with strides 0; autograd may also give None."""
    tensors = {key: value.to(device) for key, value in inputs((40, 50), Call(head_dim=16)).items()}
    leaves = [tensors[key].requires_grad_() for key in ("q", "k", "v")]
    results = []
    for backend in (name, "reference"):
        out_grads = torch.autograd.grad(attention_with_lse(*leaves, backend=backend)[0].sum(), leaves)
        lse_grads = torch.autograd.grad(attention_with_lse(*leaves, backend=backend)[1].sum(), leaves[:2])
        results.append([*out_grads, *lse_grads])
    for actual, expected_gradient in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected_gradient)


@pytest.mark.parametrize("name", BACKENDS)
def test_expanded_and_contiguous_gradients_give_the_same_bits(name, device):
    """In bfloat16, where kernels use TMA, which cannot load strides of 0."""
    tensors = {key: value.to(device, BFLOAT16) for key, value in inputs((40, 50), Call(head_dim=16)).items()}
    leaves = [tensors[key].requires_grad_() for key in ("q", "k", "v")]
    out, _ = attention_with_lse(*leaves, backend=name)
    contiguous = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    for expanded, gradient in zip(torch.autograd.grad(out.sum(), leaves), contiguous, strict=True):
        assert torch.equal(expanded, gradient)
