"""Dropout of attention: the same pairs on every backend, seeds, and the generator."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from blocksparse_flash import BlockLayout, functional
from blocksparse_flash.functional import attention, attention_with_lse, explain
from tests.support.small_call import BACKENDS, KV_LEN, Q_LEN, good_call, window, with_gradients


@pytest.mark.parametrize("layout", [None, window()], ids=["none", "window"])
def test_dropout_drops_the_same_pairs_on_every_backend(layout):
    call = {**good_call(torch.float64), "layout": layout}
    results = [with_gradients(call, dropout_p=0.4, seed=7, backend=backend) for backend in BACKENDS]
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name])


def test_dropout_does_not_depend_on_the_layout():
    """No layout and full layouts of any block size drop the same pairs."""
    call = good_call(torch.float64)
    outs = [
        attention(**call, layout=layout, dropout_p=0.4, seed=7)
        for layout in (
            None,
            *(BlockLayout.from_dense(torch.ones(Q_LEN, KV_LEN).bool(), block_size=size) for size in (16, 32, 256)),
        )
    ]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


def test_dropout_leaves_lse_alone():
    call = good_call()
    assert torch.equal(
        attention_with_lse(**call, dropout_p=0.4, seed=7)[1], attention_with_lse(**call, dropout_p=0.0)[1]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeds_may_be_tensors_and_any_64_bit_integer(backend):
    call = {**good_call(), "dropout_p": 0.4, "backend": backend}
    seeded = attention(**call, seed=7)
    for seed in (torch.tensor(7), torch.tensor([7]), torch.tensor([[7]])):
        assert torch.equal(attention(**call, seed=seed), seeded)
    for seed in (8, -7, 7 + 2**32, 2**63 - 1, -(2**63)):
        assert not torch.equal(attention(**call, seed=seed), seeded)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_seed_the_cpu_generator_decides(backend):
    call = {**good_call(), "dropout_p": 0.4, "backend": backend}
    torch.manual_seed(3)
    first, second = attention(**call), attention(**call)
    torch.manual_seed(3)
    assert torch.equal(attention(**call), first)
    assert torch.equal(attention(**call), second)
    assert not torch.equal(first, second)


def test_a_seed_is_drawn_on_the_device_for_cuda_graphs(monkeypatch):
    mode = FakeTensorMode()
    with mode:
        q = torch.empty(1, 2, 32, 16, device="cuda")
    for is_compiling, is_capturing, device in ((False, False, "cpu"), (True, False, "cuda"), (False, True, "cuda")):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda answer=is_compiling: answer)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=is_capturing: answer)
        with mode:
            assert functional._drawn_seed(q).device.type == device


@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"dropout_p": 0.5, "seed": 3}], ids=str)
def test_the_generator_is_left_alone_when_not_needed(options):
    state = torch.random.get_rng_state()
    attention(**good_call(), **options)
    explain(**good_call(), dropout_p=0.5)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_repeats_the_dropout(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    grads = []
    for is_checkpointed in (False, True):
        call = {name: value.requires_grad_() for name, value in good_call().items()}
        torch.manual_seed(5)

        def attend(q, k, v):
            return attention(q, k, v, layout=window(), dropout_p=0.3)

        inputs = call.values()
        out = checkpoint(attend, *inputs, use_reentrant=use_reentrant) if is_checkpointed else attend(*inputs)
        out.square().sum().backward()
        grads.append([value.grad for value in call.values()])
    for plain, again in zip(*grads, strict=True):
        assert torch.equal(plain, again)
