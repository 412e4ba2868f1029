"""Calls that reach every configuration of the launch tables, and the configurations that a call chooses.

`known` evaluates the tables for all arguments that occur on a GPU; `cover` collects calls until each configuration is
reached by each kind of call that can reach it. The choices of a call are read from its launches, which need not run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.dispatch import MAX_FINE_HEAD_DIM
from blocksparse_flash.kernels import arguments, schedule
from blocksparse_flash.kernels.arguments import Tuning
from blocksparse_flash.kernels.hopper import backward as hopper_backward
from blocksparse_flash.kernels.hopper import backward_dq, fine_backward, fine_forward, wide_backward
from blocksparse_flash.kernels.hopper import forward as hopper_forward
from blocksparse_flash.kernels.inputs import BackwardInputs
from blocksparse_flash.kernels.triton import backward, forward, pair_bias_gradient, split_kv
from blocksparse_flash.plan_format import FINE_TILE, GATHERED_TILE, TILE
from blocksparse_flash.runtime import launch
from blocksparse_flash.score_mods import Scores

HALF, SINGLE = torch.bfloat16, torch.float32
# padded head dimensions; `hopper` pads to at least 64
DIMS, HOPPER_DIMS = (16, 32, 64, 128, 256), (64, 128, 256)
Key = tuple[Any, ...]


class Gpu(NamedTuple):
    """Properties of a device that launch tables use."""

    major: int
    shared_memory: int
    n_sms: int


A100, A10, H200, B200 = Gpu(8, 166912, 108), Gpu(8, 101376, 72), Gpu(9, 232448, 132), Gpu(10, 232448, 148)


def this_gpu() -> Gpu:
    """The current CUDA device."""
    return Gpu(*arguments.device_limits(torch.cuda.current_device()), launch.num_sms(torch.cuda.current_device()))


@dataclass(frozen=True)
class Variant:
    """Options of a call besides its shape.

    mode   "dense"; "causal"; "blocks": blocks of 128 and a window; "blocks-causal"; "heads": blocks of 64, different
           for each head; "long": global tokens, whose rows and columns are split; "fine": blocks of 16
    group  query heads per KV head
    tile   tokens per side of a tile of the plan
    v_dim  head dimension of the values, None for that of the keys
    """

    name: str
    mode: str = "blocks"
    group: int = 1
    has_lengths: bool = False
    dropout_p: float = 0.0
    has_sinks: bool = False
    softcap: float | None = None
    has_slopes: bool = False
    has_bias: bool = False
    has_pairs: bool = False
    deterministic: bool = False
    tile: int = TILE
    v_dim: int | None = None

    @property
    def has_scores(self) -> bool:
        """Whether the call uses a score mod."""
        return self.has_sinks or self.softcap is not None or self.has_slopes or self.has_bias or self.has_pairs


PLAIN = [
    Variant("dense", "dense"),
    Variant("causal", "causal"),
    Variant("blocks"),
    Variant("heads-group", "heads", group=2),
    Variant("blocks-lengths", has_lengths=True),
    Variant("dense-lengths-group", "dense", group=2, has_lengths=True),
    Variant("causal-lengths", "causal", has_lengths=True),
    Variant("causal-group", "causal", group=2),
    Variant("blocks-sinks", has_sinks=True),
]
SCORE_MODS = [
    Variant("softcap", softcap=3.0),
    Variant("slopes-causal", "causal", has_slopes=True),
    Variant("bias", has_bias=True),
    Variant("everything", "heads", group=2, has_lengths=True, has_sinks=True, softcap=4.0, has_slopes=True,
    has_bias=True, has_pairs=True),
    Variant("pairs-causal", "causal", has_pairs=True),
]  # fmt: skip
DROPOUT = [
    Variant("dropout", dropout_p=0.2),
    Variant("dropout-causal-lengths-group", "causal", group=2, has_lengths=True, dropout_p=0.3),
    Variant("dropout-softcap-dense", "dense", dropout_p=0.2, softcap=3.0),
]
PORTABLE_FINE = [
    Variant("fine-group", "fine", group=2, tile=FINE_TILE),
    Variant("fine", "fine", tile=FINE_TILE),
    Variant("fine-heads-lengths-group", "heads", group=2, has_lengths=True, tile=FINE_TILE),
    Variant("fine-dropout", dropout_p=0.2, tile=FINE_TILE),
    Variant("fine-dropout-softcap", dropout_p=0.2, softcap=3.0, tile=FINE_TILE),
    Variant("fine-pairs", "fine", has_pairs=True, tile=FINE_TILE),
    Variant("fine-sinks-softcap-slopes", "blocks-causal", has_sinks=True, softcap=3.0, has_slopes=True, tile=FINE_TILE),
]
# values narrower than keys, beyond head_dim 128
NARROW = [Variant("narrow", v_dim=128), Variant("narrow-causal-group", "causal", group=2, v_dim=128)]
ALL = [*PLAIN, *SCORE_MODS, *DROPOUT, *PORTABLE_FINE]
# for head dimensions that are padded to others: every part of a kernel once
FEW = [*(ALL[i] for i in (1, 2, 5, 12, 15)), DROPOUT[2], *PORTABLE_FINE]
HOPPER = [
    *PLAIN,
    Variant("softcap-causal", "causal", softcap=3.0),
    Variant("softcap-sinks-lengths", softcap=3.0, has_lengths=True, has_sinks=True),
    Variant("softcap-dense-lengths", "dense", softcap=3.0, has_lengths=True),
    Variant("softcap-slopes", softcap=3.0, has_slopes=True),
    Variant("slopes-causal-group", "causal", group=2, has_slopes=True),
    Variant("long-sinks", "long", has_sinks=True),
    Variant("deterministic-softcap-slopes", softcap=3.0, has_slopes=True, deterministic=True),
    Variant("deterministic-slopes-causal-group", "causal", group=2, has_slopes=True, deterministic=True),
    Variant("deterministic-slopes-causal-lengths", "causal", has_lengths=True, has_slopes=True, deterministic=True),
    Variant("deterministic-slopes-lengths", has_lengths=True, has_slopes=True, deterministic=True),
    Variant("long", "long"),
    Variant("long-lengths-group", "long", group=2, has_lengths=True),
    Variant("deterministic", deterministic=True),
    Variant("deterministic-dense", "dense", deterministic=True),
    Variant("deterministic-causal-group", "causal", group=2, deterministic=True),
    Variant("deterministic-long", "long", deterministic=True),
    Variant("deterministic-softcap-dense", "dense", softcap=3.0, deterministic=True),
    Variant("deterministic-softcap-causal-lengths", "causal", softcap=3.0, has_lengths=True, deterministic=True),
    Variant("deterministic-softcap-lengths", softcap=3.0, has_lengths=True, deterministic=True),
    Variant("deterministic-dense-lengths", "dense", has_lengths=True, deterministic=True),
    Variant("deterministic-heads-lengths", "heads", has_lengths=True, deterministic=True),
    Variant("bias", has_bias=True),
    Variant("bias-lengths-group", group=2, has_bias=True, has_lengths=True),
    Variant("bias-long", "long", has_bias=True),
    Variant("bias-slopes-causal-group", "blocks-causal", group=2, has_bias=True, has_slopes=True),
    Variant("bias-slopes-lengths", has_bias=True, has_slopes=True, has_lengths=True),
    Variant("bias-softcap-slopes-sinks", has_bias=True, softcap=3.0, has_slopes=True, has_sinks=True),
    Variant("bias-long-group", "long", group=2, has_bias=True),
    Variant("bias-deterministic-long-lengths", "long", has_lengths=True, has_bias=True, deterministic=True),
    Variant("fine", "fine", tile=FINE_TILE),
    Variant("fine-causal-lengths", "blocks-causal", has_lengths=True, tile=FINE_TILE),
    Variant("fine-long", "long", tile=FINE_TILE),
    Variant("fine-heads-lengths-group", "heads", group=2, has_lengths=True, tile=FINE_TILE),
    Variant("fine-softcap-sinks", "fine", softcap=3.0, has_sinks=True, tile=FINE_TILE),
    Variant("fine-slopes-lengths", "fine", has_slopes=True, has_lengths=True, tile=FINE_TILE),
    Variant("gathered-softcap-slopes", "fine", softcap=3.0, has_slopes=True, tile=GATHERED_TILE),
    Variant("gathered-slopes-lengths", "blocks-causal", has_slopes=True, has_lengths=True, tile=GATHERED_TILE),
    Variant("gathered", "fine", tile=GATHERED_TILE),
    Variant("gathered-causal-lengths", "blocks-causal", has_lengths=True, tile=GATHERED_TILE),
    Variant("gathered-long-group", "long", group=2, tile=GATHERED_TILE),
    Variant("gathered-heads-lengths-group", "heads", group=2, has_lengths=True, tile=GATHERED_TILE),
]


@dataclass(frozen=True)
class Call:
    """One call of a backend, forward and backward."""

    backend: str
    # batch, heads, q_len, kv_len
    shape: tuple[int, int, int, int]
    head_dim: int
    dtype: torch.dtype
    variant: Variant
    scale: float | None = None

    def __str__(self) -> str:
        words = [self.backend, "x".join(map(str, self.shape)), f"d{self.head_dim}", str(self.dtype).split(".")[1]]
        return "-".join([*words, self.variant.name, f"scale{self.scale}"])

    @property
    def kv_heads(self) -> int:
        return self.shape[1] // self.variant.group

    @property
    def v_dim(self) -> int:
        return self.head_dim if self.variant.v_dim is None else self.variant.v_dim

    @property
    def causal(self) -> bool:
        return self.variant.mode.endswith("causal")

    def layout(self) -> BlockLayout | None:
        _, heads, q_len, kv_len = self.shape
        return _layout(self.variant.mode, heads if self.variant.mode == "heads" else 1, q_len, kv_len)


@functools.lru_cache(maxsize=256)
def _layout(mode: str, heads: int, q_len: int, kv_len: int) -> BlockLayout | None:
    lengths = (q_len, kv_len)
    if mode in ("dense", "causal"):
        return None
    if mode == "fine":
        return masks.random(lengths, density=0.2, block_size=16, seed=q_len)
    if mode == "long":
        return masks.local(lengths, window=40) | masks.global_tokens(lengths, tokens=3)
    if mode == "heads":
        chosen = torch.rand(heads, -(-q_len // 64), -(-kv_len // 64), generator=torch.Generator().manual_seed(q_len))
        # some rows have no block
        chosen[:, ::5] = 1.0
        return BlockLayout.from_block_mask(chosen < 0.4, q_len, kv_len, block_size=64)
    return masks.local(lengths, window=40) | masks.random(lengths, density=0.4, seed=q_len)


# ---- configurations of a call ----


def _columns_of(rest: dict[str, Any]) -> int | tuple[int, int]:
    """Columns of a Hopper kernel: the larger number of those of q and v, or both if one of them has a tail."""
    columns = rest["COLS"], rest["COLS_V"]
    return columns if any(each % 3 == 0 for each in columns) else max(columns)


def keys_of(each: launch.Launch, tensors: tuple[Any, ...]) -> Iterator[Key]:
    """The configurations that a launch uses."""
    rest, name = each._rest, each._kernel.fn.__name__.removesuffix("_kernel")
    names = [argument for argument in each._kernel.arg_names if argument not in rest]
    given = dict(zip(names, tensors, strict=True))
    # of the Hopper kernels
    if "ptrs" in given:
        given |= given["ptrs"]._asdict()
    steps = tuple(rest[word] for word in ("num_warps", "num_stages") if word in rest)
    constants = rest.get("C", rest.get("KEYS"))
    dims = rest if constants is None else constants._asdict()
    dim = max(dims.get("DIM", 0), dims.get("DIM_V", 0))
    if "C" in rest:
        steps = (constants.BLOCK_Q, constants.BLOCK_KV, *steps)
    if name in ("forward", "keys", "queries"):
        yield name, dim, given["q_ref"].element_size(), constants.TMA, constants.TILE, *steps
    elif name == "pair_bias":
        yield name, dim, given["q_ptr"].element_size(), *steps
    elif name == "joint":
        blocks = [side for word in ("KEYS", "QUERIES") for side in (rest[word].BLOCK_Q, rest[word].BLOCK_KV)]
        yield name, dim, constants.TMA, constants.TILE, *blocks, *steps
    elif name == "split_kv":
        yield name, dim, given["q_ptr"].element_size(), constants.TILE, *steps
        yield name, dim, "split" if rest["IS_SPLIT"] else "whole"
    elif name == "preprocess":
        outputs = "lse_delta_pairs_ptr", "lse_delta_rows_ptr", "cleared_ptr", "tile_counter_ptr"
        yield name, *(given[word] is not None for word in outputs)
    elif name == "hopper_forward":
        dim = _columns_of(rest)
        has = tuple(given[word] is not None for word in ("records_ptr", "kv_lengths_ptr"))
        yield name, dim, *has, rest["CONFIG"]
        yield name, dim, "cap" if rest["cap"] is not None else "no cap"
        has_waves = rest["n_lines"] * rest["n_batch_heads"] > each._grid[0]
        yield from ((name, dim, word) for word in _features(rest, given, has_waves=has_waves))
    elif name == "hopper_backward":
        dim = _columns_of(rest)
        has = tuple(given[word] is not None for word in ("records_ptr", "kv_lengths_ptr"))
        block_q = each._factories[0]._arguments[2][2]
        yield name, dim, *has, rest["cap"] is not None, block_q, rest["KV_STAGES"]
        yield from ((name, dim, word) for word in _features(rest, given))
        if given["dq_sum_ptr"] is None:
            yield name, dim, "dq in a launch of its own"
        if given["dk_sum_ptr"] is not None:
            yield name, dim, "sums over heads"
    elif name in ("wide_dkdv", "hopper_dq"):
        dim = _columns_of(rest)
        has = tuple(given[word] is not None for word in ("records_ptr", "kv_lengths_ptr"))
        yield name, dim, *has, rest["cap"] is not None
        yield from ((name, dim, word) for word in _features(rest, given))
    elif name.startswith("fine_"):
        # the block of q or k has all columns, the other one too unless it is loaded by tiles of 16
        dim = max(factory._arguments[2][-1] for factory in each._factories if factory is not None)
        changes = rest["cap"] is not None or given["slopes_ptr"] is not None
        yield name, dim, given["kv_lengths_ptr"] is not None, rest["GATHERED"], changes, rest["maxnreg"]
        yield name, dim, "split" if rest["num_splits"] > 1 else "whole"
    elif name in ("combine", "combine_rows", "sum_splits", "postprocess"):
        yield name, dim


def _features(rest: dict[str, Any], given: dict[str, Any], *, has_waves: bool = False) -> Iterator[str]:
    if rest["num_splits"] > 1:
        yield "split"
    if given["tile_counter_ptr"] is not None:
        yield "queued"
    else:
        yield "static waves" if has_waves else "one round"
    if given["bias_ptr"] is not None:
        yield "bias"
    if given.get("bias_sums_ptr") is not None:
        yield "sums of a bias"
        if rest["num_splits"] > 1:
            yield "sums of a bias, split"
        if given["kv_lengths_ptr"] is not None:
            yield "sums of a bias, kv_lengths"


@contextlib.contextmanager
def recorded(*, runs: bool) -> Iterator[set[Key]]:
    """Collects the configurations of all launches inside; runs: whether kernels are launched."""
    found: set[Key] = set()
    original = launch.Launch.__call__

    def record(self: launch.Launch, *tensors: Any) -> None:
        found.update(keys_of(self, tensors))
        if runs:
            original(self, *tensors)

    with mock.patch.object(launch.Launch, "__call__", record):
        yield found


@contextlib.contextmanager
def _unfilled_memory() -> Iterator[None]:
    """Turns off the filling of new memory, which is slow and, since nothing is read, useless here."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before


@functools.lru_cache(maxsize=8192)
def chosen(call: Call, gpu: Gpu) -> frozenset[Key]:
    """The configurations that a call would use on a GPU; launches nothing."""
    batch, heads, q_len, kv_len = call.shape
    variant, dim, v_dim = call.variant, call.head_dim, call.v_dim
    modules = (
        forward, backward, split_kv, hopper_forward, hopper_backward, backward_dq, wide_backward, fine_forward,
        fine_backward,
    )  # fmt: skip
    for launches_of in (
        forward.forward_launch,
        backward.backward_launches,
        split_kv.split_kv_launches,
        hopper_forward.forward_launches,
        hopper_backward.backward_launches,
        wide_backward.backward_launches,
        fine_forward.forward_launches,
        fine_backward.backward_launches,
    ):
        launches_of.cache_clear()
    with contextlib.ExitStack() as stack, recorded(runs=False) as found:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "num_sms", lambda _: gpu.n_sms))
        stack.enter_context(mock.patch.object(arguments, "device_limits", lambda _: gpu[:2]))
        stack.enter_context(_unfilled_memory())
        q, k, v, dout = (
            torch.empty(batch, n, length, each, dtype=call.dtype)
            for n, length, each in (
                (heads, q_len, dim),
                (call.kv_heads, kv_len, dim),
                (call.kv_heads, kv_len, v_dim),
                (heads, q_len, v_dim),
            )
        )
        layout = call.layout()
        plan = [] if layout is None else list(layout.plan("cpu", causal=call.causal, tile=variant.tile))
        lengths = torch.empty(batch, dtype=torch.int32) if variant.has_lengths else None
        scale = 0.125 if call.scale is None else call.scale
        seed = torch.empty(1, dtype=torch.int64) if variant.dropout_p else None
        options: tuple[Any, ...] = (plan, lengths, seed, scale, call.causal and not plan, variant.dropout_p)
        wanted: tuple[Any, ...] = ()
        if variant.has_scores:
            options = (*options, _scores(call, plan))
            # `hopper` leaves the gradient of slopes to the kernels of `triton`
            has_slopes = variant.has_slopes and call.backend != "hopper"
            wanted = ([variant.has_sinks, has_slopes, variant.has_bias, variant.has_pairs],)
        if call.backend == "hopper" and variant.tile < TILE:
            out, lse = fine_forward.forward(q, k, v, *options)
            inputs = BackwardInputs(dout, torch.empty_like(lse), q, k, v, out, lse)
            fine_backward.backward(inputs, *options, *wanted)
            return frozenset(found)
        if call.backend == "hopper":
            out, lse = hopper_forward.forward(q, k, v, *options)
            inputs = BackwardInputs(dout, torch.empty_like(lse), q, k, v, out, lse)
            hopper_backward.backward(inputs, *options, *wanted, deterministic=variant.deterministic)
            return frozenset(found)
        out, lse = forward.forward(q, k, v, *options)
        inputs = BackwardInputs(dout, torch.empty_like(lse), q, k, v, out, lse)
        backward.backward(inputs, *options, *wanted)
    return frozenset(found)


def _scores(call: Call, plan: list[Tensor]) -> Scores:
    """Score mods with uninitialized values, which are never read."""
    (_, heads, q_len, kv_len), variant = call.shape, call.variant
    sinks, slopes = (torch.empty(heads) if has else None for has in (variant.has_sinks, variant.has_slopes))
    bias, index = None, list[Tensor]()
    if variant.has_bias:
        cells, n_tiles = TILE // (64 if variant.mode == "heads" else 128), plan[1].shape[0]
        of_tiles = torch.zeros(n_tiles, cells, cells, dtype=torch.int32)
        places = torch.zeros(n_tiles, 1, dtype=torch.int64)
        bias, index = torch.empty(1, heads, n_tiles), [of_tiles, of_tiles, places, places]
    pairs = torch.empty(1, heads, q_len, kv_len) if variant.has_pairs else None
    return Scores(sinks, slopes, bias, index, variant.softcap or 0.0, pairs, call.causal)


# ---- configurations of the tables ----


def known(gpu: Gpu) -> set[Key]:
    """Every configuration that the tables can choose on a GPU."""
    return {*_known_portable(gpu), *(_known_hopper() if gpu.major == 9 else ())}


def _known_portable(gpu: Gpu) -> Iterator[Key]:
    flags = (False, True)
    for dim, size, tile in itertools.product(DIMS, (2, 4), (TILE, FINE_TILE)):
        if tile == FINE_TILE and dim > MAX_FINE_HEAD_DIM:
            continue
        for tma, dropout, modifies_scores in itertools.product(
            flags[: 1 + (size == 2 and gpu.major >= 9)], flags, flags
        ):
            made = Tuning(dim, size, gpu.major, tma, dropout, gpu.shared_memory, modifies_scores)
            found = [("forward", forward.config(made, narrow=narrow)) for narrow in flags]
            for smaller_dim in (min(dim, 128), dim):
                narrower = made._replace(smaller_dim=smaller_dim)
                found.append(("keys", backward.config_keys(narrower)))
                found.append(("queries", backward.config_queries(narrower)))
            # smaller tiles always have narrow blocks
            for name, each in found[tile == FINE_TILE :]:
                yield name, dim, size, tma, tile, *dataclasses.astuple(each.within(tile))
            yield "pair_bias", dim, size, *dataclasses.astuple(pair_bias_gradient.config(dim, size, major=gpu.major))
            for group in (1, 2):
                both = backward.config_joint(made._replace(group=group))
                if both:
                    keys, queries = both
                    blocks = keys.block_q, keys.block_kv, queries.block_q, queries.block_kv
                    yield "joint", dim, tma, tile, *blocks, keys.num_warps, keys.num_stages
        for n_rows, modifies_scores in itertools.product((1, 17, 33, 65), flags):
            of_rows = split_kv.config(
                n_rows, dim, size, shared_memory=gpu.shared_memory, major=gpu.major, modifies_scores=modifies_scores
            )
            yield "split_kv", dim, size, tile, *dataclasses.astuple(of_rows)
        yield from (("split_kv", dim, word) for word in ("split", "whole"))
        yield "combine", dim
    yield "preprocess", True, False, False, False


def _known_hopper() -> Iterator[Key]:
    flags = (False, True)
    of_rows_dims = [*HOPPER_DIMS, (96, 64), (96, 96), (192, 128), (192, 192)]
    of_cols_dims = [*HOPPER_DIMS[:2], (96, 64), (64, 96), (96, 96), (96, 128), (128, 96)]
    for dim, has_layout, has_lengths, three_warpgroups in itertools.product(of_rows_dims, flags, flags, flags):
        if three_warpgroups and (has_layout or has_lengths):
            continue
        columns = dim if isinstance(dim, tuple) else (dim, dim)
        of_rows = hopper_forward.config(columns, has_layout, has_lengths, three_warpgroups)
        yield "hopper_forward", dim, has_layout, has_lengths, of_rows
    for dim in of_rows_dims:
        words = "split", "queued", "one round", "static waves", "cap", "no cap", "bias"
        yield from (("hopper_forward", dim, word) for word in words)
        yield "combine_rows", dim[1] if isinstance(dim, tuple) else dim
        columns = dim if isinstance(dim, tuple) else (dim, dim)
        if max(columns) > schedule.MAX_JOINT_HEAD_DIM:
            yield from _known_sums("wide_dkdv", dim)
            yield from _known_sums("hopper_dq", dim)
            yield from (("sum_splits", max(columns)), ("sum_splits", columns[0]))
    for dim in of_cols_dims:
        columns = dim if isinstance(dim, tuple) else (dim, dim)
        for *has, has_fewer_queries in itertools.product(flags, flags, flags):
            of_cols = hopper_backward.config(columns, has_fewer_queries)
            yield "hopper_backward", dim, *has, has_fewer_queries, of_cols.block_q, of_cols.kv_stages
        # with slopes, and a bias or dq in a launch of its own
        narrow = hopper_backward.config(columns, True)
        for has in itertools.product(flags, flags):
            yield "hopper_backward", dim, *has, False, narrow.block_q, narrow.kv_stages
        words = ("split", "queued", "one round", "bias", "dq in a launch of its own", "sums over heads")
        words += "sums of a bias", "sums of a bias, split", "sums of a bias, kv_lengths"
        yield from (("hopper_backward", dim, word) for word in words)
        yield from _known_sums("hopper_dq", dim)
        yield from (("sum_splits", max(columns)), ("sum_splits", columns[0]), ("postprocess", columns[0]))
    yield from (("preprocess", *each) for each in itertools.product([False], [True], flags, flags))
    for dim, has_lengths, is_gathered, modifies_scores in itertools.product((64, 128), flags, flags, flags):
        kind = {"is_gathered": is_gathered, "modifies_scores": modifies_scores}
        of_rows = fine_forward.config(dim, **kind).registers
        for name, registers in zip(
            ("fine_forward", "fine_dkdv", "fine_dq"), (of_rows, *fine_backward.registers(dim, **kind)), strict=True
        ):
            yield name, dim, has_lengths, is_gathered, modifies_scores, registers
    for name, dim, word in itertools.product(("fine_forward", "fine_dkdv", "fine_dq"), (64, 128), ("split", "whole")):
        yield name, dim, word


def _known_sums(name: str, dim: Any) -> Iterator[Key]:
    words = ("split", "queued", "one round", "bias")
    if name == "hopper_dq":
        words += "sums of a bias", "sums of a bias, split", "sums of a bias, kv_lengths"
    yield from ((name, dim, word) for word in words)
    yield from ((name, dim, *has) for has in itertools.product((False, True), (False, True), (False, True)))


# ---- calls that reach all configurations ----


def candidates(gpu: Gpu) -> Iterator[Call]:
    """Calls of every kind, cheap ones first."""
    # few and many tile rows; many keys, so that tensors of small heads are large enough for TMA; enough causal rows
    shapes = [
        (2, 20, 300, 300), (2, 20, 300, 900), (2, 20, 300, 1600), (4, 12, 300, 1100), (8, 50, 300, 300),
        (1, 4, 400, 16000),
    ]  # fmt: skip
    for dim, dtype in itertools.product(DIMS, (HALF, SINGLE)):
        variants = ALL if dim in (64, 128) and dtype == HALF else FEW + NARROW * (dim > 128)
        if dim > MAX_FINE_HEAD_DIM:
            variants = [each for each in variants if each.tile == TILE]
        # odd head dimensions, whose rows TMA cannot load
        for odd, shape, variant in itertools.product((0, dim // 2 - 1), shapes, variants):
            yield Call("triton", shape, dim - odd, dtype, variant)
        # split-KV: 16, 32, 64 and 128 rows, of the queries of a head group; one split and many
        for q_len, kv_len, variant in itertools.product((3, 12, 30, 60), (1100, 5000), variants):
            # enough rows for the float32 error of the reference to be typical
            for heads in (8, 48):
                yield Call("triton", (2, heads, q_len, kv_len), dim, dtype, variant)
    if gpu.major != 9:
        return
    # one round of programs and many; rows of 192 queries
    small = [
        (2, 4, 300, 300),
        (4, 20, 300, 500),
        (2, 66, 190, 700),
        (1, 4, 300, 17000),
        (1, 4, 4096, 4096),
        (2, 20, 2048, 2048),
    ]
    for dim, shape, variant in itertools.product((16, *HOPPER_DIMS), small, HOPPER):
        if variant.tile < TILE and dim > MAX_FINE_HEAD_DIM:
            continue
        yield Call("hopper", shape, dim, HALF, variant)
    # 96 columns in either direction, in the backward alone, 192
    dims = ((96, 96), (80, 80), (72, 40), (40, 72), (80, 128), (128, 72), (192, 192), (160, 160), (192, 128))
    for (dim, v_dim), shape, variant in itertools.product(dims, small, HOPPER):
        if variant.tile == TILE:
            yield Call("hopper", shape, dim, HALF, replace(variant, name=f"{variant.name}-{dim}-{v_dim}", v_dim=v_dim))


@functools.lru_cache(maxsize=4)
def cover(gpu: Gpu) -> tuple[Call, ...]:
    """Calls that reach every configuration with every variant that can reach it.

    Each with a negative and a positive scale; the first call that reaches a configuration also with scale 0.
    """
    reached: set[tuple[Key, str]] = set()
    calls: list[Call] = []
    for call in candidates(gpu):
        # the choice does not depend on the scale
        keys = chosen(call, gpu)
        pairs = {(key, call.variant.name) for key in keys}
        if pairs <= reached:
            continue
        scales = [-0.2, 0.15]
        if not keys <= {key for key, _ in reached}:
            scales.append(0.0)
        reached |= pairs
        calls += [replace(call, scale=scale) for scale in scales]
    return tuple(calls)


def few(gpu: Gpu) -> tuple[Call, ...]:
    """Calls of `cover` that reach every configuration once: greedily, those that reach most others first."""
    reached = {call: chosen(call, gpu) for call in cover(gpu)}
    left = set().union(*reached.values())
    calls: list[Call] = []
    while left:
        # of equals the smallest
        calls.append(max(reached, key=lambda call: (len(reached[call] & left), -math.prod(call.shape))))
        left -= reached[calls[-1]]
    return tuple(calls)
