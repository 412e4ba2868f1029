"""Jagged (nested) tensors: each sequence attends to itself, as if it were alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocksparse_flash import attention, attention_with_lse, explain, masks, nn
from blocksparse_flash.packed import jagged_positions

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:is_fx_tracing will return true"),
]
LENGTHS = (70, 1, 200, 33)


def jagged(lengths: tuple[int, ...], *sizes: int, offsets: Tensor | None = None, requires_grad: bool = True) -> Tensor:
    """Random jagged tensor (batch, tokens, *sizes)."""
    values = torch.randn(sum(lengths), *sizes, dtype=torch.float64)
    if offsets is None:
        offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets).detach().requires_grad_(requires_grad)


def inputs(lengths: tuple[int, ...], kv_lengths: tuple[int, ...], kv_heads: int) -> list[Tensor]:
    """q, k, v (batch, tokens, heads, 8); those with equal lengths share their offsets."""
    q = jagged(lengths, 4, 8)
    k = jagged(kv_lengths, kv_heads, 8, offsets=q.offsets() if lengths == kv_lengths else None)
    return [q, k, jagged(kv_lengths, kv_heads, 8, offsets=k.offsets())]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("kv_lengths", [LENGTHS, (40, 5, 128, 100)], ids=["same", "other"])
def test_each_sequence_is_computed_alone(kv_lengths, kv_heads, causal):
    torch.manual_seed(0)
    leaves = inputs(LENGTHS, kv_lengths, kv_heads)
    options = {"softcap": 3.0, "sinks": torch.randn(4, dtype=torch.float64)}
    out, lse = attention_with_lse(*(leaf.transpose(1, 2) for leaf in leaves), causal=causal, **options)
    assert out.shape == leaves[0].transpose(1, 2).shape and lse.dim() == 3
    douts = [torch.randn(4, length, 8, dtype=torch.float64) for length in LENGTHS]
    dout = torch.nested.nested_tensor_from_jagged(torch.cat([d.transpose(0, 1) for d in douts]), out.offsets())
    grads = torch.autograd.grad(out, leaves, dout.transpose(1, 2))
    for i, (row, row_lse) in enumerate(zip(out.unbind(), lse.unbind(), strict=True)):
        alone = [leaf.detach().unbind()[i].transpose(0, 1)[None].requires_grad_() for leaf in leaves]
        expected, expected_lse = attention_with_lse(*alone, causal=causal, **options)
        assert torch.allclose(row, expected[0]) and torch.allclose(row_lse, expected_lse[0])
        wanted = torch.autograd.grad(expected, alone, douts[i][None])
        for grad, other in zip(grads, wanted, strict=True):
            assert torch.allclose(grad.unbind()[i].transpose(0, 1), other[0])


def test_tensors_made_of_lists_and_their_transposes():
    rows = [torch.randn(length, 2, 16) for length in LENGTHS]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    out = attention(x, x, x, causal=True, alibi_slopes=torch.tensor([0.5, 0.25]))
    for row, each in zip(rows, out.unbind(), strict=True):
        alone = row.transpose(0, 1)[None]
        expected = attention(alone, alone, alone, causal=True, alibi_slopes=torch.tensor([0.5, 0.25]))
        assert torch.allclose(each, expected[0], atol=1e-5)


def test_explain_describes_the_packed_sequence():
    q, k, v = (leaf.transpose(1, 2) for leaf in inputs(LENGTHS, LENGTHS, 4))
    assert explain(q, k, v, causal=True).tile_density < 1
    with pytest.raises(ValueError, match="kv_lengths must be None with nested tensors"):
        explain(q, k, v, kv_lengths=torch.ones(4, dtype=torch.int64))


def test_one_graph_is_refused_by_name():
    q, k, v = (leaf.detach().transpose(1, 2) for leaf in inputs(LENGTHS, LENGTHS, 4))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="outside"):
        torch.compile(attention, backend="eager", fullgraph=True)(q, k, v)


def test_empty_sequences():
    q, k, v = (leaf.transpose(1, 2) for leaf in inputs((0, 5, 0), (0, 5, 0), 4))
    out = attention(q, k, v)
    assert [len(each[0]) for each in out.unbind()] == [0, 5, 0]


@pytest.mark.parametrize("name", ["layout", "kv_lengths", "block_bias", "pair_bias"])
def test_options_of_padded_batches_are_refused(name):
    q, k, v = (leaf.transpose(1, 2) for leaf in inputs(LENGTHS, LENGTHS, 4))
    value = masks.causal(304) if name == "layout" else torch.ones(4)
    with pytest.raises(ValueError, match=f"{name} must be None with nested tensors, .*masks.documents"):
        attention(q, k, v, **{name: value})


@pytest.mark.parametrize("side", ["q", "k"])
def test_slopes_need_as_many_values_of_queries_as_of_keys(side):
    """Regression: values after the last sequence shifted the distances."""
    offsets = torch.tensor([0, 3, 10])
    n_values = {"q": 10, "k": 10, side: 13}
    q, k = (
        torch.nested.nested_tensor_from_jagged(torch.randn(n, 2, 16), offsets).transpose(1, 2)
        for n in n_values.values()
    )
    with pytest.raises(ValueError, match=r"alibi_slopes must be None for nested tensors .* and as many values"):
        attention(q, k, k, alibi_slopes=torch.full((2,), 0.5))
    attention(q, k, k)


def test_values_after_the_last_sequence_are_those_of_keys_and_of_values():
    offsets = torch.tensor([0, 3, 10])
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(torch.randn(n, 2, 16), offsets).transpose(1, 2) for n in (10, 10, 13)
    )
    with pytest.raises(ValueError, match="v must have as many values as k, 10 tokens in all, got 13"):
        attention(q, k, v)


def test_tensors_that_do_not_fit_are_refused():
    q, k, v = inputs(LENGTHS, LENGTHS, 4)
    with pytest.raises(
        ValueError, match=r"q must have the dimensions \(batch, heads, tokens, head_dim\), of which dim"
    ):
        attention(q, k, v)
    q, k, v = (leaf.transpose(1, 2) for leaf in (q, k, v))
    with pytest.raises(ValueError, match="v must have the sequences of k: make both with the same offsets"):
        attention(q, k, jagged((1, 2, 3, 4), 4, 8).transpose(1, 2))
    with pytest.raises(ValueError, match="k must have as many sequences as q, 4, got 2"):
        fewer = jagged((10, 20), 4, 8)
        attention(q, fewer.transpose(1, 2), fewer.transpose(1, 2))
    with pytest.raises(ValueError, match="alibi_slopes must be None for nested tensors with other sequences"):
        other = jagged((5, 5, 5, 5), 4, 8).transpose(1, 2)
        attention(q, other, other, alibi_slopes=torch.ones(4))
    with pytest.raises(ValueError, match="v must be a dense, strided tensor, got a nested tensor"):
        attention(torch.zeros(4, 4, 5, 8), torch.zeros(4, 4, 5, 8), v)
    padded = torch.zeros(4, 100, 4, 8)
    starts, lengths = torch.tensor([0, 1, 2, 3]), torch.tensor([5, 5, 5, 5])
    gaps = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ValueError, match=r"q must be without gaps between its sequences; q.contiguous\(\) has none"):
        attention(gaps, gaps, gaps)


# ---- the layer


@pytest.mark.parametrize("options", [{"rope": 10000.0}, {"alibi": True, "causal": False}], ids=str)
def test_the_layer_computes_each_sequence_alone(options):
    torch.manual_seed(0)
    layer = nn.SelfAttention(32, 4, kv_heads=2, **{"causal": True, **options}).double()
    x = jagged(LENGTHS, 32)
    out = layer(x)
    assert out.shape == x.shape
    (grad,) = torch.autograd.grad(out, [x], out.detach())
    for row, each, of_row in zip(x.detach().unbind(), out.unbind(), grad.unbind(), strict=True):
        alone = row[None].requires_grad_()
        expected = layer(alone)
        assert torch.allclose(each, expected[0])
        assert torch.allclose(of_row, torch.autograd.grad(expected, alone, expected.detach())[0][0])


def test_the_layer_refuses_what_it_cannot_apply():
    x = jagged(LENGTHS, 32).float()
    with pytest.raises(ValueError, match="the layer's layout must be None for a nested tensor"):
        nn.SelfAttention(32, 4, "local(window=5)")(x)
    with pytest.raises(ValueError, match="kv_lengths must be None for a nested tensor"):
        nn.SelfAttention(32, 4)(x, torch.tensor([1, 1, 1, 1]))
    with pytest.raises(ValueError, match=r"x must have the dimensions \(batch, tokens, embed_dim\)"):
        nn.SelfAttention(32, 4)(jagged(LENGTHS, 2, 16).float())


def test_positions_begin_anew_in_each_sequence():
    assert jagged_positions(torch.tensor([0, 3, 3, 5]), 5).tolist() == [0, 1, 2, 0, 1]
    assert jagged_positions(torch.tensor([0, 3, 3, 5]), 7).tolist() == [0, 1, 2, 0, 1, 0, 1]


@pytest.mark.parametrize("rope", [None, 100.0])
def test_the_layer_takes_values_after_the_last_sequence(rope):
    torch.manual_seed(0)
    layer, values = nn.SelfAttention(32, 4, rope=rope, causal=True).double(), torch.randn(30, 32, dtype=torch.float64)
    whole, part = (torch.nested.nested_tensor_from_jagged(values[:n], torch.tensor([0, 10, 22])) for n in (30, 22))
    assert torch.allclose(layer(whole).values()[:22], layer(part).values())


@pytest.mark.parametrize(
    ("offsets", "longest", "message"),
    [
        (
            [3, 10, 30],
            None,
            r"offsets that start at 0, never decrease, and end within its 30 tokens, got \[3, 10, 30\]",
        ),
        ([0, 20, 10], None, "offsets that start at 0, never decrease"),
        ([0, 10, 31], None, "end within its 30 tokens"),
        ([0, 10, 30], 5, "max_seqlen .* its longest sequence, 20 tokens, or more, got 5"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(offsets, longest, message):
    lengths = {} if longest is None else {"min_seqlen": 1, "max_seqlen": longest}
    x = torch.nested.nested_tensor_from_jagged(torch.randn(30, 4, 8), torch.tensor(offsets), **lengths)
    q = x.transpose(1, 2)
    with pytest.raises(ValueError, match=f"q must have .*{message}"):
        attention(q, q, q)
    flat = torch.nested.nested_tensor_from_jagged(torch.randn(30, 32), torch.tensor(offsets), **lengths)
    with pytest.raises(ValueError, match=f"x must have .*{message}"):
        nn.SelfAttention(32, 4)(flat)


def test_jagged_beside_dense_tensors_are_refused():
    q, k = jagged((4, 6), 2, 8).transpose(1, 2), torch.randn(2, 2, 6, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"q must be a dense, .* make q, k and v all jagged"):
        attention(q, k, k)


def test_tensors_from_outside_inference_mode_attend_in_it() -> None:
    values, offsets = torch.randn(20, 2, 8), torch.tensor([0, 5, 20])
    q = torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)
    expected = attention(q, q, q, causal=True)
    with torch.inference_mode():
        found = attention(q, q, q, causal=True)
        explain(q, q, q, causal=True)
    torch.testing.assert_close(found.values(), expected.values())
