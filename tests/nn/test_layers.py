"""nn.SelfAttention, encoders and positions against the same layers written head by head."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout, attention
from blocksparse_flash.nn import (
    Encoder,
    EncoderBlock,
    LayoutByLength,
    LearnedPositions,
    RotaryTable,
    SelfAttention,
    alibi_slopes,
    rotary_table,
)

LENGTH = 80


def window(length: int) -> BlockLayout:
    return BlockLayout.from_predicate(lambda q, k: (q - k).abs() < 20, length, length, block_size=16)


def module(**changes: Any) -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention(**{"embed_dim": 32, "num_heads": 4, "layout": window(LENGTH), **changes})


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(1))


def spelled_out(self: SelfAttention, x: Tensor, layout: BlockLayout | None) -> Tensor:
    """The same layer, written head by head."""
    width, group = self.head_dim, self.num_heads // self.kv_heads
    projected = x @ self.qkv.weight.T
    heads = [projected[..., i * width : (i + 1) * width] for i in range(self.num_heads + 2 * self.kv_heads)]
    outs = []
    for head in range(self.num_heads):
        kv_head = self.num_heads + head // group
        q, k, v = heads[head], heads[kv_head], heads[kv_head + self.kv_heads]
        if self.rope is not None:
            q, k = (torch.stack([rotated(t[:, p], p, self.rope) for p in range(x.shape[1])], dim=1) for t in (q, k))
        scores = q @ k.transpose(1, 2) / math.sqrt(width)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.alibi:
            index = torch.arange(x.shape[1])
            slopes = published_slopes(self.num_heads) if self.alibi is True else self.alibi
            scores = scores - slopes[head] * (index[:, None] - index).abs()
        attends = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool) if layout is None else layout.to_dense()[0, 0]
        if self.causal:
            attends = attends.tril()
        weights = scores.masked_fill(~attends, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if self.sinks is not None:
            total = total + self.sinks[head].exp()
        outs.append(weights / total @ v)
    return torch.cat(outs, dim=-1) @ self.out.weight.T


def published_slopes(heads: int) -> list[float]:
    """Section 3: a geometric sequence that starts at 2**(-8 / n), which is its ratio too. Of other numbers their code
    says: those of the power of two below, then of the next power of two the first, the third, the fifth, ..."""
    power = 2 ** math.floor(math.log2(heads))
    slopes, others = ([(2 ** (-8 / n)) ** place for place in range(1, n + 1)] for n in (power, 2 * power))
    return [*slopes, *others[::2]][:heads]


def rotated(features: Tensor, position: float, base: float) -> Tensor:
    """Features d and d + half form a complex number, rotated by position * base ** (-d / half)."""
    half = features.shape[-1] // 2
    angles = position * base ** (-torch.arange(half) / half)
    turned = torch.complex(features[..., :half], features[..., half:]) * torch.polar(torch.ones(half), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"layout": None}, {"kv_heads": 2}, {"kv_heads": 1, "rope": 100.0}, {"causal": True}, {"rope": 10_000.0}),
        {"rope": 100.0, "head_dim": 2},
    ],
    ids=str,
)
def test_output_is_that_of_the_layer_spelled_out(changes: dict[str, Any]) -> None:
    layer, x = module(**changes), tokens()
    torch.testing.assert_close(layer(x), spelled_out(layer, x, changes.get("layout", window(LENGTH))))


# ---- what is done to scores ----

OPTIONS = [
    {"sinks": True},
    {"softcap": 0.4},
    {"alibi": True},
    {"alibi": True, "num_heads": 6, "embed_dim": 36, "causal": True},
    {"sinks": True, "softcap": 2, "alibi": True, "kv_heads": 2, "rope": 100.0, "causal": True},
    {"sinks": True, "alibi": True, "layout": None},
    {"alibi": [1.0, 0.5, 0, -0.25], "rope": 100.0},
]


@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_scores_are_changed_as_spelled_out_and_all_learn(changes: dict[str, Any]) -> None:
    """In float64: the output, and the gradients of x and of every weight, the sinks among them."""
    layer = module(**changes).double()
    if layer.sinks is not None:
        torch.nn.init.normal_(layer.sinks)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, LENGTH, layer.embed_dim, generator=draw, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(x.shape, generator=draw, dtype=torch.float64)
    names, leaves = zip(("x", x), *layer.named_parameters(), strict=True)
    results = [
        (out, *torch.autograd.grad(out, leaves, dout))
        for out in (layer(x), spelled_out(layer, x, changes.get("layout", window(LENGTH))))
    ]
    assert ("sinks" in names) == changes.get("sinks", False)
    for name, actual, expected in zip(("out", *names), *results, strict=True):
        assert actual.abs().sum() > 0
        torch.testing.assert_close(actual, expected, msg=lambda said, name=name: f"{name}: {said}")


def test_sinks_start_as_one_more_in_the_denominator() -> None:
    layer, x = module(sinks=True, layout=None), tokens()
    assert layer.sinks is not None and not layer.sinks.any()
    assert set(layer.state_dict()) == {"qkv.weight", "out.weight", "sinks"}
    q, k, v = layer.project(x)
    weights = (q @ k.mT / math.sqrt(8)).exp()
    torch.testing.assert_close(layer.attend(q, k, v), weights / (1 + weights.sum(-1, keepdim=True)) @ v)
    layer(x).square().sum().backward()
    assert layer.sinks.grad is not None and (layer.sinks.grad != 0).all()
    assert module().sinks is None


@pytest.mark.parametrize("heads", [*range(1, 18), 24, 40, 64])
def test_slopes_are_the_published_ones(heads: int) -> None:
    torch.testing.assert_close(alibi_slopes(heads), torch.tensor(published_slopes(heads)), rtol=1e-6, atol=0)


def test_slopes_are_no_weights_and_stay_as_they_are() -> None:
    """The slopes of 6 heads are not representable in half types."""
    layer = module(alibi=True, num_heads=6, embed_dim=36)
    assert set(layer.state_dict()) == {"qkv.weight", "out.weight"}
    with torch.device("meta"):
        empty = module(alibi=True, num_heads=6, embed_dim=36)
    for moved in (layer.bfloat16().float(), layer.bfloat16(), copy.deepcopy(layer), empty.to_empty(device="cpu")):
        assert moved.alibi_slopes is not None and torch.equal(moved.alibi_slopes, alibi_slopes(6))
    with torch.device("meta"):
        empty = module(alibi=True)
    empty.load_state_dict(module().state_dict(), assign=True)
    assert torch.equal(empty(tokens()), module(alibi=True)(tokens()))
    layer = module(alibi=(1, 0.3, 0.1, 0.0)).bfloat16()
    assert torch.equal(layer.alibi_slopes, torch.tensor([1, 0.3, 0.1, 0.0])) and layer.alibi_slopes.is_cpu
    assert "alibi=(1.0, 0.3, 0.1, 0.0)" in repr(layer)


def test_a_module_that_changes_scores_compiles_and_is_copied() -> None:
    layer, x = module(sinks=True, softcap=2.0, alibi=True, causal=True), tokens()
    torch.nn.init.normal_(layer.sinks)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert "sinks=True, softcap=2.0, alibi=True" in repr(layer)
    assert "sinks=False, softcap=None, alibi=False" in repr(module())


def test_rotary_scores_depend_on_distances_only() -> None:
    layer = module(layout=None, rope=50.0, num_heads=1)
    x = tokens(1, 1).expand(1, 30, 32)
    projected = (x @ layer.qkv.weight.T)[0, 0]
    q, k = projected[:32], projected[32:64]
    far = rotated(q, 17, 50.0) @ rotated(k, 12, 50.0)
    near = rotated(q, 5, 50.0) @ rotated(k, 0, 50.0)
    torch.testing.assert_close(far, near)


def test_positions_may_have_any_unit_and_several_axes() -> None:
    """Half of the pairs rotate by the row, half by the column, each as if it were the whole head."""
    layer, x = module(layout=None, rope=50.0, num_heads=1, embed_dim=32), tokens(1, 6)
    places = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.5, 2.0], [7.0, -3.0], [1.0, 1.0], [4.0, 0.0]])
    heads = (x @ layer.qkv.weight.T)[0].split(32, dim=-1)
    turned = [torch.empty_like(head) for head in heads[:2]]
    for head, out in zip(heads[:2], turned, strict=True):
        for token in range(6):
            for axis in range(2):
                # pairs 0 .. 7 and 8 .. 15 of 16: feature d is paired with feature d + 16
                part = [*range(8 * axis, 8 * axis + 8), *range(16 + 8 * axis, 24 + 8 * axis)]
                out[token, part] = rotated(head[token, part], float(places[token, axis]), 50.0)
    weights = (turned[0] @ turned[1].T / math.sqrt(32)).softmax(-1)
    expected = weights @ heads[2] @ layer.out.weight.T
    torch.testing.assert_close(layer(x, positions=places)[0], expected)
    index = torch.arange(6)
    assert torch.equal(layer(x, positions=index), layer(x))
    # a shift of all tokens changes nothing
    torch.testing.assert_close(layer(x, positions=places + 11.0), layer(x, positions=places), atol=1e-5, rtol=1e-5)


def test_a_table_of_positions_gives_the_same_bits() -> None:
    layer, x = module(rope=50.0), tokens()
    places = torch.stack([torch.arange(LENGTH) // 8, torch.arange(LENGTH) % 8], dim=1)
    # features of a head: 8
    table = rotary_table(places, 50.0, 8)
    assert torch.equal(layer(x, positions=table), layer(x, positions=places))
    assert torch.equal(layer(x, positions=rotary_table(torch.arange(LENGTH), 50.0, 8)), layer(x))
    short = RotaryTable(table.cos[:3], table.sin[:3])
    with pytest.raises(ValueError, match=r"RotaryTable of shape \(length=80, head_dim / 2=4\), got \(3, 4\)"):
        layer(x, positions=short)
    with pytest.raises(ValueError, match="got \\(80, 2\\) and head_dim=6"):
        rotary_table(places, 50.0, 6)


def test_heads_may_be_wider_or_narrower_than_their_share() -> None:
    layer, x = module(head_dim=4, layout=None), tokens()
    assert layer.qkv.weight.shape == (3 * 4 * 4, 32)
    torch.testing.assert_close(layer(x), spelled_out(layer, x, None))


def test_padding_is_not_attended_to() -> None:
    layer, x = module(layout=None), tokens()
    lengths = torch.tensor([30, LENGTH])
    x[0, 30:] = 1e6
    torch.testing.assert_close(layer(x, kv_lengths=lengths)[0, :30], layer(x[:1, :30])[0])
    torch.testing.assert_close(layer(x, kv_lengths=lengths)[1], layer(x)[1])


def test_a_function_gives_the_layout_of_each_length() -> None:
    layer = module(layout=window)
    for length in (48, LENGTH):
        x = tokens(1, length)
        torch.testing.assert_close(layer(x), spelled_out(layer, x, window(length)))


def test_a_specification_gives_the_layout_of_each_length() -> None:
    layer = module(layout="local(window=9)")
    assert layer.layout == LayoutByLength("local(window=9)")
    assert "layout=LayoutByLength('local(window=9)')" in repr(layer)
    for length in (40, LENGTH):
        x = tokens(length=length)
        expected = spelled_out(layer, x, masks.local(length, window=9))
        torch.testing.assert_close(layer(x), expected)
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(again(x), layer(x))
    with pytest.raises(ValueError, match=r"no mask is called locl\. Did you mean local\?"):
        module(layout="locl(3)")(x)


def test_inputs_with_the_batch_second_are_refused() -> None:
    message = (
        f"layout describes {LENGTH} queries, but the input has a batch of {LENGTH} and a length of 2: it looks like "
        r"\(length, batch, embed_dim\); use x.transpose\(0, 1\)"
    )
    with pytest.raises(ValueError, match=message):
        module()(tokens().transpose(0, 1))


def test_dropout_is_for_training_and_follows_the_seed_of_torch() -> None:
    layer, x = module(dropout_p=0.5), tokens()
    torch.manual_seed(3)
    first = layer(x)
    assert not torch.equal(layer(x), first)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    layer.eval()
    assert torch.equal(layer(x), module()(x))


def test_gradients_reach_all_weights_and_the_input() -> None:
    layer, x = module(kv_heads=2, rope=100.0), tokens().requires_grad_()
    layer(x).square().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in (*layer.parameters(), x))


def test_state_dict_holds_the_weights_only() -> None:
    layer, other = module(), module(layout=window(160))
    assert set(layer.state_dict()) == {"qkv.weight", "out.weight"}
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.qkv.weight, layer.qkv.weight)


def test_copies_and_pickles_keep_the_layout() -> None:
    layer, x = module(), tokens()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for again in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert again.layout == layer.layout
        assert torch.equal(again(x), layer(x))


@pytest.mark.parametrize("causal", [False, True])
def test_the_layout_is_planned_where_the_weights_are(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    layer = module(causal=causal).to(torch.float64)
    assert isinstance(layer.layout, BlockLayout)
    # under torch.compile a layout without a plan is an error
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    layer.layout.plan("cpu", causal=causal)
    with pytest.raises(ValueError, match="layout has no plan"):
        window(LENGTH).plan("cpu", causal=causal)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_layout_moves_with_the_module() -> None:
    layer, x = module(), tokens()
    expected = layer(x)
    moved = layer.to("cuda")
    assert isinstance(moved.layout, BlockLayout)
    assert moved.layout.device.type == "cuda"
    torch.testing.assert_close(moved(x.cuda()).cpu(), expected, atol=1e-5, rtol=1e-4)


def test_modules_can_be_built_on_meta_and_filled_later() -> None:
    with torch.device("meta"):
        layer = SelfAttention(32, 4, window(LENGTH), alibi=True)
    assert layer(tokens().to("meta")).shape == tokens().shape
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict(module().state_dict())
    assert torch.equal(layer(tokens()), module(alibi=True)(tokens()))


def test_the_module_compiles_without_a_break() -> None:
    layer, x = module(rope=100.0, causal=True), tokens()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


def test_the_module_uses_what_attention_computes() -> None:
    """Grouped heads: query heads 0 and 1 read KV head 0."""
    layer, x = module(kv_heads=2), tokens()
    projected = layer.qkv(x).unflatten(-1, (8, 8)).transpose(1, 2)
    out = attention(projected[:, :4], projected[:, 4:6], projected[:, 6:], window(LENGTH))
    torch.testing.assert_close(layer(x), layer.out(out.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"embed_dim": 30},
            ValueError,
            "embed_dim must be a multiple of num_heads unless head_dim is given, got 30 and 4",
        ),
        ({"kv_heads": 3}, ValueError, "num_heads must be a multiple of kv_heads, got 4 and 3"),
        ({"kv_heads": 0}, ValueError, "kv_heads must be 1 or more, got 0"),
        ({"num_heads": 4.0}, TypeError, r"num_heads must be an int, got 4\.0"),
        ({"embed_dim": True}, TypeError, "embed_dim must be an int, got True"),
        ({"num_heads": 32, "rope": 10.0}, ValueError, "head_dim must be even, got 1"),
        ({"rope": 0.0}, ValueError, "rope must be a base above 0"),
        ({"rope": -1.0}, ValueError, "rope must be a base above 0"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p must be at least 0 and below 1, got 1.0"),
        ({"rope": "10"}, TypeError, "rope must be a number"),
        ({"rope": True}, TypeError, "rope must be a number"),
        ({"rope": math.inf}, ValueError, "rope must be a base above 0"),
        ({"rope": 10**400}, ValueError, "rope must be a base above 0 that float32 can hold"),
        ({"rope": 1e-320}, ValueError, "rope must be a base above 0 that float32 can hold"),
        ({"dropout_p": "none"}, TypeError, "dropout_p must be a number"),
        ({"causal": "no"}, TypeError, "causal must be True or False, got 'no'"),
        ({"head_dim": 257}, ValueError, "head_dim must be at most 256, got 257"),
        ({"layout": BlockLayout.from_blocks([], [], 80, 64, block_size=16)}, ValueError, "as many queries as keys"),
        ({"sinks": 4}, TypeError, r"sinks must be True or False, got 4 \(int\); .* masks\.sink_window"),
        ({"alibi": torch.ones(4)}, TypeError, r"alibi must be True, False or a list of numbers, got Tensor; .*tolist"),
        (
            {"alibi": [1.0, True, 0.5, 0.1]},
            TypeError,
            "alibi must be .* a list of numbers, got one with True",
        ),
        ({"alibi": [1.0, 0.5]}, ValueError, "alibi must have num_heads=4 slopes, one for each head, got 2"),
        ({"alibi": [1.0, 0.5, 1e39, 0.0]}, ValueError, r"alibi must have slopes .* finite as float32, got 1e\+39"),
        ({"softcap": 0}, ValueError, "softcap must be above 0 and finite, got 0.0; softcap=None caps nothing"),
        ({"softcap": True}, TypeError, r"softcap must be a float or an int, got True \(bool\)"),
        ({"layout": 3}, TypeError, r"layout must be a BlockLayout, a specification such as 'local\(window=256\)', a "),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        module(**changes)


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x must have shape \(batch, length, embed_dim=32\), got \(2, 80, 16\)"):
        module()(torch.zeros(2, 80, 16))
    with pytest.raises(ValueError, match="layout describes 80 queries x 80 keys"):
        module()(tokens(2, 48))


def test_positions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="rope is None and would not use them"):
        module()(tokens(), positions=torch.arange(LENGTH))
    layer = module(rope=10.0)
    with pytest.raises(
        ValueError, match=r"positions must have shape \(length=80,\) or \(length=80, axes\), got \(79,\)"
    ):
        layer(tokens(), positions=torch.arange(79))
    with pytest.raises(ValueError, match=r"head_dim that is a multiple of 2 \* axes, .* got \(80, 3\) and head_dim=8"):
        layer(tokens(), positions=torch.zeros(LENGTH, 3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: module()(None), TypeError, "x must be a torch.Tensor, got NoneType"),
        (
            lambda: module(rope=10.0)(tokens(), positions=[1]),
            TypeError,
            "positions must be a tensor of numbers, got list",
        ),
        (
            lambda: module(rope=10.0)(tokens(), positions=torch.zeros(LENGTH, 0)),
            ValueError,
            r"positions must have shape .* got \(80, 0\)",
        ),
        (
            lambda: module(rope=10.0)(tokens(), positions=RotaryTable(1, 2)),
            TypeError,
            "positions must be a tensor of numbers, got int",
        ),
        (
            lambda: module(rope=10.0)(tokens(), positions=torch.zeros(LENGTH, device="meta")),
            ValueError,
            "positions must be on q's device cpu, got meta",
        ),
        (lambda: rotary_table(torch.zeros(4, 0), 10.0, 8), ValueError, r"positions must have shape .* got \(4, 0\)"),
        (lambda: rotary_table(torch.zeros(4) * 1j, 10.0, 8), ValueError, "positions must be real numbers"),
        (
            lambda: rotary_table(torch.eye(4).to_sparse(), 10.0, 8),
            ValueError,
            "positions is a sparse tensor",
        ),
        (lambda: rotary_table(torch.zeros(4), 0.0, 8), ValueError, "base must be a base above 0"),
        (
            lambda: rotary_table(torch.zeros(4), 10**40, 8),
            ValueError,
            "base must be a base above 0 that float32 can hold",
        ),
        (lambda: rotary_table(torch.zeros(4), 10.0, 0), ValueError, "head_dim must be 1 or more, got 0"),
        (
            lambda: LearnedPositions(LENGTH, 1)(tokens()),
            ValueError,
            r"x must have shape \(batch, length, embed_dim=1\)",
        ),
        (
            lambda: rotary_table(torch.ones(4) > 0, 10.0, 8),
            ValueError,
            "positions must be real numbers, got torch.bool",
        ),
        (lambda: LearnedPositions(LENGTH, 32)(None), TypeError, "x must be a torch.Tensor, got NoneType"),
        (lambda: EncoderBlock(module(), dropout_p=True), TypeError, "dropout_p must be a number, got True"),
        (lambda: EncoderBlock(module(), dropout_p=math.nan), ValueError, "dropout_p must be from 0 to 1, got nan"),
        (
            lambda: module(layout=lambda length: None)(tokens()),
            TypeError,
            "layout must be a function that returns a BlockLayout, but for length 80 it returned NoneType; layout=None",
        ),
        (lambda: EncoderBlock(5), TypeError, "attention must be a module with an embed_dim .* got int"),
        (
            lambda: EncoderBlock(torch.nn.MultiheadAttention(32, 4)),
            TypeError,
            r"attention must be .* takes \(x, kv_lengths, positions\), .* got MultiheadAttention",
        ),
        (lambda: Encoder(EncoderBlock(module())), TypeError, "blocks must be Modules in a list, got EncoderBlock"),
        (lambda: Encoder([EncoderBlock(module())])(None), TypeError, "x must be a torch.Tensor, got NoneType"),
        (
            lambda: Encoder([EncoderBlock(module())])(tokens()[..., :8]),
            ValueError,
            r"x must have shape \(batch, length, embed_dim=32\), got \(2, 80, 8\)",
        ),
        (
            lambda: Encoder([EncoderBlock(module())])(tokens().long()),
            ValueError,
            "x must be floating point, the features of tokens, got torch.int64",
        ),
        (lambda: Encoder([torch.nn.ReLU()]), TypeError, "blocks must have an attention"),
        (
            lambda: Encoder(EncoderBlock(SelfAttention(width, 2)) for width in (8, 16)),
            ValueError,
            r"blocks must have the same embed_dim, got \[8, 16\]",
        ),
    ],
)
def test_what_is_no_input_is_refused_by_name(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_blocks_may_come_one_by_one() -> None:
    assert len(Encoder(EncoderBlock(module()) for _ in range(2)).blocks) == 2


def test_slopes_of_no_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads must be 1 or more, got 0"):
        alibi_slopes(0)


def encoder(dropout_p: float = 0.0) -> Encoder:
    torch.manual_seed(0)
    blocks = [
        EncoderBlock(SelfAttention(32, 4, window(LENGTH), rope=10.0), hidden_dim=48, dropout_p=dropout_p)
        for _ in range(2)
    ]
    return Encoder(blocks)


def test_an_encoder_is_its_blocks_spelled_out() -> None:
    stack, x = encoder(), tokens()
    lengths, places = torch.tensor([30, LENGTH]), torch.arange(LENGTH) * 0.5
    expected = x
    for block in stack.blocks:
        assert isinstance(block, EncoderBlock)
        expected = expected + block.attention(block.attention_norm(expected), lengths, places)
        first, _, _, second = block.dense
        expected = expected + second(torch.nn.functional.gelu(first(block.dense_norm(expected))))
    torch.testing.assert_close(stack(x, lengths, places), stack.norm(expected))
    assert not torch.equal(stack(x, lengths, places), stack(x, lengths))


def test_an_encoder_takes_layers_that_change_scores() -> None:
    layer = module(sinks=True, softcap=1.0, alibi=True)
    x, lengths = tokens(), torch.tensor([30, LENGTH])
    block = EncoderBlock(layer, hidden_dim=48)
    attended = x + layer(block.attention_norm(x), lengths)
    torch.testing.assert_close(block(x, lengths), attended + block.dense(block.dense_norm(attended)))
    Encoder([block])(x).sum().backward()
    assert layer.sinks is not None and layer.sinks.grad is not None and layer.sinks.grad.any()


def test_dropout_of_features_is_for_training() -> None:
    stack, x = encoder(dropout_p=0.5), tokens()
    assert not torch.equal(stack(x), stack(x))
    assert torch.equal(stack.eval()(x), encoder()(x))


def test_an_encoder_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks must hold at least one Module, got none"):
        Encoder([])


def test_learned_positions_are_added_and_counted() -> None:
    learned = LearnedPositions(LENGTH, 32)
    x = tokens(2, 48)
    assert torch.equal(learned(x), x + learned.weight[:48])
    assert learned.weight.std().item() == pytest.approx(0.02, rel=0.1)
    with pytest.raises(ValueError, match="x has 81 tokens, but there are positions for 80"):
        learned(tokens(1, 81))


def test_the_representation_says_what_attends_to_what() -> None:
    assert "layout=80 x 80, density" in repr(module())
    assert "layout=every pair" in repr(module(layout=None))
    assert "layout=window" in repr(module(layout=window))


def test_an_int_may_be_a_base() -> None:
    table, expected = (rotary_table(torch.arange(3), base, 8) for base in (10**20, 1e20))
    assert torch.equal(table.cos, expected.cos) and torch.equal(table.sin, expected.sin)
    assert SelfAttention(32, 4, rope=10**20)(torch.randn(1, 5, 32)).shape == (1, 5, 32)


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_makes_only_the_plans_of_its_calls(causal: bool) -> None:
    layer = SelfAttention(32, 4, masks.local(LENGTH, window=9, block_size=16), causal=causal)
    layer(torch.randn(1, LENGTH, 32)).sum().backward()
    assert isinstance(layer.layout, BlockLayout)
    assert {key[1] for key in layer.layout._cache["plans"]} == {causal}
