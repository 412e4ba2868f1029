"""DecoderBlock and Decoder, spelled out, and with caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

import masks
from blocksparse_flash.nn import Decoder, DecoderBlock, KVCache, LayoutByLength, SelfAttention

LENGTH, WIDTH = 70, 32
LAYOUTS = [masks.sink_window(LENGTH, sinks=2, window=15, block_size=16), None, LayoutByLength("local(window=9)")]


def decoder(dropout_p: float = 0.0) -> Decoder:
    torch.manual_seed(0)
    attentions = [SelfAttention(WIDTH, 4, layout, kv_heads=2, rope=100.0, causal=True) for layout in LAYOUTS]
    return Decoder(DecoderBlock(each, hidden_dim=48, dropout_p=dropout_p) for each in attentions).double()


def tokens() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_decoder_is_its_blocks_spelled_out() -> None:
    made, x = decoder(), tokens()
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    expected = x
    for block in made.blocks:
        eps = torch.finfo(torch.float64).eps
        expected = expected + block.attention(rms_norm(expected, (WIDTH,), block.attention_norm.weight, eps))
        hidden = rms_norm(expected, (WIDTH,), block.dense_norm.weight, eps) @ block.gate_up.weight.T
        expected = expected + (silu(hidden[..., :48]) * hidden[..., 48:]) @ block.down.weight.T
    torch.testing.assert_close(made(x), rms_norm(expected, (WIDTH,), made.norm.weight, eps))


@pytest.mark.parametrize("parts", [[50, *[1] * 20], [1, 30, 39]], ids=str)
def test_decoding_is_one_forward(parts: list[int]) -> None:
    made, x = decoder(), tokens()
    caches = made.new_caches(2, LENGTH)
    with torch.no_grad():
        outs = [made(part, caches=caches) for part in x.split(parts, dim=1)]
    torch.testing.assert_close(torch.cat(outs, dim=1), made(x), rtol=1e-10, atol=1e-10)
    assert [cache.length for cache in caches] == [LENGTH] * 3


def test_padding_and_positions_reach_every_block() -> None:
    made, x = decoder(), tokens()
    lengths, positions = torch.tensor([LENGTH, 40]), 2 * torch.arange(LENGTH)
    expected = x
    for block in made.blocks:
        expected = block(expected, lengths, positions)
    assert torch.equal(made(x, lengths, positions), made.norm(expected))
    assert not torch.equal(made(x), made(x, positions=positions))


def test_dropout_is_for_training() -> None:
    made, x = decoder(dropout_p=0.5), tokens()
    assert not torch.equal(made(x), made(x)) and torch.equal(made.eval()(x), made(x))
    torch.testing.assert_close(made(x), decoder()(x))


def test_gradients_reach_every_weight() -> None:
    made = decoder()
    made(tokens()).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in made.parameters())


def test_each_block_needs_a_cache_of_its_own() -> None:
    made, x = decoder(), tokens()
    caches = made.new_caches(2, LENGTH)
    with torch.no_grad(), pytest.raises(ValueError, match=r"caches\[0\] and caches\[2\] are the same"):
        made(x[:, :9], caches=caches[:1] * 3)
    with torch.no_grad(), pytest.raises(TypeError, match="caches must be a list of one KVCache for each block, got"):
        made(x, caches=caches[0])  # type: ignore[arg-type]
    with torch.no_grad(), pytest.raises(ValueError, match="one for each of the 3 blocks, got 2"):
        made(x, caches=caches[:2])


def test_blocks_that_share_a_layer_need_a_cache_each() -> None:
    """Regression: one cache for both held the keys of both, and the results were wrong."""
    shared = SelfAttention(8, 2, causal=True)
    made, x = Decoder([DecoderBlock(shared), DecoderBlock(shared)]).double(), torch.randn(2, 10, 8).double()
    caches = made.new_caches(2, 20)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"caches\[0\] and caches\[1\] are the same"):
            made(x, caches=caches[:1] * 2)
        parts = [made(x[:, :6], caches=caches), made(x[:, 6:], caches=caches)]
        torch.testing.assert_close(torch.cat(parts, 1), made(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: DecoderBlock(torch.nn.Linear(4, 4)), TypeError, "attention must be a SelfAttention, got Linear"),
        (lambda: DecoderBlock(SelfAttention(8, 2)), ValueError, "attention must be causal in a decoder"),
        (
            lambda: DecoderBlock(SelfAttention(8, 2, masks.local(50, window=3))),
            ValueError,
            "query 0 attends to key 1",
        ),
        (lambda: DecoderBlock(SelfAttention(8, 2, causal=True), hidden_dim=0), ValueError, "hidden_dim must be 1"),
        (lambda: DecoderBlock(SelfAttention(8, 2, causal=True), dropout_p=2.0), ValueError, "dropout_p must be from 0"),
        (lambda: Decoder([]), ValueError, "blocks must hold at least one DecoderBlock, got none"),
        (
            lambda: Decoder(DecoderBlock(SelfAttention(width, 2, causal=True)) for width in (8, 16)),
            ValueError,
            r"blocks must have the same embed_dim, got \[8, 16\]",
        ),
        (lambda: Decoder([torch.nn.Linear(4, 4)]), TypeError, "blocks must be DecoderBlocks in a list, got Linear"),
        (lambda: Decoder(torch.nn.Linear(4, 4)), TypeError, "blocks must be DecoderBlocks in a list, got Linear"),
        (
            lambda: DecoderBlock(SelfAttention(8, 2, causal=True))(torch.zeros(1, 5, 4)),
            ValueError,
            r"x must have shape \(batch, length, embed_dim=8\), got \(1, 5, 4\)",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def failing_caches(made: Decoder, failure: str, monkeypatch: pytest.MonkeyPatch) -> list[KVCache]:
    """Caches with which the second call of a decoder fails after its first block."""
    caches = made.new_caches(2, LENGTH)
    if failure == "a full cache":
        caches[1] = made.blocks[1].attention.new_cache(2, 9)
    elif failure == "an interruption":
        monkeypatch.setattr(made.blocks[2].down, "forward", interrupted_at(call=2))
    return caches


def interrupted_at(*, call: int) -> Any:
    calls = iter(range(1, 100))

    def forward(x: Tensor) -> Tensor:
        if next(calls) == call:
            raise KeyboardInterrupt
        return x.new_zeros(*x.shape[:-1], WIDTH)

    return forward


@pytest.mark.parametrize("part", ["a block", "its attention"])
def test_a_step_that_fails_after_the_attention_can_be_repeated(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the cache kept the tokens of a step whose last matrix product raised."""
    made, x = decoder().blocks[1], tokens()
    cache = made.attention.new_cache(x.shape[0], x.shape[1])
    called, last = (made, made.down) if part == "a block" else (made.attention, made.attention.out)
    with torch.no_grad():
        called(x[:, :3], cache=cache)
        with monkeypatch.context() as patched:
            patched.setattr(last, "forward", interrupted_at(call=1))
            with pytest.raises(KeyboardInterrupt):
                called(x[:, 3:4], cache=cache)
        assert cache.length == 3
        repeated = called(x[:, 3:4], cache=cache)
        expected = called(x[:, :4])[:, 3:]
    torch.testing.assert_close(repeated, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("failure", ["a full cache", "an interruption"])
def test_a_failed_step_can_be_repeated(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = decoder(), tokens()
    caches = failing_caches(made, failure, monkeypatch)
    with torch.no_grad():
        made(x[:, :8], caches=caches)
        with pytest.raises((ValueError, KeyboardInterrupt)):
            made(x[:, 8:12], caches=caches)
        assert [cache.length for cache in caches] == [8] * 3
        repeated = made(x[:, 8:9], caches=caches)
        expected = made(x)[:, 8:9]
    torch.testing.assert_close(repeated, expected, rtol=1e-10, atol=1e-10)


def test_the_caches_must_hold_the_same_tokens() -> None:
    made, x = decoder(), tokens()
    caches = made.new_caches(2, LENGTH)
    with torch.no_grad():
        made(x[:, :9], caches=caches)
        caches[1].truncate(5)
        with pytest.raises(ValueError, match=r"the same tokens, got \[9, 5, 9\] tokens: cache.truncate\(5\)"):
            made(x[:, 9:], caches=caches)
        with pytest.raises(TypeError, match=r"caches\[2\] must be a KVCache"):
            made(x[:, 9:], caches=[*caches[:2], None])


def test_a_causal_layout_makes_a_decoder() -> None:
    DecoderBlock(SelfAttention(8, 2, masks.sink_window(50, sinks=2, window=3)))
