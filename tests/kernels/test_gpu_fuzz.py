"""5,000 random calls, large enough to fill a GPU, compared with float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from blocksparse_flash.dispatch import MAX_FINE_HEAD_DIM
from blocksparse_flash.plan_format import FINE_TILE, GATHERED_TILE
from tests.support.launch_runs import assert_is_accurate, run
from tests.support.launch_tables import Call, Variant

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# the calls of a family share compiled kernels: compile-time values are drawn once per family
FAMILIES, CALLS = 100, 50
# over all heads: at least MIN_TILE_ROWS blocks of 128 queries, and roughly at most MAX_PAIRS query-key pairs and
# MAX_K_NUMEL elements of k
MIN_TILE_ROWS, MAX_PAIRS, MAX_K_NUMEL = 132, 4_000_000, 6_000_000


def family(seed: int) -> Call:
    """Options shared by all calls of a family; the shape is a placeholder."""
    numbers = random.Random(seed)
    backend = "hopper" if HAS_HOPPER and seed % 3 == 0 else "triton"
    mode = numbers.choice(["dense", "causal", "blocks", "heads", "fine", "long", "blocks-causal"])
    has_layout = mode not in ("dense", "causal")
    group, has_lengths = numbers.choice([1, 1, 2, 4]), numbers.random() < 0.3
    if backend == "hopper":
        variant = Variant(
            "",
            mode,
            group,
            has_lengths,
            deterministic=numbers.random() < 0.3,
            has_sinks=numbers.random() < 0.2,
            softcap=numbers.choice([None, None, 3.0]),
            has_slopes=numbers.random() < 0.2,
            # of blocks of 128
            has_bias=mode in ("blocks", "long", "blocks-causal") and numbers.random() < 0.3,
        )
        dtype = numbers.choice([torch.bfloat16, torch.float16])
    else:
        variant = Variant(
            "",
            mode,
            group,
            has_lengths,
            dropout_p=numbers.choice([0.0, 0.0, 0.0, 0.25]),
            has_sinks=numbers.random() < 0.2,
            softcap=numbers.choice([None, None, None, 3.0]),
            has_slopes=numbers.random() < 0.2,
            has_bias=has_layout and numbers.random() < 0.2,
        )
        dtype = numbers.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
    head_dim = numbers.choice([8, 16, 33, 40, 64, 64, 64, 72, 96, 100, 128, 128, 128, 192, 256])
    if has_layout and head_dim <= MAX_FINE_HEAD_DIM and not variant.has_bias and seed % 2:
        # every fourth call with the tiles of 16 that only `hopper` has
        variant = replace(variant, tile=GATHERED_TILE if backend == "hopper" and seed % 4 == 3 else FINE_TILE)
    return Call(backend, (0, 0, 0, 0), head_dim, dtype, variant)


def draw(shared: Call, numbers: random.Random) -> Call:
    """A call of the family, with at least MIN_TILE_ROWS blocks of 128 queries."""
    q_len = numbers.choice([numbers.randint(3, 64), numbers.randint(65, 700), 128 * numbers.randint(1, 6)])
    n_batch_heads = -(-MIN_TILE_ROWS // -(-q_len // 128))
    kv_len = numbers.randint(
        3, max(200, min(700, MAX_PAIRS // (n_batch_heads * q_len), MAX_K_NUMEL // (n_batch_heads * shared.head_dim)))
    )
    n_batch_heads = max(
        n_batch_heads, min(numbers.randint(n_batch_heads, 3 * n_batch_heads), MAX_PAIRS // (q_len * kv_len))
    )
    batch, group = numbers.randint(1, 4), shared.variant.group
    heads = -(-n_batch_heads // (batch * group)) * group
    scale = numbers.choice([None, 0.0, -0.1, -1.0, numbers.uniform(-0.5, 0), numbers.uniform(0, 0.5)])
    return Call(shared.backend, (batch, heads, q_len, kv_len), shared.head_dim, shared.dtype, shared.variant, scale)


@pytest.mark.parametrize("seed", range(FAMILIES))
def test_random_calls_are_accurate(seed: int, record_property: Callable[[str, object], None]) -> None:
    shared, numbers = family(seed), random.Random(1000 + seed)
    wrong = []
    for _ in range(CALLS):
        call = draw(shared, numbers)
        try:
            assert_is_accurate(call, run(call))
        except AssertionError as error:
            wrong.append(f"{call}: {error}")
    # other test processes share the GPU
    torch.cuda.empty_cache()
    options = f"{shared.backend} {shared.dtype} head_dim {shared.head_dim} {shared.variant}"
    record_property("fuzz", f"seed {seed:3}: {CALLS} calls, {len(wrong)} wrong, of {options}")
    assert not wrong, "\n".join(wrong)
