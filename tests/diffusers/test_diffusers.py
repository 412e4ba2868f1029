"""Models of diffusers with a layout, against their own attention with the layout as a mask of pairs.

Models are small, with random weights. Ours in float32 is held to the masked model in float64, by the distance of the
masked model in float32.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.diffusers import dispatching, top_blocks, top_p, use, using
from tests.support.closeness import assert_as_accurate
from tests.support.diffusion_models import (
    IMAGE,
    MODELS,
    N_TEXT,
    VIDEO,
    Model,
    generated,
    inputs_of,
    model_of,
    pipeline_of,
)

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning", "ignore:CUDA is not available:UserWarning")

TILES = {VIDEO: (1, 2, 3), IMAGE: (2, 2)}
KERNELS = {VIDEO: (1, 4, 3), IMAGE: (4, 4)}
Chosen = Callable[[Tensor, Tensor], Tensor]


def layout_of(grid: tuple[int, ...], order: Any = None) -> BlockLayout:
    return masks.sliding_tile(grid, kernel=KERNELS[grid], tile=TILES[grid], order=order, block_size=16)


def order_of(grid: tuple[int, ...]) -> Tensor:
    return masks.tile_order(grid, tile=TILES[grid])


class Recording(TorchFunctionMode):
    """Passes the arguments of torch's attention to a function, and calls it with what that returns."""

    def __init__(self, change: Callable[..., dict[str, Any]]) -> None:
        super().__init__()
        self.change = change

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention:
            return function(*args, **kwargs)
        kwargs |= dict(zip(("query", "key", "value"), args, strict=False))
        return function(**self.change(**kwargs))


def masked(case: Model, pairs: Tensor | Chosen) -> Recording:
    """Self-attention with a mask of pairs of the image or video; text attends and is attended to.

    pairs  bool (..., tokens, tokens), or a function of q and k without text, in the order of the model
    """

    def change(query: Tensor, key: Tensor, attn_mask: Tensor | None = None, **others: Any) -> dict[str, Any]:
        q_len, kv_len = query.shape[2], key.shape[2]
        if q_len == kv_len >= case.n_tokens:
            begin = q_len - case.n_tokens if case.text == "first" else 0
            own = slice(begin, begin + case.n_tokens)
            chosen = pairs if isinstance(pairs, Tensor) else pairs(query[:, :, own], key[:, :, own])
            mask = torch.ones(*chosen.shape[:-2], q_len, q_len, dtype=torch.bool)
            mask[..., own, own] = chosen
            attn_mask = mask if attn_mask is None else mask & attn_mask
        return {"query": query, "key": key, "attn_mask": attn_mask, **others}

    return Recording(change)


@torch.no_grad()
def output(name: str, model: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return model(**inputs_of(name, dtype), return_dict=False)[0]


def assert_close(actual: Tensor, plain: Tensor, truth: Tensor, name: str) -> None:
    rows = [tensor.reshape(1, 1, -1, tensor.shape[-1]) for tensor in (actual, plain, truth)]
    assert_as_accurate(rows[0], rows[1], rows[2].double(), name=name)


def assert_masked(name: str, actual: Tensor, pairs: Tensor | Chosen) -> None:
    """`actual` is the output of a model whose self-attention has this mask, and differs from that without."""
    with masked(MODELS[name], pairs):
        plain = output(name, model_of(name))
        truth = output(name, model_of(name).double(), torch.float64)
    assert_close(actual, plain, truth, name)
    assert (plain - output(name, model_of(name))).abs().max() > 1e-3


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_dense(name: str) -> None:
    model = model_of(name)
    with use(model, **MODELS[name].options) as used:
        ours = output(name, model)
    assert used.layers
    truth = output(name, model_of(name).double(), torch.float64)
    assert_close(ours, output(name, model), truth, name)
    assert torch.equal(output(name, model), output(name, model_of(name)))


@pytest.mark.parametrize("by_tiles", [True, False])
def test_layout(name: str, by_tiles: bool) -> None:
    grid = MODELS[name].grid
    order = order_of(grid) if by_tiles else None
    model = model_of(name)
    use(model, layout_of(grid, order), order=order, **MODELS[name].options)
    assert_masked(name, output(name, model), layout_of(grid).to_dense()[0, 0])


@pytest.mark.parametrize("name", [name for name, case in MODELS.items() if case.text and not case.options])
def test_places_of_text(name: str) -> None:
    """The rows of the first attention that change with the prompt are those of the text."""
    case, queries = MODELS[name], []

    def change(query: Tensor, **others: Any) -> dict[str, Any]:
        if query.shape[2] > N_TEXT:
            queries.append(query)
        return {"query": query, **others}

    inputs, model = inputs_of(name), model_of(name)
    for factor in (1.0, 2.0):
        queries.append(torch.tensor(0.0))
        with torch.no_grad(), Recording(change):
            model(**{**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"] * factor})
    half = len(queries) // 2
    differs = (queries[1] != queries[half + 1]).any(3).any(1).any(0)
    expected = torch.zeros(case.n_tokens + N_TEXT, dtype=torch.bool)
    expected[slice(N_TEXT) if case.text == "first" else slice(case.n_tokens, None)] = True
    assert torch.equal(differs, expected)
    assert using.TEXT_PLACES[case.name] == case.text


def pooled_pairs(
    q: Tensor, k: Tensor, order: Tensor, *, has_text: bool, density: float | None, p: float | None = None
) -> Tensor:
    """bool (batch, heads, tokens, tokens) in the order of the model: the selection of each block, in Python.

    The last block is always selected if it also has text.
    """
    batch, heads, tokens, head_dim = q.shape
    rows = torch.empty(tokens, dtype=torch.int64)
    rows[order] = torch.arange(tokens) // 16
    n = -(-tokens // 16)
    means_q, means_k = (torch.stack([x[:, :, rows == i].mean(2) for i in range(n)], 2) for x in (q, k))
    scores = (means_q @ means_k.mT) / math.sqrt(head_dim)
    chosen = torch.zeros(batch, heads, n, n, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for row in range(n):
                weights = scores[b, h, row].softmax(0)
                mass = 0.0
                for rank, col in enumerate(weights.argsort(descending=True).tolist()):
                    if rank < math.ceil(density * n) if p is None else mass < p:
                        chosen[b, h, row, col] = True
                    mass += float(weights[col])
    chosen[..., -1] |= has_text and tokens % 16 != 0
    return chosen[:, :, rows][:, :, :, rows]


@pytest.mark.parametrize("kind", ["top_blocks", "top_p"])
def test_chosen_layouts(name: str, kind: str) -> None:
    case = MODELS[name]
    order, has_text = order_of(case.grid), case.text is not None
    settings: dict[str, Any] = {"density": 0.4} if kind == "top_blocks" else {"density": None, "p": 0.5}
    layout = top_blocks(0.4, block_size=16) if kind == "top_blocks" else top_p(0.5, block_size=16)
    model = model_of(name)
    use(model, layout, order=order, **case.options)
    assert_masked(name, output(name, model), lambda q, k: pooled_pairs(q, k, order, has_text=has_text, **settings))


def test_gradients() -> None:
    """Of every parameter, with a layout and text."""
    found = []
    for masks_pairs, dtype in ((False, torch.float32), (True, torch.float32), (True, torch.float64)):
        model, order = model_of("SD3").to(dtype), order_of(IMAGE)
        if masks_pairs:
            with masked(MODELS["SD3"], layout_of(IMAGE).to_dense()[0, 0]):
                out = model(**inputs_of("SD3", dtype), return_dict=False)[0]
        else:
            use(model, layout_of(IMAGE, order), order=order)
            out = model(**inputs_of("SD3", dtype), return_dict=False)[0]
        out.square().sum().backward()
        gradients = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
        found.append(gradients)
    assert found[0].keys() == found[1].keys() == found[2].keys()
    for key in found[0]:
        assert_close(*(gradients[key] for gradients in found), key)


# ---- pipelines


@pytest.fixture(params=["Wan", "Flux"])
def pipe(request: pytest.FixtureRequest) -> Any:
    return pipeline_of(request.param)


def case_of(pipe: Any) -> Model:
    return MODELS["Wan" if type(pipe).__name__ == "WanPipeline" else "Flux"]


def test_pipelines(pipe: Any) -> None:
    """Dense, as their own attention; with a layout, as with the mask; and without again."""
    case = case_of(pipe)
    dense, order = generated(pipe), order_of(case.grid)
    with masked(case, layout_of(case.grid).to_dense()[0, 0]):
        expected = generated(pipe)
    with use(pipe):
        torch.testing.assert_close(generated(pipe), dense, rtol=1e-4, atol=1e-4)
    with use(pipe, layout_of(case.grid, order), order=order):
        torch.testing.assert_close(generated(pipe), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(generated(pipe), dense)
    assert (expected - dense).abs().max() > 0.01


def test_dense_steps(pipe: Any) -> None:
    """The first steps have the model's own attention, also in the next call and with fewer steps than that."""
    case = case_of(pipe)
    order = order_of(case.grid)
    layout, is_dense = layout_of(case.grid, order), []
    used = use(pipe, layout, order=order, dense_steps=2)
    pipe.transformer.register_forward_pre_hook(lambda *_: is_dense.append(used.is_dense))
    n_forwards = 2 if case.name.startswith("Wan") else 1
    for _ in range(2):
        is_dense.clear()
        generated(pipe, 4)
        assert is_dense == [step < 2 for step in range(4) for _ in range(n_forwards)]
    assert torch.equal(generated(pipe, 2), generated(pipeline_of("Wan" if n_forwards == 2 else "Flux"), 2))
    used.remove()
    generated(pipe, 1)
    assert used.is_dense


def test_is_dense(pipe: Any) -> None:
    case = case_of(pipe)
    dense = generated(pipe)
    used = use(pipe, layout_of(case.grid))
    assert not torch.equal(generated(pipe), dense)
    used.is_dense = True
    assert torch.equal(generated(pipe), dense)


def test_layers_of_transformers() -> None:
    """Layers are chosen by name, with a pipeline's second transformer; later layouts replace earlier ones."""
    pipe = pipeline_of("Wan")
    own = ("blocks.0.attn1", "blocks.0.attn2", "blocks.1.attn1", "blocks.1.attn2")
    first = use(pipe, layout_of(VIDEO))
    assert first.layers == own
    assert use(pipe, layout_of(VIDEO), dense_layers=r"^blocks\.0\.").layers == own[2:]
    assert use(pipe, layers=r"attn1$").layers == own[::2]
    # the first two are left with cross-attention
    generated(pipe, 1)
    first.remove()
    blocks = pipe.transformer.blocks
    assert hasattr(blocks[1].attn1, using._USE) and not hasattr(blocks[0].attn2, using._USE)
    pipe.transformer_2 = model_of("Wan")
    used = use(pipe, layers=r"1\.attn1$", dense_steps=1)
    assert used.layers == ("transformer.blocks.1.attn1", "transformer_2.blocks.1.attn1")


def test_layers_differ() -> None:
    order = order_of(VIDEO)
    model, everywhere = model_of("Wan"), masks.local(72, window=(None, None), block_size=16)
    use(model, everywhere, layers=r"^blocks\.0")
    use(model, layout_of(VIDEO, order), order=order, layers=r"^blocks\.1")
    one_layer = model_of("Wan")
    use(one_layer, layout_of(VIDEO), layers=r"^blocks\.1")
    torch.testing.assert_close(output("Wan", model), output("Wan", one_layer), rtol=1e-4, atol=1e-4)
    assert (output("Wan", model) - output("Wan", model_of("Wan"))).abs().max() > 0.01


def test_cross_attention_of_the_same_length() -> None:
    """A prompt with as many tokens as the video keeps dense cross-attention."""
    inputs = inputs_of("Wan")
    inputs["encoder_hidden_states"] = torch.randn(2, 72, 24, generator=torch.Generator().manual_seed(3))
    model, seen = model_of("Wan"), []
    used = use(model, layout_of(VIDEO))
    with Recording(lambda **call: (seen.append(call), call)[1]):
        model(**inputs)
    assert used.layers and len(seen) == 2


def test_copies() -> None:
    """A copy of a model attends with its own weights, and keeps the layout."""
    model = model_of("Wan")
    used = use(model, layout_of(VIDEO))
    twin, expected = copy.deepcopy(model), output("Wan", model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    used.remove()
    assert torch.equal(output("Wan", twin), expected)


@pytest.mark.parametrize("has_run", [False, True])
def test_copies_of_a_pipeline_have_dense_steps(has_run: bool) -> None:
    pipe, other = pipeline_of("Wan"), pipeline_of("Wan")
    for each in (pipe, other):
        use(each, layout_of(VIDEO), dense_steps=1)
    expected, always_sparse = generated(other, 3), pipeline_of("Wan")
    use(always_sparse, layout_of(VIDEO))
    if has_run:
        generated(pipe, 3)
    assert torch.equal(generated(copy.deepcopy(pipe), 3), expected)
    assert not torch.equal(expected, generated(always_sparse, 3))


def test_dense_steps_need_their_pipeline() -> None:
    pipe = pipeline_of("Wan")
    use(pipe, layout_of(VIDEO), dense_steps=1)
    model = pipe.transformer
    del pipe
    with pytest.raises(ValueError, match="dense_steps follows the scheduler of a pipeline that no longer exists"):
        output("Wan", model)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (top_p(1.0, block_size=16), 1.0),
        # 1 - 0.7 is a little more than 0.3
        (top_blocks(1 - 0.7, block_size=16), 0.3),
        (top_blocks(1e-9, block_size=16), 0.1),
        (top_p(1e-9, block_size=16), 0.1),
    ],
)
def test_a_share_of_blocks_is_not_rounded_up(choice: Any, expected: float) -> None:
    """Of 10 blocks, whose weights differ by many orders of magnitude."""
    q, k = (8 * torch.randn(1, 2, 160, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    assert choice(q, k).density == pytest.approx(expected)


def test_a_shared_processor() -> None:
    """`set_attn_processor` gives all layers one processor; those without the layout keep their own attention."""
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    shared, expected = WanAttnProcessor(), {}
    model = model_of("Wan")
    for chosen in (r"blocks\.0\.attn1", r"blocks\.1\.", using.BLOCKS):
        alone = model_of("Wan")
        use(alone, layout_of(VIDEO), layers=chosen)
        expected[chosen] = output("Wan", alone)
    for chosen, sparse in expected.items():
        model.set_attn_processor(shared)
        with use(model, layout_of(VIDEO), layers=chosen) as used:
            assert torch.equal(output("Wan", model), sparse)
            used.is_dense = True
            assert torch.equal(output("Wan", model), output("Wan", model_of("Wan")))
    assert torch.equal(output("Wan", model), output("Wan", model_of("Wan")))


def test_a_layout_after_a_hook_replaces_the_one_before() -> None:
    """Hooks of diffusers call the forward that they replaced, which has a former layout."""
    from diffusers.hooks import HookRegistry, ModelHook

    class Passing(ModelHook):
        def new_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            return self.fn_ref.original_forward(*args, **kwargs)

    model, other = model_of("Wan"), model_of("Wan")
    use(model, layout_of(VIDEO))
    for block in model.blocks:
        HookRegistry.check_if_exists_or_initialize(block.attn1).register_hook(Passing(), "passing")
    again = use(model, masks.local(72, window=8))
    use(other, masks.local(72, window=8))
    assert torch.equal(output("Wan", model), output("Wan", other))
    again.remove()
    assert torch.equal(output("Wan", model), output("Wan", model_of("Wan")))


@pytest.mark.parametrize("name", ["Wan", "SD3"])
@pytest.mark.parametrize("is_before", [True, False])
def test_hooks_keep_the_layout(name: str, is_before: bool) -> None:
    """Regression: those of caches removed it with themselves if they were there before it, and could not skip a layer.

    is_before  whether they are
    """
    from diffusers.hooks import HookRegistry, ModelHook

    class Caching(ModelHook):
        kept = None

        def new_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            self.kept = self.fn_ref.original_forward(*args, **kwargs) if self.kept is None else self.kept
            return self.kept

    model, plain = model_of(name), model_of(name)
    use(plain, layout_of(MODELS[name].grid))
    used = None if is_before else use(model, layout_of(MODELS[name].grid))
    hooked = [module for module in model.modules() if getattr(module, "processor", None) is not None]
    for module in hooked:
        HookRegistry.check_if_exists_or_initialize(module).register_hook(Caching(), "caching")
    used = used or use(model, layout_of(MODELS[name].grid))
    sparse = output(name, plain)
    # the second has the results that the first kept
    assert torch.equal(output(name, model), sparse) and torch.equal(output(name, model), sparse)
    HookRegistry.check_if_exists_or_initialize(model).remove_hook("caching", recurse=True)
    assert torch.equal(output(name, model), sparse)
    used.remove()
    assert torch.equal(output(name, model), output(name, model_of(name)))


@pytest.mark.parametrize("name", ["PixArt", "Qwen-Image"])
@pytest.mark.parametrize("is_before", [True, False])
def test_perturbed_attention_guidance(name: str, is_before: bool) -> None:
    """Regression: layers with a layout ignored that each query takes its own value alone."""
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    model, plain = model_of(name), model_of(name)
    if not is_before:
        use(model, layout_of(MODELS[name].grid))
    for each in (model, plain):
        apply_layer_skip(each, LayerSkipConfig([0, 1], skip_attention=False, skip_attention_scores=True, skip_ff=False))
    if is_before:
        use(model, layout_of(MODELS[name].grid))
    assert torch.equal(output(name, model), output(name, plain))
    assert not torch.equal(output(name, model), output(name, model_of(name)))


def test_images_of_an_ip_adapter_are_no_text() -> None:
    """Regression: the tuple of text and images that cross-attention gets had no shape."""
    from diffusers.models.attention_processor import Attention, IPAdapterAttnProcessor2_0

    torch.manual_seed(0)
    layer = Attention(32, cross_attention_dim=24, heads=2, dim_head=16)
    layer.set_processor(IPAdapterAttnProcessor2_0(32, 24, num_tokens=(4,)))
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([layer])})
    hidden, text, images = torch.randn(2, 64, 32), torch.randn(2, 7, 24), [torch.randn(2, 1, 4, 24)]
    expected = layer(hidden, (text, images))
    with use(model, masks.local(64, window=8), layers="^blocks"):
        assert torch.equal(layer(hidden, (text, images)), expected)


def test_own_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cross-attention keeps the backend that a processor had; `remove` restores it."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    own, calls = AttentionBackendName._NATIVE_MATH, []
    attend = _AttentionBackendRegistry._backends[own]
    monkeypatch.setitem(
        _AttentionBackendRegistry._backends, own, lambda **call: (calls.append(call), attend(**call))[1]
    )
    model = model_of("Wan")
    for block in model.blocks:
        block.attn1.processor._attention_backend = block.attn2.processor._attention_backend = own
    with use(model, layout_of(VIDEO)):
        output("Wan", model)
        assert model.blocks[0].attn1.processor._attention_backend == dispatching.BACKEND_NAME
    assert [call["key"].shape[1] for call in calls] == [N_TEXT] * 2
    assert model.blocks[0].attn1.processor._attention_backend == own


@pytest.mark.parametrize(
    "name",
    [pytest.param("Wan", marks=pytest.mark.thorough), "Flux", pytest.param("HunyuanVideo", marks=pytest.mark.thorough)],
)
def test_compile(name: str) -> None:
    """Blocks compile without graph breaks, once for dense steps and once for others."""
    case, order = MODELS[name], order_of(MODELS[name].grid)
    model = model_of(name)
    used = use(model, layout_of(case.grid, order), order=order)
    plain = output(name, model)
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(output(name, model), plain, rtol=1e-4, atol=1e-4)
    used.is_dense = True
    torch.testing.assert_close(output(name, model), output(name, model_of(name)), rtol=1e-4, atol=1e-4)


# ---- errors


WRONG_USES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "model": (lambda: use("pipe"), TypeError, "pipe_or_model must be a pipeline"),
    "layout": (lambda: use(model_of("Wan"), "local"), TypeError, "layout must be a BlockLayout, top_blocks"),
    "not square": (lambda: use(model_of("Wan"), masks.local((32, 64), window=8)), ValueError, "layout must be square"),
    "no order": (lambda: use(model_of("Wan"), top_p(0.5)), ValueError, "order is required with a layout"),
    "dense layers of others": (
        lambda: use(model_of("Wan"), dense_layers="^single"),
        ValueError,
        "dense_layers must match attention modules of WanTransformer3DModel",
    ),
    "dense layers": (lambda: use(model_of("Wan"), dense_layers="."), ValueError, "dense_layers must leave some"),
    "no pattern": (lambda: use(model_of("Wan"), layers=3), TypeError, "layers must be a regular expression, a str"),
    "bad pattern": (lambda: use(model_of("Wan"), layers="("), ValueError, r"layers must be a regular expression, got"),
    "float block size": (lambda: top_blocks(0.5, block_size=64.0), ValueError, "block_size must be 16"),
    "order": (lambda: use(model_of("Wan"), order=[0, 1]), TypeError, "order must be an int64 tensor"),
    "repeated": (lambda: use(model_of("Wan"), order=torch.zeros(3, dtype=torch.int64)), ValueError, "from 0 to 2 once"),
    "order of others": (
        lambda: use(model_of("Wan"), layout_of(VIDEO), order=order_of(IMAGE)),
        ValueError,
        "order must have the 72 tokens of the layout, got 48",
    ),
    "text": (lambda: use(model_of("Wan"), text="end"), ValueError, 'text must be "first", "last" or None'),
    "text of Flux": (lambda: use(model_of("Flux"), text="last"), ValueError, "text must be 'first' or None for Flux"),
    "layers": (lambda: use(model_of("Wan"), layers="attn3"), ValueError, "got 'attn3': it has blocks.0.attn1, "),
    "dense_steps": (lambda: use(pipeline_of("Wan"), dense_steps=-1), ValueError, "dense_steps must be an int of 0"),
    "no scheduler": (
        lambda: use(model_of("Wan"), dense_steps=1),
        ValueError,
        "got WanTransformer3DModel: set is_dense",
    ),
    "backend": (lambda: use(model_of("Wan"), backend="gpu"), ValueError, "backend must be one of"),
    "density": (lambda: top_blocks(0.0), ValueError, "density must be above 0 and at most 1"),
    "density type": (lambda: top_blocks("half"), TypeError, "density must be a number"),
    "p": (lambda: top_p(1.1), ValueError, "p must be above 0 and at most 1"),
    "block_size": (lambda: top_p(0.5, block_size=48), ValueError, "block_size must be 16, 32, 64, 128 or 256"),
}


@pytest.mark.parametrize("case", WRONG_USES)
def test_wrong_uses(case: str) -> None:
    call, error, message = WRONG_USES[case]
    with pytest.raises(error, match=message.replace("(", r"\(")):
        call()


def direct(**options: Any) -> None:
    """One layer, called with options of attention that its model would pass."""
    model = model_of("Wan")
    call = using._Call(using._Layer("blocks.0.attn1", use(model, layout_of(VIDEO)), None), None, None, None)
    q = torch.zeros(1, 2, 72, 16)
    call.attend(q, q, q, **options)


def run(
    name: str, layout: BlockLayout | None = None, change: Callable[[Any], Any] = lambda model: None, **options: Any
) -> None:
    model = model_of(name)
    use(model, layout, **options)
    change(model)
    output(name, model)


def other_backend(model: Any) -> None:
    for block in model.blocks:
        block.attn1.processor._attention_backend = None


def context_parallel(model: Any) -> None:
    model.blocks[0].attn1.processor._parallel_config = object()


WRONG_CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "too short": (
        lambda: run("Wan", masks.local(80, window=8)),
        "blocks.0.attn1 attends to 72 tokens, but the layout is for 80",
    ),
    "too long": (lambda: run("Wan", masks.local(64, window=8)), "72 tokens, 8 more than the 64 of the layout"),
    "a smaller grid beside text": (
        lambda: run("Flux", masks.local(32, window=8)),
        r"attn has 48 tokens beside the text, but the layout is for 32",
    ),
    "scores": (lambda: direct(attn_mask=torch.zeros(72, 72)), "attn_mask must be bool or None, got torch.float32"),
    "pairs": (lambda: direct(attn_mask=torch.eye(72) > 0), "attn_mask must be one of padded keys"),
    "dropout": (lambda: direct(dropout_p=0.5), "dropout_p must be 0.0, got 0.5"),
    "causal": (lambda: direct(is_causal=True), "is_causal must be False, got True"),
    "text alone": (
        lambda: run("Lumina2", layout_of(IMAGE)),
        "context_refiner.0.attn attends to 7 tokens, but the layout is for 48",
    ),
    "no layout from a function": (
        lambda: run("Wan", lambda q, k: None, order=torch.arange(72)),
        "layout must be a function that returns a BlockLayout, got NoneType",
    ),
    "no self-attention": (
        lambda: run("Wan", layers="attn2"),
        "none of the chosen layers of WanTransformer3DModel has self-attention, such as blocks.0.attn2",
    ),
    "other backend": (lambda: run("Wan", change=other_backend), "did not call attention: it has another"),
    "context parallelism": (lambda: run("Wan", change=context_parallel), "parallel_config must be None"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_calls(case: str) -> None:
    call, message = WRONG_CALLS[case]
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        call()


def test_masks_of_image_tokens() -> None:
    """A mask may drop only keys at the end."""
    is_key = torch.ones(1, 1, 1, 72, dtype=torch.bool)
    is_key[..., 5] = False
    with pytest.raises(ValueError, match="attn_mask must mask only text, at its end"):
        direct(attn_mask=is_key)
    direct(attn_mask=torch.ones(72, 72, dtype=torch.bool))


def test_unknown_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    # diffusers imports the registry with the model
    model = model_of("Wan")
    dispatching._backend.cache_clear()
    monkeypatch.delattr("diffusers.models.attention_dispatch._AttentionBackendRegistry")
    with pytest.raises(ImportError, match=r"was tested with diffusers 0\.36 to 0\.42"):
        use(model)
    monkeypatch.undo()
    dispatching._backend.cache_clear()
    use(model)


def test_a_copy_has_a_layout_of_its_own() -> None:
    model = model_of("Wan")
    use(model, layout_of(VIDEO))
    sparse = output("Wan", model)
    other = copy.deepcopy(model)
    again = use(other, masks.local(72, window=8))
    assert torch.equal(output("Wan", model), sparse)
    assert not torch.equal(output("Wan", other), sparse)
    again.remove()
    assert torch.equal(output("Wan", other), output("Wan", model_of("Wan")))
    assert torch.equal(output("Wan", model), sparse)


def test_a_model_trains_after_a_forward_in_inference_mode() -> None:
    """Regression: it kept the order that was made there."""
    model = model_of("Wan")
    use(model, layout_of(VIDEO, order_of(VIDEO)), order=order_of(VIDEO))
    with torch.inference_mode():
        expected = output("Wan", model)
    found = model(**inputs_of("Wan"), return_dict=False)[0]
    found.sum().backward()
    assert torch.equal(found, expected)


def test_prompts_of_many_lengths_keep_a_bounded_number_of_layouts() -> None:
    model = model_of("Flux")
    used = use(model, layout_of(IMAGE))
    inputs = inputs_of("Flux")
    expected = output("Flux", model)
    prompt = inputs["encoder_hidden_states"].repeat(1, 8, 1)
    with torch.no_grad():
        for n_text in range(1, 41):
            inputs |= {"encoder_hidden_states": prompt[:, :n_text], "txt_ids": torch.zeros(n_text, 3)}
            model(**inputs)
    assert len(used._sequences) == using._MAX_SEQUENCES
    assert torch.equal(output("Flux", model), expected)


def test_a_model_with_a_layout_cannot_be_pickled() -> None:
    model = model_of("Wan")
    used = use(model, layout_of(VIDEO))
    with pytest.raises(ValueError, match=r"must have its own attention to be pickled.*call remove\(\)"):
        pickle.dumps(model)
    used.remove()
    assert torch.equal(output("Wan", pickle.loads(pickle.dumps(model))), output("Wan", model))


def test_an_order_is_copied() -> None:
    order = order_of(VIDEO)
    changed, other = model_of("Wan"), model_of("Wan")
    for model in (changed, other):
        use(model, layout_of(VIDEO, order_of(VIDEO)), order=order if model is changed else order_of(VIDEO))
    order.copy_(torch.arange(72))
    assert torch.equal(output("Wan", changed), output("Wan", other))


@pytest.mark.parametrize("choice", [top_blocks(0.5, block_size=16), top_p(0.5, block_size=16)])
def test_blocks_with_a_choice_compile_with_a_graph_break(choice: Any) -> None:
    model, was_traced = model_of("Wan"), []

    def chosen(q: Tensor, k: Tensor) -> BlockLayout:
        was_traced.append(torch.compiler.is_compiling())
        return choice(q, k)

    use(model, chosen, order=order_of(VIDEO))
    expected = output("Wan", model)
    model.compile_repeated_blocks(backend="aot_eager")
    torch.testing.assert_close(output("Wan", model), expected, rtol=1e-4, atol=1e-5)
    assert was_traced and not any(was_traced)
