"""What all builders have in common: docstring examples that run, O(nnz) time and memory, few imports."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import sys
import time
import tracemalloc

import numpy as np
import pytest
import torch

import masks
from blocksparse_flash import BlockLayout
from tests.test_zoo_masks import FAMILIES, given

# 1 M tokens would be 1 T pairs; 262,144 are 64 G pairs, 8 GiB as bits, and 4 M pairs of blocks
LENGTH = 262_144
TILES = masks.tile_order((512, LENGTH // 512), tile=16)
# these return no layout
ORDERS = ["hilbert_order", "morton_order", "tile_order"]
BUILDERS = {
    "butterfly": masks.butterfly,
    "local": lambda length: masks.local(length, window=512),
    "local, skewed": lambda length: masks.local(length, window=(1000, 3)),
    "random": lambda length: masks.random(length, blocks_per_row=8, seed=1),
    "global_tokens": lambda length: masks.global_tokens(length, tokens=100),
    "global_tokens, scattered": lambda length: masks.global_tokens(length, tokens=range(0, length, length // 8)),
    "strided": lambda length: masks.strided(length, stride=length // 16),
    "strided, causal": lambda length: masks.strided(length, stride=length // 16, causal=True),
    "documents": lambda length: masks.documents(np.linspace(0, length, 300).astype(int)),
    "documents, causal": lambda length: masks.documents(np.linspace(0, length, 300).astype(int), causal=True),
    "bigbird": lambda length: masks.bigbird(length, seed=1),
    "longformer": lambda length: masks.longformer(length, window=512, global_tokens=3),
    "butterfly, stretched": lambda length: masks.butterfly((length, length // 2), stretch=1024),
    "pixelfly": masks.pixelfly,
    "sink_window": lambda length: masks.sink_window(length, sinks=4, window=4096),
    "a_shape": masks.a_shape,
    "tri_shape": masks.tri_shape,
    "block_diagonal": lambda length: masks.block_diagonal(length, size=1000),
    "block_diagonal, causal": lambda length: masks.block_diagonal(length, size=4096, causal=True),
    "fixed": lambda length: masks.fixed(length, stride=length // 16, summary=64, causal=True),
    "fixed, heads": lambda length: masks.fixed(length, stride=8192, summary=64, heads=4, verticals=2),
    "dilated_window": lambda length: masks.dilated_window(length, window=8, dilation=[1, 50, 3000]),
    "longnet": lambda length: masks.longnet(length, segments=[2048, length], dilations=[1, 1024], heads=2),
    "hierarchical": lambda length: masks.hierarchical(length, size=128),
    "hierarchical, causal": lambda length: masks.hierarchical(length, size=1024, unit=256, causal=True),
    "neighborhood": lambda length: masks.neighborhood((512, length // 512), kernel=7),
    "neighborhood, frames": lambda length: masks.neighborhood((16, 128, length // 2048), kernel=(3, 5, 5)),
    "neighborhood, dilated": lambda length: masks.neighborhood(length, kernel=7, dilation=length // 7),
    "neighborhood, tiles": lambda length: masks.neighborhood((512, length // 512), kernel=9, order=TILES),
    "swin": lambda length: masks.swin((512, length // 512), window=16, shift=8),
    "sliding_tile": lambda length: masks.sliding_tile((512, length // 512), kernel=48, tile=16, order=TILES),
    "axial": lambda length: masks.axial((16, 128, length // 2048), axes=[1, 2]),
    "vertical_slash": lambda length: masks.vertical_slash(
        length, verticals=range(0, length, length // 8), slashes=[*range(100), length // 3, length // 2]
    ),
    "block_diffusion": lambda length: masks.block_diffusion(length // 16, size=length // 1000),
    "tree": lambda length: masks.tree([-1, *(node // 8 for node in range(1000))], prompt=length),
    "alibi_windows": lambda length: masks.alibi_windows(length, slopes=[0.1, 0.2, 0.3], threshold=100.0),
    "shared_prefix": lambda length: masks.shared_prefix(np.linspace(0, length, 300).astype(int)),
    "erdos_renyi": lambda length: masks.erdos_renyi(length, density=0.005, seed=1),
    "expander": lambda length: masks.expander(length, degree=9, seed=1),
    "small_world": lambda length: masks.small_world(length, neighbors=8, rewire=0.1, seed=1),
    "lsh, sorted": lambda length: masks.lsh(np.arange(length) // 1000),
}


def modules() -> list[str]:
    return ["masks", *(f"masks.{module.name}" for module in pkgutil.iter_modules(masks.__path__))]


@pytest.mark.parametrize("name", modules())
def test_examples_run(name):
    # a builder may hide the module of the same name
    importlib.import_module(name)
    module = sys.modules[name]
    failed, tried = doctest.testmod(module)
    assert failed == 0
    if any(function.__module__ == name for function in (getattr(masks, public) for public in masks.__all__)):
        assert tried > 0


@pytest.mark.parametrize("name", sorted({*masks.__all__} - {"build"}))
def test_every_docstring_has_arguments_and_source(name):
    builder = getattr(masks, name)
    text = inspect.getdoc(builder)
    parameters = inspect.signature(builder).parameters
    for parameter in [*parameters, "returns", "raises"] if name != "causal" else [*parameters, "returns"]:
        assert re.search(rf"^(\w+, )?{parameter}[ ,]", text, re.MULTILINE), f"{name} does not describe {parameter}"
    assert ">>>" in text
    # pattern arguments are keyword-only; lengths and sequences are positional
    kinds = [
        parameter.kind for parameter in parameters.values() if parameter.name not in ("q_len", "kv_len", "kv_buckets")
    ]
    assert kinds[1:] == [inspect.Parameter.KEYWORD_ONLY] * (len(kinds) - 1)
    if name not in ORDERS:
        assert "arXiv:" in text
        assert parameters["block_size"].default == 128


# values that are wrong for most arguments, without numbers that are merely large
RUBBISH = [
    *(None, True, -1, 1.5, float("nan"), 1 + 2j, "x", b"x", {}, {"a": 1}, {1, 2}, object(), lambda: 0),
    *([], (), [None], ["x"], [True], [1.5], [-1], [10**30], (1, 2, 3, 4, 5), [[1], [2]], [[1.5]], [[], []]),
    *(np.array(3), np.array([1.5]), np.array([[1, 2], [3, 4]]), np.zeros((2, 2, 2)), np.array(["a"]), np.array([None])),
    *(torch.tensor([float("nan")]), torch.zeros(2, 2, dtype=torch.bool), torch.empty(0), torch.zeros(3, device="meta")),
    *(torch.tensor([1]).to_sparse(), torch.tensor([[0.5]]).to_sparse()),
    torch.nested.nested_tensor([torch.zeros(2, 3), torch.ones(1, 3)], layout=torch.jagged),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_wrong_values_raise_an_error_that_names_the_argument(name):
    """Each argument in turn: a layout, or a ValueError or TypeError that begins with the name of an argument."""
    builder, good = getattr(masks, name), given(name)
    parameters = inspect.signature(builder).parameters
    said = []
    for parameter in parameters:
        for value in RUBBISH:
            try:
                assert isinstance(builder(**{**good, parameter: value}), BlockLayout)
            except (ValueError, TypeError) as error:
                said.append(f"{error} <- {parameter}={value!r}")
    assert [message for message in said if re.match(r"\w+", message)[0] not in parameters] == []
    # only a few are valid
    assert len(said) > len(parameters) * len(RUBBISH) // 2


@pytest.mark.parametrize("name", BUILDERS)
def test_memory_grows_with_the_blocks_and_not_with_the_square(name):
    layout = BUILDERS[name](LENGTH)
    tracemalloc.start()
    try:
        BUILDERS[name](LENGTH)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # bytes for each block, each token, and each bitmask with the pairs it is packed from
    bound = 400 * layout.nnz + 40 * LENGTH + 3 * 128 * 128 * len(layout.bitmasks) + 2**24
    assert peak < bound
    # less than one byte per pair of blocks, far below a dense mask
    assert peak < LENGTH**2 / 8 / 16


@pytest.mark.parametrize(
    "build",
    [lambda size: masks.strided(size, stride=300), lambda size: masks.dilated_window(size, window=2**30, dilation=300)],
    ids=["strided", "dilated_window"],
)
@pytest.mark.parametrize("size", [(2**18, 128), (128, 2**18)], ids=str)
def test_memory_of_few_keys_or_queries_grows_with_the_blocks(build, size):
    tracemalloc.start()
    try:
        layout = build(size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert layout.nnz > 1000
    assert peak < 2000 * layout.nnz + 2**20


@pytest.mark.parametrize("name", BUILDERS)
def test_a_large_grid_is_built_quickly(name):
    BUILDERS[name](LENGTH)
    begin = time.process_time()
    BUILDERS[name](LENGTH)
    # a Python loop over blocks or anything over pairs would take seconds; CPU time, since the machine may be busy
    assert time.process_time() - begin < 2.0


TOO_MANY = {
    "causal": lambda length: masks.causal(length, block_size=16),
    "local": lambda length: masks.local(length, window=2**30, block_size=16),
    "block_diagonal": lambda length: masks.block_diagonal(length, size=2**27, block_size=16),
    "block_causal": lambda length: masks.block_causal(length, size=2**20, block_size=16),
    "prefix_lm": lambda length: masks.prefix_lm(length, prefix=2**20, block_size=16),
    "sink_window": lambda length: masks.sink_window(length, sinks=2**20, window=4, block_size=16),
    "butterfly": lambda length: masks.butterfly(length, block_size=16),
    "expander": lambda length: masks.expander(length, degree=2**20, seed=0, block_size=16),
    "random": lambda length: masks.random(length, density=0.5, seed=0, block_size=16),
    "erdos_renyi": lambda length: masks.erdos_renyi(length, density=0.5, seed=0, block_size=16),
    "small_world": lambda length: masks.small_world(length, neighbors=2**20, rewire=0.1, seed=0, block_size=16),
    "documents": lambda length: masks.documents([0, length], block_size=16),
    "strided, window": lambda length: masks.strided(length, stride=2**24, block_size=16),
    "strided, far": lambda length: masks.strided(length, stride=2**16, causal=True, block_size=16),
    "strided, all": lambda length: masks.strided(length, stride=16, block_size=16),
    "bigbird, window": lambda length: masks.bigbird(length, window_blocks=2**20 + 1, seed=0, block_size=16),
    "bigbird, random": lambda length: masks.bigbird(length, random_blocks=2**20, seed=0, block_size=16),
    "bigbird, global": lambda length: masks.bigbird(length, global_blocks=2**20, seed=0, block_size=16),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_a_mask_of_too_many_blocks_is_refused_before_it_takes_memory(name):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"nnz must be below 2\*\*31"):
            TOO_MANY[name](2**31 - 1)
        assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    finally:
        tracemalloc.stop()
