"""PyTorch's compiler, tracers, modes and transforms: whether a kernel can be launched directly."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_NOTHING = nullcontext()


def has_observers() -> bool:
    """Whether a compiler, tracer, mode or transform intercepts operators; profilers and subclasses do not count."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() != 0
        or _has_pre_dispatch_modes()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_tracing()
    )


def _has_pre_dispatch_modes() -> bool:
    """Whether make_fx(pre_dispatch=True) or torch.export traces: their modes are on a stack of their own."""
    return torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)


def is_left_from_inference_mode(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made in inference mode, which has ended: autograd cannot save it, and it cannot be written.

    False while torch.compile traces, which cannot ask.
    """
    return not torch.compiler.is_compiling() and tensor.is_inference() and not torch.is_inference_mode_enabled()


def can_launch_directly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> bool:
    """Whether a kernel can bypass the dispatcher.

    Requires plain strided tensors with memory, and no compiler, tracer, mode, transform or profiler.

    others  lengths and a seed: tensors, numbers or None
    """
    for other in others:
        if other is not None and isinstance(other, torch.Tensor) and type(other) not in PLAIN_TYPES:
            return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return (
        not has_observers()
        and type(q) in PLAIN_TYPES
        and type(k) in PLAIN_TYPES
        and type(v) in PLAIN_TYPES
        and not q.is_meta
        and q.layout is k.layout is v.layout is torch.strided
        and not (q.is_nested or k.is_nested or v.is_nested)
        # lazily negated, like the imaginary part of a conjugate
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        # a wrapper may outlive its transform; it has no memory
        and not (wrapped(q) or wrapped(k) or wrapped(v))
        and not torch._C._autograd._profiler_enabled()
    )


def unsupported_tensor(name: str, tensor: torch.Tensor) -> tuple[str, str] | None:
    """(description, remedy) of a tensor that is not a dense strided array on this rank; None for one that is.

    name  of the argument, used in the remedy
    """
    if tensor.is_nested:
        return "a nested tensor", f"torch.nested.to_padded_tensor({name}, 0.0) makes one"
    if tensor.layout is not torch.strided:
        return f"a {tensor.layout} tensor", f"{name}.to_dense() makes one"
    if type(tensor) in PLAIN_TYPES:
        return None
    # only if already imported: the import takes 5 s
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            return "a DTensor", f"{name}.to_local() gives the part of this rank"
    if torch.nn.parameter.is_lazy(tensor):
        return "a parameter without a shape", "call the module that has it once before"
    if torch.masked.is_masked_tensor(tensor):
        return "a MaskedTensor", f"{name}.to_tensor(0.0) makes one"
    return None


def mixes_fake_and_real(tensor: torch.Tensor, q: torch.Tensor) -> bool:
    """Whether only one of two tensors is fake, and its mode takes no others."""
    if torch.compiler.is_compiling():
        return False
    a, b = _fake_mode(tensor), _fake_mode(q)
    return (a is None) != (b is None) and not (a or b).allow_non_fake_inputs


def check_dense(name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    """Accept dense, strided tensors, fake if q is. Runs before checks that read strides, which some types lack."""
    if (
        type(tensor) in PLAIN_TYPES
        and type(q) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_nested
    ):
        return
    found = unsupported_tensor(name, tensor)
    if found is not None:
        what, hint = found
        if name in ("q", "k", "v") and what == "a DTensor":
            hint += ", and blocksparse_flash.distributed.attention attends over a sequence that ranks share"
        elif name in ("q", "k", "v"):
            hint += "; pass kv_lengths= for padded batches"
            if what == "a nested tensor":
                hint += ", or make q, k and v all jagged"
        raise ValueError(f"{name} must be a dense, strided tensor, got {what}; {hint}")
    if mixes_fake_and_real(tensor, q):
        raise ValueError(
            f"{name} must be of q's kind, {type(q).__name__}, got {type(tensor).__name__}; from_tensor of a "
            "FakeTensorMode makes fake tensors from real ones"
        )


def has_values(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor can be read now.

    False while a compiler, FakeTensorMode, make_fx or AOTAutograd traces, and for fake and torch.func-wrapped tensors.
    """
    if torch.compiler.is_compiling() or _is_traced() or tensor.is_meta:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor) and _fake_mode(tensor) is None


def can_be_read(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values that are the same in each run of what is traced now.

    False for fake and torch.func-wrapped tensors, and for the inputs and results of a graph that make_fx records.
    Unlike `has_values`, True for other tensors while something is traced.
    """
    if _is_wrapped(tensor) or _fake_mode(tensor) is not None:
        return False
    return not (type(tensor) in PLAIN_TYPES and _is_traced() and _is_recorded(tensor))


def _is_traced() -> bool:
    """Whether a mode propagates shapes or records operators instead of computing. Modes of users do neither."""
    key = torch._C._TorchDispatchModeKey
    if _has_pre_dispatch_modes():
        return any(torch._ops._get_dispatch_mode_pre_dispatch(of) is not None for of in (key.PROXY, key.FUNCTIONAL))
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(torch._C._get_dispatch_mode(of) is not None for of in (key.FAKE, key.PROXY, key.FUNCTIONAL))


def _fake_mode(tensor: torch.Tensor) -> Any:
    """The mode of a fake tensor, or None; a fake tensor can be used outside its mode."""
    if type(tensor) in PLAIN_TYPES:
        return None
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None


def mode_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """A context for making tensors that operators can combine with `tensor`: its mode, if it is fake."""
    if torch.compiler.is_compiling() or _is_traced():
        return _NOTHING
    return _fake_mode(tensor) or _NOTHING


def as_graph_constants(tensors: Iterable[torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
    """Cached tensors, such as those of a plan, in a form that operators can combine with `like`.

    FakeTensorMode needs fake tensors; make_fx and AOTAutograd turn them into constants of the graph.
    """
    found = list(tensors)
    mode = None if torch.compiler.is_compiling() else _fake_mode(like)
    if torch.compiler.is_compiling() or (mode is None and not _is_traced()):
        return found
    with mode or _NOTHING:
        # as PyTorch does for torch.tensor
        return [torch.ops.aten.lift_fresh(tensor) if type(tensor) in PLAIN_TYPES else tensor for tensor in found]


def outside_transforms(tensor: torch.Tensor | None = None) -> AbstractContextManager[None]:
    """A context for making tensors that are cached across calls.

    They become neither inference tensors nor fake nor torch.func-wrapped, unless `tensor`, from which they are
    computed, is. None: they are computed from host data.
    """
    if (
        torch.is_inference_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (not torch.compiler.is_compiling() and _is_traced())
    ):
        return _outside(tensor)
    return _NOTHING


@contextmanager
def _outside(tensor: torch.Tensor | None) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        # not without transforms: mask functions that torch.vmap evaluates would have none either
        has_transforms = torch._C._functorch.peek_interpreter_stack() is not None
        if has_transforms and (tensor is None or not _is_wrapped(tensor)):
            stack.enter_context(torch._C._DisableFuncTorch())
        if _is_traced() and (tensor is None or not _is_recorded(tensor)):
            stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        yield


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether torch.func wraps a tensor, `functionalize` included."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor)


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Whether modes that trace see what is computed from a tensor."""
    if type(tensor) not in PLAIN_TYPES or _is_wrapped(tensor):
        return True
    # make_fx with tracing_mode="real" has plain tensors
    if "torch.fx.experimental.proxy_tensor" not in sys.modules:
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, has_proxy_slot

    mode = get_proxy_mode()
    return mode is not None and has_proxy_slot(tensor, mode.tracer)


def is_transformed(*values: Any) -> bool:
    """Whether torch.func maps or differentiates one of the values, which then is a tensor without memory."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return False
    if forward_ad._current_level >= 0:
        return True
    for value in values:
        tensor = value
        while isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            if torch._C._functorch.is_batchedtensor(tensor) or tensor.requires_grad:
                return True
            tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def refuse_transforms(backend: str | None, *values: Any) -> None:
    """RuntimeError if torch.func maps or differentiates one of the values, which only `reference` supports.

    backend  of the call; None for a function without this argument
    """
    if is_transformed(*values):
        what = "this function" if backend is None else f'backend "{backend}"'
        other = "" if backend is None else '; or use backend="reference", which supports all transforms'
        raise RuntimeError(
            f"{what} cannot be transformed by torch.func.vmap, grad, vjp, jvp and others: differentiate it by "
            f"torch.autograd.grad, and make a mapped axis part of the batch or heads{other}"
        )


def refuse_export(name: str) -> None:
    """RuntimeError in a graph of torch.export or torch.jit, for a function whose calls make plans."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        raise RuntimeError(
            f"{name} cannot be in a graph of torch.export or torch.jit, since each call makes a plan: leave it out of "
            "the graph"
        )


@functools.cache
def runs_triton(index: int | None) -> bool:
    """Whether a GPU can run Triton kernels. Cached: neither the device nor the installation changes."""
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(index) < (8, 0):
        return False
    import triton

    return not triton.knobs.runtime.interpret


def has_autocast(kind: str) -> bool:
    """Whether devices of a type have autocast. Those without, such as meta, raise errors where it is mentioned."""
    return kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which a caller's autocast does not choose the types of products."""
    return torch.autocast(device.type, enabled=False) if has_autocast(device.type) else _NOTHING


def is_without_autocast(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU and autocast is off. After False, check the slower torch.is_autocast_enabled."""
    # covers CUDA, but not every device type
    return tensor.is_cuda and not torch._C._is_any_autocast_enabled()


def is_on_current_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the current GPU or on no GPU; a third of the time of `on_device`."""
    # CUDA is initialized, since the tensor exists; torch.cuda.current_device would check that first
    return not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice()


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """A context in which a GPU is the current one, where Triton launches."""
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
        return _NOTHING
    return torch.cuda.device(device)


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_OUTSIDE = "layouts are built by NumPy on the host: build this one outside the compiled function, once, and pass it in"


def untraced(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorator: torch.compile runs the function without tracing it, or with fullgraph=True says to call it outside.

    As torch.compiler.disable, which imports the compiler: that takes seconds, and nothing is traced before.
    """
    disabled: list[Callable[_Arguments, _Result]] = []

    @functools.wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            # in two steps: where this runs while torch.compile traces the caller, torch 2.11 warns of a bound method
            # that it would have to keep across the call
            made = torch.compiler.disable(function, reason=_OUTSIDE)
            disabled.append(made)
        return disabled[0](*args, **kwargs)

    # what torch.compile reads of a function that is not to be traced
    for name, value in (("_torchdynamo_disable", True), ("_torchdynamo_disable_msg", _OUTSIDE)):
        setattr(run, name, value)
    return run
