"""nn.MultiheadAttention and TransformerEncoderLayer against those of torch.nn with the layout as a dense mask."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.nn import MultiheadAttention, TransformerEncoderLayer

LENGTH = 96
LAYOUT = masks.local(LENGTH, window=20, block_size=32) | masks.global_tokens(LENGTH, tokens=3, block_size=32)
# torch's masks are True where nothing attends
DENSE = ~LAYOUT.to_dense()[0, 0]


def pair(**options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """torch's module, and ours with LAYOUT and the same float64 weights."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(24, 3, dtype=torch.float64, **options)
    ours = MultiheadAttention(24, 3, dtype=torch.float64, layout=LAYOUT, **options)
    for parameter in theirs.parameters():
        # initial biases are zero, which would hide a wrong one
        nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(features: tuple[int, int, int] = (24, 24, 24), batch_first: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, LENGTH, size) if batch_first else (LENGTH, 2, size) for size in features]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def results(module: nn.Module, tensors: list[Tensor], **call: Any) -> list[Tensor]:
    """The output and every gradient."""
    out = module(*tensors, **call)[0]
    weights = list(module.parameters())
    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    return [out, *torch.autograd.grad((out * factors).sum(), [*tensors, *weights])]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_first": True},
        {"batch_first": False},
        {"batch_first": True, "bias": False},
        {"batch_first": True, "kdim": 10, "vdim": 14},
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_torch(options: dict[str, Any]) -> None:
    theirs, ours = pair(**options)
    tensors = inputs((24, options.get("kdim", 24), options.get("vdim", 24)), options["batch_first"])
    expected = results(theirs, tensors, attn_mask=DENSE, need_weights=False)
    for actual, wanted in zip(results(ours, tensors), expected, strict=True):
        torch.testing.assert_close(actual, wanted)
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("axes", [(), (2 * 3,)], ids=["shared", "per head"])
def test_a_float_mask_is_added_to_the_scores(axes: tuple[int, ...]) -> None:
    theirs, ours = pair(batch_first=True)
    added = torch.randn(*axes, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    masked = added.masked_fill(DENSE, -torch.inf)
    expected = results(theirs, inputs(), attn_mask=masked, need_weights=False)
    for actual, wanted in zip(results(ours, inputs(), attn_mask=added), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_masks_of_an_encoder_are_added_to_the_scores() -> None:
    """Torch's encoder makes float masks of bool ones."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"batch_first": True, "dropout": 0.0, "dtype": torch.float64}
    layers = [kind(24, 3, 32, **options) for kind in (nn.TransformerEncoderLayer, TransformerEncoderLayer)]
    layers[1].load_state_dict(layers[0].state_dict())
    outs = [nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)(X.double(), mask=DENSE) for layer in layers]
    torch.testing.assert_close(*outs)


def test_sequences_without_a_batch() -> None:
    theirs, ours = pair()
    tensors = [t[0].detach().requires_grad_() for t in inputs()]
    for actual, wanted in zip(results(ours, tensors), results(theirs, tensors, attn_mask=DENSE), strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("kind", ["bool", "float", "kv_lengths"])
def test_padding(kind: str) -> None:
    theirs, ours = pair(batch_first=True)
    tensors, lengths = inputs(), torch.tensor([LENGTH, 50])
    padding = torch.arange(LENGTH) >= lengths[:, None]
    # global tokens are never padding, so no row is empty, for which torch gives nan
    expected = theirs(*tensors, attn_mask=DENSE, key_padding_mask=padding, need_weights=False)[0]
    if kind == "kv_lengths":
        actual = ours(*tensors, kv_lengths=lengths)[0]
    else:
        mask = padding if kind == "bool" else torch.zeros(2, LENGTH).masked_fill(padding, -torch.inf)
        actual = ours(*tensors, key_padding_mask=mask)[0]
    torch.testing.assert_close(actual, expected)


def test_causal_by_construction_and_by_call() -> None:
    theirs, ours = pair(batch_first=True)
    tensors = inputs()
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    expected = theirs(*tensors, attn_mask=DENSE | future, need_weights=False)[0]
    torch.testing.assert_close(ours(*tensors, is_causal=True)[0], expected)
    torch.testing.assert_close(ours(*tensors, attn_mask=future, is_causal=True)[0], expected)
    ours.causal = True
    torch.testing.assert_close(ours(*tensors)[0], expected)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_encoders_of_torch_never_pass_the_layout_by(training: bool, norm_first: bool) -> None:
    """In eval mode torch may run whole layers on a fused path that bypasses their attention."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"batch_first": True, "dropout": 0.0, "norm_first": norm_first, "dtype": torch.float64}
    theirs = nn.TransformerEncoderLayer(24, 4, 32, **options)
    ours = TransformerEncoderLayer(24, 4, 32, layout=LAYOUT, **options)
    ours.load_state_dict(theirs.state_dict())
    stacks = [nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training) for layer in (theirs, ours)]
    x, padding = inputs()[0].detach(), torch.arange(LENGTH) >= torch.tensor([[LENGTH], [50]])
    with torch.no_grad():
        for mask in (None, padding):
            expected = stacks[0](x, mask=DENSE, src_key_padding_mask=mask)
            is_token = torch.ones_like(padding) if mask is None else ~mask
            torch.testing.assert_close(stacks[1](x, src_key_padding_mask=mask)[is_token], expected[is_token])
    with pytest.warns(UserWarning, match="enable_nested_tensor is True, but"):
        nn.TransformerEncoder(ours, 1)


def test_layouts_move_along_and_are_no_weights() -> None:
    ours = MultiheadAttention(24, 3, layout=LAYOUT)
    assert not any("layout" in name for name in ours.state_dict())
    assert copy.deepcopy(ours).layout == LAYOUT and ours.double().layout == LAYOUT
    by_length = MultiheadAttention(24, 3, batch_first=True, layout=lambda n: masks.local(n, window=4, block_size=16))
    x = torch.randn(1, 40, 24)
    fixed = MultiheadAttention(24, 3, batch_first=True, layout=masks.local(40, window=4, block_size=16))
    fixed.load_state_dict(by_length.state_dict())
    assert torch.equal(by_length(x, x, x)[0], fixed(x, x, x)[0])


def test_dropout_only_while_training() -> None:
    ours = MultiheadAttention(24, 3, dropout=0.5, batch_first=True, layout=LAYOUT)
    x = torch.randn(1, LENGTH, 24)
    assert not torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


def test_it_compiles_into_one_graph() -> None:
    ours = MultiheadAttention(24, 3, batch_first=True, layout=LAYOUT).eval()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x, lengths = torch.randn(2, LENGTH, 24), torch.tensor([LENGTH, 7])
    torch.testing.assert_close(compiled(x, x, x)[0], ours(x, x, x)[0])
    torch.testing.assert_close(compiled(x, x, x, kv_lengths=lengths)[0], ours(x, x, x, kv_lengths=lengths)[0])


@pytest.mark.parametrize(
    ("batch_first", "message"),
    [
        (False, r"looks like \(batch, length, embed_dim\); give batch_first=True to the constructor"),
        (True, r"looks like \(length, batch, embed_dim\); use transpose\(0, 1\), or batch_first=False"),
    ],
)
def test_inputs_in_the_other_order_are_refused(batch_first: bool, message: str) -> None:
    attend = MultiheadAttention(24, 4, layout=LAYOUT, batch_first=batch_first)
    layer = TransformerEncoderLayer(24, 4, layout=LAYOUT, batch_first=batch_first)
    x = torch.randn(2, LENGTH, 24) if not batch_first else torch.randn(LENGTH, 2, 24)
    for call in (lambda: attend(x, x, x), lambda: layer(x)):
        with pytest.raises(
            ValueError, match=f"{LENGTH} queries, but the input has a batch of {LENGTH}.*: it {message}"
        ):
            call()


def test_a_specification_is_a_layout() -> None:
    x = torch.randn(2, LENGTH, 24)
    for kind in (MultiheadAttention, TransformerEncoderLayer):
        made = []
        for layout in ("local(window=9)", masks.local(LENGTH, window=9)):
            torch.manual_seed(0)
            made.append(kind(24, 4, layout=layout, batch_first=True).eval())
        outs = [module(x, x, x)[0] if kind is MultiheadAttention else module(x) for module in made]
        assert torch.equal(*outs)


X = torch.zeros(2, LENGTH, 24)
GAPS = torch.zeros(2, LENGTH, dtype=torch.bool).index_fill_(1, torch.tensor([3]), True)
WRONG_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"need_weights": True}, "need_weights must be False"),
    ({"attn_mask": DENSE}, "attn_mask must be None or float, .*from_dense"),
    ({"attn_mask": torch.zeros(1, 1)}, r"attn_mask must have shape \(96, 96\) or \(6, 96, 96\).*got \(1, 1\)"),
    ({"key_padding_mask": GAPS}, "True for the last keys of a sequence only"),
    ({"key_padding_mask": GAPS.float()}, "must be bool, or float with 0 and -inf only"),
    ({"key_padding_mask": torch.zeros(2, LENGTH, dtype=torch.long)}, "must be bool, or float .*got torch.int64"),
    ({"key": X[..., 1:]}, r"key must have 24 features per token, got shape \(2, 96, 23\)"),
    ({"key_padding_mask": GAPS[:1]}, r"shape \(batch=2, kv_len=96\), got \(1, 96\)"),
    ({"key_padding_mask": ~GAPS[:, :1].expand(2, LENGTH), "kv_lengths": torch.ones(2, dtype=torch.int64)}, "give one"),
    ({"value": X[0]}, r"must all have 3 axes \(2 without a batch\)"),
]


def test_is_causal_is_a_bool() -> None:
    with pytest.raises(TypeError, match="is_causal must be True or False"):
        MultiheadAttention(24, 3, batch_first=True, causal=True)(X, X, X, attn_mask=torch.zeros(96, 96), is_causal="no")


@pytest.mark.parametrize(("change", "message"), WRONG_CALLS)
def test_wrong_calls_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    module = MultiheadAttention(24, 3, batch_first=True, layout=LAYOUT)
    call = {"query": X, "key": X, "value": X}
    module(**call)
    with pytest.raises(ValueError, match=message):
        module(**(call | change))


@pytest.mark.parametrize("name", ["add_bias_kv", "add_zero_attn"])
def test_keys_that_no_layout_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be False, got True"):
        MultiheadAttention(24, 3, **{name: True})
    with pytest.raises(TypeError, match="layout must be a BlockLayout"):
        MultiheadAttention(24, 3, layout=128)


def test_layouts_of_other_lengths_are_refused() -> None:
    module = MultiheadAttention(
        24, 3, batch_first=True, layout=BlockLayout.from_blocks([0], [0], 32, 32, block_size=32)
    )
    with pytest.raises(ValueError, match="layout describes 32 queries x 32 keys, but q has 96"):
        module(X, X, X)


def nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        # nested tensors that are not jagged will change
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(n, 24) for n in (3, 7)], layout=layout)


def test_padding_of_fake_and_meta_tensors_is_not_read() -> None:
    layer = MultiheadAttention(24, 3, batch_first=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, padding = mode.from_tensor(X), torch.zeros(X.shape[:2], dtype=torch.bool)
        assert layer(x, x, x, key_padding_mask=padding)[0].shape == X.shape
    x = X.to("meta")
    padding = torch.zeros(X.shape[:2], dtype=torch.bool, device="meta")
    assert layer.to("meta")(x, x, x, key_padding_mask=padding)[0].shape == X.shape


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MultiheadAttention(24, 3, dropout=1.0), ValueError, "dropout must be at least 0 and below 1, got 1.0"),
        (lambda: MultiheadAttention(24, 3, causal="no"), TypeError, "causal must be True or False"),
        (lambda: MultiheadAttention(24, 5), ValueError, "embed_dim must be a multiple of num_heads=5, got 24"),
        (lambda: MultiheadAttention(24, 0), ValueError, "num_heads must be 1 or more, got 0"),
        (lambda: MultiheadAttention(24, 3, kdim=1.5), TypeError, "kdim must be an int, got 1.5"),
        (lambda: MultiheadAttention(24, 3, 0.0, True, False, False, 8, 0), ValueError, "vdim must be 1 or more, got 0"),
        (lambda: TransformerEncoderLayer(24, 5), ValueError, "d_model must be a multiple of nhead=5, got 24"),
        (lambda: TransformerEncoderLayer(d_model=24, nhead=5), ValueError, "d_model must be a multiple of nhead=5"),
        (lambda: MultiheadAttention(24, 3)(X.long(), X, X), ValueError, "query must be floating point, .* torch.int64"),
        (
            lambda: MultiheadAttention(24, 3)(X, X.to_sparse(), X),
            ValueError,
            "key must be a dense tensor, got a torch.sparse_coo one",
        ),
        (
            lambda: MultiheadAttention(24, 3, batch_first=True)(*[nested(torch.strided)] * 3),
            ValueError,
            "query must be a dense tensor or .* of layout torch.jagged, got layout torch.strided",
        ),
        (
            lambda: MultiheadAttention(24, 3)(*[nested(torch.jagged)] * 3),
            ValueError,
            "query is a nested tensor, which needs batch_first=True in the constructor",
        ),
        (
            lambda: MultiheadAttention(24, 3, batch_first=True, layout="local(window=3)")(*[nested(torch.jagged)] * 3),
            ValueError,
            "the layer's layout must be None for a nested query",
        ),
        (
            lambda: MultiheadAttention(24, 3, batch_first=True)(
                *[nested(torch.jagged)] * 3, key_padding_mask=torch.zeros(2, 7, dtype=torch.bool)
            ),
            ValueError,
            "key_padding_mask must be None for a nested query",
        ),
        (
            lambda: MultiheadAttention(24, 3, batch_first=True)(
                *[nested(torch.jagged)] * 3, attn_mask=torch.zeros(7, 7)
            ),
            ValueError,
            "attn_mask must be None for a nested query",
        ),
        (lambda: MultiheadAttention(24, 3)(X, None, X), TypeError, "key must be a torch.Tensor, got NoneType"),
        (
            lambda: MultiheadAttention(24, 3)(X, X, X, key_padding_mask=[0]),
            TypeError,
            "key_padding_mask must be a tensor",
        ),
    ],
)
def test_what_is_no_argument_is_refused_by_name(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("sizes", [{}, {"kdim": 8}])
def test_weights_are_reset_as_by_torch(sizes: dict[str, int]) -> None:
    ours, theirs = MultiheadAttention(16, 2, **sizes), nn.MultiheadAttention(16, 2, **sizes)
    # torch keeps the weights of out_proj
    ours.load_state_dict(theirs.state_dict())
    for module in (ours, theirs):
        torch.manual_seed(0)
        module._reset_parameters()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    ours(torch.zeros(3, 1, 16), *[torch.zeros(3, 1, sizes.get("kdim", 16)), torch.zeros(3, 1, 16)])


@pytest.mark.parametrize("call", [((16, 2, 32, "0.1"), {}), ((16, 2), {"dropout": None})])
def test_a_dropout_that_is_no_number_is_refused_by_name(call: tuple[Any, Any]) -> None:
    with pytest.raises(TypeError, match="dropout must be a number"):
        TransformerEncoderLayer(*call[0], **call[1])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ((1, 4, 16), (1, 4, 16), "key must have the batch of query, 3, got 1"),
        ((3, 4, 16), (2, 4, 16), "value must have the batch of query, 3, got 2"),
        ((3, 4, 16), (3, 5, 16), "value must have as many tokens as key, 4, got 5"),
    ],
)
def test_keys_and_values_of_other_sizes_are_refused(key: tuple[int, ...], value: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(16, 2, batch_first=True)(torch.zeros(3, 4, 16), torch.zeros(key), torch.zeros(value))
