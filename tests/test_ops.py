"""The operators under opcheck, torch.compile, checkpointing, functional_call and double backward.

On a CUDA machine the same tests run on the GPU with the Triton kernels; elsewhere `eager`, and opcheck for both.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import masks
from blocksparse_flash import BlockLayout, attention, attention_with_lse, nn
from blocksparse_flash.dispatch import CallSpec

LENGTH = 160


def tensors(device: torch.device, *, heads: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v of LENGTH tokens and head_dim 16 that require gradients."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, LENGTH, 16, generator=generator, dtype=dtype).to(device).requires_grad_() for _ in "qkv"
    ]


@pytest.fixture
def layout(device: torch.device) -> BlockLayout:
    """Partial and full tiles, and a ragged end."""
    return (masks.local(LENGTH, window=20, block_size=16) | masks.butterfly(LENGTH, block_size=16)).to(device)


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("case", ["layout", "dense", "causal, lengths", "dropout"])
def test_operators_pass_opcheck(case: str, backend: str, device: torch.device, layout: BlockLayout) -> None:
    q, k, v = tensors(device)
    plan = list(layout.plan(device)) if case in ("layout", "dropout") else []
    lengths = torch.tensor([100], device=device) if "lengths" in case else None
    seed = torch.tensor([3]) if case == "dropout" else None
    spec = CallSpec(0.25, "causal" in case, 0.5 if seed is not None else 0.0, 0.0, backend, False)
    mods = (None,) * 4
    options: tuple[Any, ...] = (plan, [], lengths, seed, *spec)
    operators = torch.ops.blocksparse_flash
    results = torch.library.opcheck(operators.attention_forward.default, (q, k, v, *mods, *options))
    assert set(results.values()) == {"SUCCESS"}
    with torch.no_grad():
        out, lse = operators.attention_forward(q, k, v, *mods, *options)
        douts = torch.randn_like(out), torch.randn_like(lse)
        arguments = (*douts, q, k, v, *mods, out, lse, *options, [False] * 4)
        results = torch.library.opcheck(operators.attention_backward.default, tuple(_detached(a) for a in arguments))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_the_backward_takes_results_of_other_strides(backend: str, device: torch.device) -> None:
    """The operator may be called with an out and an lse that lie in memory in another way than from the forward."""
    q, k, v = (tensor.detach() for tensor in tensors(device))
    mods, rest = (None,) * 4, ([], [], None, None, *CallSpec(0.25, False, 0.0, 0.0, backend, False))
    out, lse = torch.ops.blocksparse_flash.attention_forward(q, k, v, *mods, *rest)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)

    def gradients(out: torch.Tensor, lse: torch.Tensor) -> list[torch.Tensor]:
        return torch.ops.blocksparse_flash.attention_backward(dout, dlse, q, k, v, *mods, out, lse, *rest, [False] * 4)

    expected = gradients(out, lse)
    for other in (out.transpose(1, 2).contiguous().transpose(1, 2), out.mT.contiguous().mT):
        found = gradients(other, lse.mT.contiguous().mT)
        assert other.stride() != out.stride() and all(map(torch.equal, found[:3], expected[:3]))


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0, 5), (2, 2, 0)], ids=str)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_the_operator_takes_no_queries(backend: str, shape: tuple[int, int, int], device: torch.device) -> None:
    q, k = torch.ones(*shape, 8, device=device), torch.ones(*shape[:2], 90, 8, device=device)
    spec = CallSpec(0.25, False, 0.0, 0.0, backend, False)
    out, lse = torch.ops.blocksparse_flash.attention_forward(q, k, k, *(None,) * 4, [], [], None, None, *spec)
    assert out.shape == q.shape and lse.shape == q.shape[:3]


def _detached(argument: Any) -> Any:
    return argument.detach() if isinstance(argument, torch.Tensor) else argument


def gradients(call: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    out, lse = call(*inputs)
    return list(torch.autograd.grad((out.sin().sum() + lse.cos().sum()), inputs))


@pytest.mark.parametrize("causal", [False, True])
def test_compiles_into_one_graph_and_equals_the_uncompiled_call(
    causal: bool, device: torch.device, layout: BlockLayout
) -> None:
    layout.plan(device, causal=causal)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return attention_with_lse(q, k, v, layout, causal=causal)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    inputs = tensors(device)
    torch.testing.assert_close(compiled(*inputs), call(*inputs), rtol=0, atol=0)
    torch.testing.assert_close(gradients(compiled, *inputs), gradients(call, *inputs), rtol=0, atol=0)


# importing inductor warns about torch's own use of torch.jit
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_compiles_with_inductor(device: torch.device, layout: BlockLayout) -> None:
    compiled = torch.compile(lambda q, k, v: attention(q * 2, k, v, layout) + 1, fullgraph=True)
    q, k, v = tensors(device)
    torch.testing.assert_close(compiled(q, k, v), attention(q * 2, k, v, layout) + 1)


# on a GPU this captures CUDA graphs, and inductor warns that float32 products could be TF32
@pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning")
# the operators are not captured, and a part between them may be empty
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_layer_trains_under_max_autotune(device: torch.device, layout: BlockLayout) -> None:
    torch.manual_seed(0)
    layer = nn.SelfAttention(32, 2, layout).to(device)
    compiled = torch.compile(layer, mode="max-autotune", fullgraph=True)
    x = torch.randn(1, LENGTH, 32, device=device)
    for _ in range(3):
        found, expected = (
            [out := call(x), *torch.autograd.grad(out.square().sum(), layer.parameters())] for call in (compiled, layer)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_other_layouts_do_not_recompile(device: torch.device) -> None:
    """With other blocks or another block size: the lists of a plan have dynamic lengths from the first call on."""
    counter = CompileCounterWithBackend("aot_eager")

    def call(q: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        return attention(q, q, q, layout).sum()

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    length = 1024
    q = torch.randn(1, 1, length, 16, device=device, requires_grad=True)
    layouts = []
    for block_size in (128, 16):
        layouts += [masks.random(length, density=d, seed=int(100 * d), block_size=block_size) for d in (0.02, 0.1, 0.3)]
        layouts += [masks.random(length, blocks_per_row=n, seed=n, block_size=block_size) for n in range(1, 9)]
        layouts += [masks.local(length, window=w, block_size=block_size) for w in (0, 3, 70, 300)]
        layouts += [masks.global_tokens(length, tokens=t, block_size=block_size) for t in (1, 128, [5, 900])]
        layouts += [masks.causal(length, block_size=block_size), masks.butterfly(length, block_size=block_size)]
    seen = {tuple(t.shape for t in layout.plan(device)) for layout in layouts}
    assert len(seen) > 10, "the plans must differ in shape, or the test proves nothing"
    for layout in layouts:
        compiled(q, layout.to(device)).backward()
    assert counter.frame_count == 1


def test_changing_the_layout_of_a_module_recompiles_at_most_once(device: torch.device) -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layout: BlockLayout | None = None

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return attention(q, q, q, self.layout)

    counter = CompileCounterWithBackend("aot_eager")
    holder = Holder()
    compiled = torch.compile(holder, fullgraph=True, backend=counter)
    q = torch.randn(1, 1, 1024, 16, device=device)
    for window in (3, 200, 400, 50, 700):
        holder.layout = masks.local(1024, window=window).to(device)
        compiled(q)
    assert counter.frame_count <= 2


def test_an_unplanned_layout_is_refused_under_compile(device: torch.device) -> None:
    unplanned = masks.local(LENGTH, window=33, block_size=16)
    compiled = torch.compile(lambda q: attention(q, q, q, unplanned), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"layout\.to\(q\.device\)"):
        compiled(tensors(device)[0])


def test_a_layout_moved_for_causal_calls_has_their_plans_under_compile(device: torch.device) -> None:
    q, *_ = tensors(device)
    for window in (33, 57):
        layout = masks.local(LENGTH, window=window, block_size=16)
        moved = layout.to(device, causal=True)
        call = torch.compile(
            lambda q, moved=moved: attention(q, q, q, moved, causal=True), fullgraph=True, backend="eager"
        )
        assert torch.equal(call(q), attention(q, q, q, layout, causal=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_repeats_the_dropout(use_reentrant: bool, device: torch.device, layout: BlockLayout) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return attention_with_lse(q, k, v, layout, dropout_p=0.3)

    def checkpointed(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return checkpoint(call, *inputs, use_reentrant=use_reentrant)

    grads = []
    for variant in (call, checkpointed):
        torch.manual_seed(5)
        inputs = tensors(device)
        out, lse = variant(*inputs)
        (out.sin().sum() + lse.cos().sum()).backward()
        grads.append([t.grad for t in inputs])
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_functional_call_uses_other_weights(device: torch.device, layout: BlockLayout) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(16, device=device))

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return attention(q @ self.weight, q, q, layout)

    q = tensors(device)[0]
    doubled = {"weight": 2 * torch.eye(16, device=device)}
    actual = torch.func.functional_call(Layer(), doubled, (q,))
    torch.testing.assert_close(actual, attention(2 * q, q, q, layout))


def test_lse_alone_has_a_gradient(device: torch.device, layout: BlockLayout) -> None:
    q, k, v = (t.double() for t in tensors(device))
    grads = []
    for backend in ("eager", "reference"):
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        lse = attention_with_lse(*inputs, layout, backend=backend)[1]
        grads.append(torch.autograd.grad(lse.sin().sum(), inputs, allow_unused=True, materialize_grads=True))
    torch.testing.assert_close(grads[0], grads[1])
    assert not grads[0][2].any(), "lse does not depend on v"


def test_a_second_derivative_is_refused(device: torch.device, layout: BlockLayout) -> None:
    q, k, v = tensors(device)
    (grad,) = torch.autograd.grad(attention(q, k, v, layout).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives of attention are not supported"):
        grad.sum().backward()


@pytest.mark.parametrize("has_slopes", [False, True], ids=["plain", "scored"])
def test_several_gradients_at_once_are_refused(has_slopes: bool, device: torch.device, layout: BlockLayout) -> None:
    """vmap used to enter the kernels, and its error named an operation inside them."""
    q, k, v = tensors(device)
    slopes = torch.ones(2, device=device) if has_slopes else None

    def first(q: torch.Tensor, backend: str) -> torch.Tensor:
        return attention(q, k, v, layout, alibi_slopes=slopes, backend=backend)[0, 0, :2, 0]

    out, lse = attention_with_lse(q, k, v, layout, alibi_slopes=slopes)
    for result in (out, lse):
        grads = torch.ones(3, *result.shape, device=device)
        with pytest.raises(
            RuntimeError, match=r"attention_backward takes one gradient at a time.* is_grads_batched=True"
        ):
            torch.autograd.grad(result, q, grads, is_grads_batched=True, retain_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward takes one gradient at a time"):
        torch.autograd.functional.jacobian(lambda q: first(q, "auto"), q, vectorize=True)
    # what the error advises
    ours = torch.autograd.functional.jacobian(lambda q: first(q, "auto"), q)
    torch.testing.assert_close(
        torch.autograd.functional.jacobian(lambda q: first(q, "reference"), q, vectorize=True),
        ours,
        rtol=1e-4,
        atol=1e-5,
    )


def test_autocast_computes_in_its_dtype(device: torch.device, layout: BlockLayout) -> None:
    q, k, v = tensors(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = attention(q, k, v, layout)
    assert out.dtype == torch.bfloat16
    expected = attention(*(t.bfloat16() for t in (q, k, v)), layout)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    out.float().sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32


# torch's own use of torch.jit
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_forward_mode_is_refused(device: torch.device) -> None:
    """Without an error, the tangent would silently be zero."""
    q, k, v = (tensor.detach() for tensor in tensors(device))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="forward-mode differentiation"):
            attention(dual, k, v)


def test_modes_and_profilers_see_the_operators(device: torch.device) -> None:
    """Calls skip the dispatcher only if no mode and no profiler is active."""

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    inputs = tensors(device)
    with Watching():
        attention(*inputs).sum().backward()
    with torch.profiler.profile(acc_events=True) as profiler:
        attention(*inputs).sum().backward()
    for names in (seen, [event.name for event in profiler.events()]):
        for operator in ("attention_forward", "attention_backward"):
            assert any(operator in name for name in names), operator
