"""The choice of a backend: which one runs a call, and why.

At debug level the logger "blocksparse_flash" writes each distinct decision once, where it is made: on a GPU that is the
first call with tensors of new shapes, strides or types.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .plan.tile_choice import Shares
from .plan_format import BY_KEY_BLOCK, GATHERED_TILE, TILE
from .runtime.tensor_spec import TensorSpec, TensorSpecs, is_tma_loadable, tma_can_load

BACKENDS = ("auto", "hopper", "triton", "eager", "reference")
# what "auto" may choose on a GPU, fastest first
AUTO_ON_GPU = ("hopper", "triton")
# Gluon, the language of the Hopper kernels, changes from release to release
TRITONS_WITH_HOPPER = ("3.6", "3.7", "3.8", "3.9")
# "auto" leaves smaller calls to `triton`, whose launch costs the host less: elements of q and k together. Forward and
# backward with 2^23 on `hopper` and `triton`, us: on the GPU, dense 226 and 301, causal 147 and 206, local 151 and 172;
# by the wall clock, with nothing else between, 474 and 410, 330 and 302, 654 and 528 (H200, 16 heads of 128, bf16).
# Where other work keeps the GPU busy, its time alone counts
MIN_HOPPER_ELEMENTS = 1 << 23
# of the kernels that iterate over tiles of 64 x 64
MAX_FINE_HEAD_DIM = 128
# "auto" also leaves calls with at most this many queries to `triton`, which splits their keys among programs
FEW_QUERIES = 64

NO_DROPOUT = "it has no dropout"
NO_PAIR_BIAS = "it has no pair_bias"
NO_TRITON = "Triton is not installed"
# also where q is a fake CUDA tensor
NO_GPU = "this machine has no CUDA device"
SMALL = "a call this small, or with this few queries, is faster without it"

_LOGGER = logging.getLogger("blocksparse_flash")


class CallSpec(NamedTuple):
    """How one call runs, without its tensors. Chosen once: the forward and the backward use the same one.

    The fields are those of the operators' schema, in its order.

    causal         ignored with a plan, which contains it
    softcap        0.0 for none
    backend        "hopper", "triton", "eager" or "reference"; "auto" in a traced call: see `resolve`
    deterministic  whether results must be bitwise identical in every run
    """

    scale: float
    causal: bool
    dropout_p: float
    softcap: float
    backend: str
    deterministic: bool


class Choice(NamedTuple):
    """A backend with the reasons for it and against the others; see `Explanation`."""

    backend: str
    reason: str
    others: tuple[tuple[str, str], ...]


# ---- what a backend can run ----


@functools.cache
def _why_not_on_gpu(backend: str, index: int | None) -> str | None:
    """Why the kernels of `triton` or `hopper` cannot run on a CUDA device, or None."""
    if importlib.util.find_spec("triton") is None:
        return NO_TRITON
    if not torch.cuda.is_available():
        return NO_GPU
    major, minor = torch.cuda.get_device_capability(index)
    if backend == "triton":
        return None if major >= 8 else f"it needs compute capability 8.0 or later, this GPU has {major}.{minor}"
    if (major, minor) != (9, 0):
        return f"it needs compute capability 9.0, this GPU has {major}.{minor}"
    import triton

    if triton.knobs.runtime.interpret:
        return "Triton's interpreter, which TRITON_INTERPRET=1 asks for, does not support Gluon"
    if ".".join(triton.__version__.split(".")[:2]) not in TRITONS_WITH_HOPPER:
        return f"it supports Triton {', '.join(TRITONS_WITH_HOPPER)}, this is {triton.__version__}"
    return None


def _why_unfit(backend: str, device: torch.device, dtype: torch.dtype, against_hopper: str | None) -> str | None:
    """Why a backend cannot run tensors of this device and dtype, or None."""
    if backend == "hopper":
        if device.type != "cuda":
            return f"it needs a CUDA device, got {device}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it needs float16 or bfloat16, got {dtype}"
        return _why_not_on_gpu(backend, device.index) or against_hopper
    if backend != "triton":
        return None
    if dtype is torch.float64:
        return "it needs float16, bfloat16 or float32, got torch.float64"
    if device.type == "cuda":
        return _why_not_on_gpu(backend, device.index)
    if device.type != "cpu":
        return f"it needs a CUDA device, got {device}"
    if importlib.util.find_spec("triton") is None:
        return NO_TRITON
    import triton

    if triton.knobs.runtime.interpret:
        return None
    return f"it needs a CUDA device (or TRITON_INTERPRET=1, set before import, to interpret it slowly), got {device}"


def _is_loadable(tensor: Tensor | TensorSpec) -> bool:
    if isinstance(tensor, TensorSpec):
        return tma_can_load(tensor.dtype.itemsize, tensor.shape, tensor.strides, tensor.is_aligned)
    return is_tma_loadable(tensor)


def misaligned(tensors: Sequence[Tensor | TensorSpec], dtype: torch.dtype) -> list[str]:
    """Which of q, k, v have strides or an address that TMA cannot load.

    Rows that are not a multiple of 16 bytes do not count, since the kernels copy those, nor do tensors that autocast
    converts to dtype. torch.compile traces this function.
    """
    return [
        name
        for name, tensor in zip(("q", "k", "v"), tensors, strict=False)
        if tensor.shape[3] % 8 == 0 and tensor.dtype == dtype and 0 not in tensor.shape and not _is_loadable(tensor)
    ]


def missing_option(
    *, has_dropout: bool = False, bias_blocks: Sequence[int] | None = None, has_pair_bias: bool = False
) -> str:
    """Which option of a call `hopper` does not have; empty if it has all.

    bias_blocks  the block size of the layout, in calls with block_bias
    """
    if has_dropout:
        return NO_DROPOUT
    if has_pair_bias:
        return NO_PAIR_BIAS
    if bias_blocks is not None and any(side % TILE for side in bias_blocks):
        # its kernels take one number per tile. Dynamo cannot format symbolic integers, and its graphs show no reasons
        got = "" if torch.compiler.is_compiling() else f", got {' x '.join(map(str, bias_blocks))}"
        return f"its block_bias needs blocks whose sides are multiples of {TILE} tokens{got}"
    return ""


def why_not_hopper(tensors: Sequence[Tensor | TensorSpec], dtype: torch.dtype, missing: str = "") -> str | None:
    """Why `hopper` cannot run q, k, v on a GPU as they are, or None. missing: see `missing_option`."""
    if missing:
        return missing
    names = misaligned(tensors, dtype)
    if not names:
        return None
    return (
        f"it needs strides and an address of {names[0]} that are multiples of 16 bytes; {names[0]}.contiguous() or "
        ".clone() has them"
    )


def is_worth_hopper(q_len: int, n_elements: int) -> bool:
    """Whether "auto" should choose `hopper`. n_elements: of q and k."""
    return q_len > FEW_QUERIES and n_elements >= MIN_HOPPER_ELEMENTS


def _too_small(q: Tensor | TensorSpec, k: Tensor | TensorSpec) -> str | None:
    n_elements = sum(tensor.shape[0] * tensor.shape[1] * tensor.shape[2] * tensor.shape[3] for tensor in (q, k))
    return None if is_worth_hopper(q.shape[2], n_elements) else SMALL


def _against_hopper(
    backend: str, tensors: Sequence[Tensor | TensorSpec], dtype: torch.dtype, missing: str
) -> str | None:
    """Why a call on a GPU should not run on `hopper`, or None: it cannot, or, for "auto", it is too small."""
    cannot = why_not_hopper(tensors, dtype, missing)
    return _too_small(*tensors[:2]) if cannot is None and backend == "auto" else cannot


# ---- the choice ----


def choose(backend: str, device: torch.device, dtype: torch.dtype, against_hopper: str | None = None) -> str:
    """The backend of a call; TypeError or ValueError for one that does not exist or cannot run it.

    against_hopper  why `hopper` cannot run the call on a GPU, or should not by "auto"; None if it can
    """
    chosen = _chosen(backend, device, dtype, against_hopper)
    if _LOGGER.isEnabledFor(logging.DEBUG):
        _log(backend, chosen, device, dtype, against_hopper)
    return chosen


def _check_is_str(backend: object) -> None:
    # before it is compared: arrays compare to arrays
    if not isinstance(backend, str):
        raise TypeError(f'backend must be a str, one of {BACKENDS}, got {backend!r}; "auto" chooses')


def _chosen(backend: str, device: torch.device, dtype: torch.dtype, against_hopper: str | None) -> str:
    _check_is_str(backend)
    if backend == "auto":
        if device.type != "cuda":
            return "eager"
        return next((name for name in AUTO_ON_GPU if _why_unfit(name, device, dtype, against_hopper) is None), "eager")
    if backend not in BACKENDS:
        instead = _chosen("auto", device, dtype, against_hopper)
        raise ValueError(f'backend must be one of {BACKENDS}, got "{backend}"; "auto" would use "{instead}"')
    why_not = _why_unfit(backend, device, dtype, against_hopper)
    if why_not is not None:
        instead = _chosen("auto", device, dtype, against_hopper)
        raise ValueError(f'backend="{backend}" cannot run this call: {why_not}. backend="auto" would use "{instead}"')
    return backend


# under torch.compile the answer is computed once and becomes a constant of the graph, as with
# torch.compiler.assume_constant_result, which would import the whole compiler: 3 s at each import
choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=4096)
def _choose_by_specs(backend: str, specs: TensorSpecs, device: torch.device, dtype: torch.dtype, missing: str) -> str:
    """The choice for tensors on a GPU. The GPU and the installation do not change; errors are not cached."""
    return choose(backend, device, dtype, _against_hopper(backend, specs.tensors, dtype, missing))


def decide(
    backend: str, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, specs: TensorSpecs | None, missing: str
) -> str:
    """The backend of a call, as CallSpec has it.

    dtype    in which the call computes
    specs    of q, k and v; None for a call that torch traces, transforms or profiles: sizes may vary, and addresses are
             unknown until the operator runs
    missing  see `missing_option`
    """
    _check_is_str(backend)
    if specs is not None and q.is_cuda:
        return _choose_by_specs(backend, specs, q.device, dtype, missing)
    against_hopper = None
    if q.is_cuda:
        # for "auto", check only what does not depend on addresses or sizes; `resolve` checks the rest when the operator
        # runs
        tensors = (q, k, v) if backend == "hopper" else ()
        against_hopper = why_not_hopper(tensors, dtype, missing)
    chosen = choose(backend, q.device, dtype, against_hopper)
    return "auto" if backend == "auto" and chosen == "hopper" else chosen


def resolve(q: Tensor, k: Tensor, v: Tensor, tile: int) -> str:
    """The backend of a traced call with backend "auto" on a Hopper GPU, once there are addresses and sizes.

    tile  of its plan. Only `hopper` has gathered tiles and plans by key block; it copies tensors that TMA cannot load
    """
    against_hopper = (
        None if tile in (GATHERED_TILE, BY_KEY_BLOCK) else _too_small(q, k) or why_not_hopper((q, k, v), q.dtype)
    )
    chosen = "hopper" if against_hopper is None else "triton"
    if _LOGGER.isEnabledFor(logging.DEBUG):
        _log("auto", chosen, q.device, q.dtype, against_hopper)
    return chosen


def has_fine_tiles(backend: str, head_dim: int, v_dim: int, *, has_block_bias: bool = False) -> bool:
    """Whether calls with a layout may have tiles other than 128 x 128 (block_bias tables exist for 128 x 128 only)."""
    # "auto" is a traced call on a Hopper GPU, see `decide`
    return backend in ("hopper", "triton", "auto") and max(head_dim, v_dim) <= MAX_FINE_HEAD_DIM and not has_block_bias


def takes_selected_plans(backend: str, head_dim: int, v_dim: int, *, has_options: bool) -> bool:
    """Whether the kernels have plans of blocks by key block (plan_format.SelectedPlan).

    has_options  kv_lengths, dropout or score mods
    """
    # "auto" is a traced call on a Hopper GPU, see `decide`
    return backend in ("hopper", "auto") and max(head_dim, v_dim) <= MAX_FINE_HEAD_DIM and not has_options


def fastest_tile(backend: str, shares: Shares, head_dim: int, v_dim: int, *, has_slopes_gradient: bool = False) -> int:
    """The `Plan.tile` of a call with a layout.

    has_slopes_gradient  whether alibi_slopes need a gradient, which `hopper` leaves to the kernels of `triton`
    """
    dim = 64 if max(head_dim, v_dim) <= 64 else 128
    return shares.fastest(dim, "triton" if backend == "triton" or has_slopes_gradient else "hopper")


def has_gradient(option: Tensor | None) -> bool:
    """Whether a backward will compute the gradient of this tensor, such as alibi_slopes."""
    return option is not None and option.requires_grad and torch.is_grad_enabled()


def can_reorder(backend: str, *, has_dropout: bool, has_kv_lengths: bool, has_positions: bool) -> bool:
    """Whether a call with a layout may run in another order of its tokens.

    has_positions  whether scores depend on the positions of tokens, by alibi_slopes or a bias. Random bits of dropout
                   do so too
    """
    return backend in ("hopper", "triton", "auto") and not (has_dropout or has_kv_lengths or has_positions)


def is_deterministic(deterministic: bool | None) -> bool:
    """The argument `deterministic` of a call; None follows torch.are_deterministic_algorithms_enabled()."""
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic


# ---- the reasons, for `explain` ----


def explained_choice(backend: str, tensors: Sequence[Tensor], dtype: torch.dtype, missing: str) -> Choice:
    """The choice for q, k, v with its reasons. missing: see `missing_option`."""
    _check_is_str(backend)
    device = tensors[0].device
    against_hopper = _against_hopper(backend, tensors, dtype, missing) if device.type == "cuda" else None
    chosen, is_named = _chosen(backend, device, dtype, against_hopper), backend != "auto"
    names = (name for name in BACKENDS[1:] if name != chosen)
    others = ((name, _why_not(name, device, dtype, is_named, against_hopper)) for name in names)
    return Choice(chosen, "asked for by name" if is_named else _why(chosen, device), tuple(others))


@functools.lru_cache(maxsize=4096)
def _log(backend: str, chosen: str, device: torch.device, dtype: torch.dtype, against_hopper: str | None) -> None:
    """Writes a decision to the log, the first time it is made."""
    reasons = "asked for by name"
    if backend == "auto":
        faster = AUTO_ON_GPU[: AUTO_ON_GPU.index(chosen)] if chosen in AUTO_ON_GPU else AUTO_ON_GPU
        others = [f"not {name}: {_why_not(name, device, dtype, False, against_hopper)}" for name in faster]
        reasons = "; ".join([_why(chosen, device), *others])
    _LOGGER.debug('backend="%s" runs calls of %s on %s as backend "%s": %s', backend, dtype, device, chosen, reasons)


def _why(backend: str, device: torch.device) -> str:
    """Why "auto" chose a backend."""
    if backend == "hopper":
        return f"q is on {device}, which runs the kernels for compute capability 9.0"
    if backend == "triton":
        return f"q is on {device}, which runs the Triton kernels"
    return f"the backend for every device and type, in memory proportional to the stored blocks; q is on {device}"


def _why_not(backend: str, device: torch.device, dtype: torch.dtype, is_named: bool, against_hopper: str | None) -> str:
    """Why a backend was not chosen. is_named: another was asked for by name."""
    why_not = _why_unfit(backend, device, dtype, against_hopper)
    if why_not is not None:
        return why_not
    if is_named:
        return "could run, but another was asked for by name"
    if backend == "triton" and device.type == "cuda":
        return "could run, but slower than the kernels for this GPU"
    if backend == "triton":
        return "on the CPU it runs in Triton's interpreter, which is for tests: only by name"
    if backend == "eager":
        return "could run, but slower than the kernels"
    return "computes all q_len * kv_len pairs; meant for tests, ask for it by name"


def explained_determinism(deterministic: bool | None, *, varying: str) -> str:
    """Which bits of the results are equal in every run. varying: the gradients that are summed in no fixed order."""
    asked = str(deterministic)
    if deterministic is None:
        asked = f"None: as torch.are_deterministic_algorithms_enabled(), {is_deterministic(None)}"
    if varying:
        return f"bitwise identical in every run except for {varying}, summed in no fixed order (deterministic={asked})"
    return f"bitwise identical in every run, forward and backward (deterministic={asked})"
