"""Compares launches by the cached launcher with launches by Triton: `python -m tests.support.launch_again`.

The arguments must be equal. Needs no GPU: a mock driver records the arguments of each launch. Needs a process of its
own, because the test process runs kernels in the interpreter.
"""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from blocksparse_flash.kernels import arguments as kernel_arguments
from blocksparse_flash.kernels.hopper import backward as hopper_backward
from blocksparse_flash.kernels.hopper import forward as hopper_forward
from blocksparse_flash.kernels.hopper.backward_producer import Pointers as ColPointers
from blocksparse_flash.kernels.hopper.forward_producer import Pointers as RowPointers
from blocksparse_flash.kernels.schedule import WHOLE, Split
from blocksparse_flash.kernels.triton import (
    backward,
    backward_preprocess,
    block_selection,
    forward,
    gather_scatter,
    gather_tokens,
    plan_builder,
    split_kv,
)
from blocksparse_flash.runtime import launcher
from blocksparse_flash.runtime.launch import Launch
from blocksparse_flash.runtime.tensor_spec import specs_of
from blocksparse_flash.score_mods import Scores

LIMITS = (9, 232448)


class PyCUtensorMap:
    """Stand-in for the driver's tensor map: holds the arguments that it was made from."""

    def __init__(self, *made_from: Any) -> None:
        self.made_from = made_from


class Recorder:
    """Stand-in for the compiled launch function: records the arguments of its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)


def install(recorder: Recorder) -> None:
    """Make Triton launch on the recorder. Each launch gets a new stream number, one higher than the last."""
    utils = SimpleNamespace(
        launch=recorder,
        fill_tma_descriptor=PyCUtensorMap,
        fill_tma_descriptor_tiled=PyCUtensorMap,
        load_binary=lambda *_: (1, 2, 100, 0, 1024),
        unload_module=lambda _: None,
        build_signature_metadata=lambda types: ", ".join(types).encode(),
        get_device_properties=lambda _: {"max_shared_mem": LIMITS[1]},
    )
    names = {"PyCUtensorMap": PyCUtensorMap, "PyKernelArg": SimpleNamespace, "ARG_CONSTEXPR": 0, "ARG_KERNEL": 1}
    vars(nvidia).update(
        names, ARG_TUPLE=2, library_dirs=list, compile_module_from_src=lambda **_: SimpleNamespace(launch=recorder)
    )
    streams = iter(range(1000, 10**6))
    active: Any = SimpleNamespace(
        utils=utils,
        launcher_cls=nvidia.CudaLauncher,
        get_current_device=lambda: 0,
        get_current_stream=lambda _: next(streams),
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    driver.set_active(active)


def comparable(arguments: Any) -> Any:
    """Launch arguments with tensors replaced by their addresses and tensor maps by what they were made from."""
    if isinstance(arguments, (list, tuple)):
        return [comparable(each) for each in arguments]
    if isinstance(arguments, torch.Tensor):
        return arguments.data_ptr()
    if isinstance(arguments, PyCUtensorMap):
        return comparable(arguments.made_from)
    return arguments


def check(recorder: Recorder, run: Launch, first: tuple[Any, ...], others: list[tuple[Any, ...]]) -> None:
    """Launch with the first arguments, then with others, and compare each launch with one through Triton."""
    knobs = triton.knobs.runtime
    run(*first)
    assert len(recorder.calls) == 1
    bound = run._run
    assert isinstance(bound, launcher.Bound), "Triton's launcher has changed: see blocksparse_flash/runtime/launcher.py"
    compiled, grid, descriptor_factories, values = bound._compiled, bound._grid, bound._factories, bound._values
    for arguments in others:
        recorder.calls.clear()
        run(*arguments)
        # without hooks, for which Triton's launch would pass metadata
        with mock.patch.multiple(knobs, launch_enter_hook=None, launch_exit_hook=None):
            compiled[grid](*launcher.described(arguments, descriptor_factories), *values)
        ours, theirs = (comparable(call) for call in recorder.calls)
        # each launch queries the current stream
        assert theirs[3] == ours[3] + 1
        ours[3] = theirs[3] = None
        assert ours == theirs, f"\n{ours}\n{theirs}"
    launched: list[Any] = []
    with mock.patch.object(knobs, "launch_enter_hook", launched.append):
        run(*first)
    assert launched.append in recorder.calls[-1], "launch hooks, which profilers use, must be passed on"


def check_keeps_no_tensors(run: Launch, shape: tuple[int, ...], rest: tuple[Any, ...]) -> None:
    """The launcher keeps no reference to new tensors: they are freed even without garbage collection."""
    gc.disable()
    tensors = [torch.empty(shape, dtype=torch.bfloat16) for _ in "qkv"]
    out, lse = torch.empty_like(tensors[0]), torch.empty(shape[:3])
    refs = [weakref.ref(tensor) for tensor in (*tensors, out, lse)]
    run(*tensors, *rest, out, lse)
    del tensors, out, lse
    assert all(ref() is None for ref in refs), "the launcher keeps its tensors alive"
    gc.enable()


def qkv_tensors(shape: tuple[int, ...], n: int) -> list[tuple[torch.Tensor, ...]]:
    """n times q, k and v at different addresses; in the last one, all three are the same tensor."""
    distinct = [tuple(torch.empty(shape, dtype=torch.bfloat16) for _ in "qkv") for _ in range(n - 1)]
    same = torch.empty(shape, dtype=torch.bfloat16)
    return [*distinct, (same, same, same)]


def main() -> None:
    if triton.knobs.runtime.interpret:
        raise SystemExit("TRITON_INTERPRET=1 interprets the kernels; unset it to compile them")
    recorder = Recorder()
    install(recorder)
    shape = (1, 2, 256, 64)
    out, lse = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape[:3])
    # more than MAX_TENSOR_MAPS below
    calls = qkv_tensors(shape, 6)
    records = torch.zeros(1, 1, 2, 8, dtype=torch.int32)
    indices = torch.zeros(9, dtype=torch.int32)
    plan = [records, indices, indices, records, indices, indices, torch.zeros(3, 128, 4, dtype=torch.int32)]
    with (
        mock.patch.object(kernel_arguments, "device_limits", lambda _: LIMITS),
        mock.patch.object(split_kv, "num_sms", lambda _: 132),
        mock.patch.object(launcher, "MAX_TENSOR_MAPS", 2),
    ):
        options = kernel_arguments.options_of(out, plan, 0.125, False, 0.0, None, out=out)
        specs = specs_of(out, out, out)
        (out_spec,) = specs_of(out).tensors
        tile_lists = kernel_arguments.tile_lists(plan, 0)
        plan_specs = kernel_arguments.plan_specs_of(tile_lists)

        # without TMA and with it
        for min_elements in (1 << 40, 0):
            with mock.patch.object(kernel_arguments, "MIN_TMA_ELEMENTS", min_elements):
                run = forward.forward_launch.__wrapped__(specs, plan_specs, options)[-1]
            assert any(run._factories) == (min_elements == 0)
            rest = (*tile_lists, None, None, 0, *[None] * 4, out, lse)
            arguments = [(*call, *rest) for call in calls]
            check(recorder, run, arguments[0], arguments)
            # the recorder keeps its arguments
            with mock.patch.object(Recorder, "__call__", lambda *_: None):
                check_keeps_no_tensors(run, shape, rest[:-2])
            recorder.calls.clear()

        # seeds of the host, of 32 and of 64 bits
        with mock.patch.object(kernel_arguments, "MIN_TMA_ELEMENTS", 1 << 40):
            dropout = forward.forward_launch.__wrapped__(specs, plan_specs, options._replace(dropout_p=0.1))[-1]
        arguments = [(*calls[0], *tile_lists, None, None, seed, *rest[-6:]) for seed in (3, 1, 16, -1, 1 << 40)]
        check(recorder, dropout, arguments[0], arguments)
        recorder.calls.clear()

        preprocess = backward_preprocess.preprocess_launch(out_spec, out_spec.strides[:3], 256)
        arguments = [(call[0], call[1], lse, None, torch.empty(2, 256, 2), None, None, None) for call in calls]
        check(recorder, preprocess, arguments[0], arguments)
        recorder.calls.clear()

        with mock.patch.object(backward, "num_sms", lambda _: 132):
            joint = backward.backward_launches.__wrapped__(specs_of(*[out] * 4), plan_specs, plan_specs, options).joint
        assert joint is not None
        pairs = torch.empty(2, 256, 2)
        arguments = [(*call, call[0], pairs, *tile_lists[:3], *tile_lists, call[0], *call[1:]) for call in calls]
        check(recorder, joint, arguments[0], arguments)
        recorder.calls.clear()

        # split-KV for few queries; the launch that combines the splits takes the sinks
        q, per_head = torch.empty(1, 2, 1, 64, dtype=torch.bfloat16), torch.zeros(2)
        scored = options._replace(
            scores=kernel_arguments.score_specs_of(Scores(per_head, per_head, None, [], 30.0), None)
        )
        split_keys = split_kv.split_kv_launches.__wrapped__(specs_of(q, out, out), (None, ()), 0, scored)
        assert split_keys.combine is not None and not any(split_keys.split._factories)
        splits, lses = torch.empty(split_keys.n_splits, 2, 64), torch.empty(split_keys.n_splits, 2)
        dense = (None,) * 6
        arguments = [(q, *call[1:], *dense, per_head, None, None, splits, lses) for call in calls]
        check(recorder, split_keys.split, arguments[0], arguments)
        recorder.calls.clear()
        arguments = [(splits, lses, per_head, call[0], lse) for call in calls]
        check(recorder, split_keys.combine, arguments[0], arguments)
        recorder.calls.clear()

        # without a tile counter; with one, because there are more tile rows than programs; with splits
        for split, n_sms in ((WHOLE, 132), (WHOLE, 3), (Split(1, 3), 132)):
            with mock.patch.object(hopper_forward, "num_sms", lambda _, n=n_sms: n):
                hopper = hopper_forward.forward_launches.__wrapped__(
                    specs, plan_specs, None, split, 0.125, False, None, is_uneven=False
                )
            assert hopper.has_tile_counter == (n_sms == 3)
            tile_counter = torch.zeros(1, dtype=torch.int32) if hopper.has_tile_counter else None
            splits = torch.empty(hopper.n_split_floats) if hopper.combine else None
            pointers = RowPointers(*tile_lists, None, None, None, None, lse, tile_counter, splits)
            arguments = [(*call, torch.empty_like(out), pointers) for call in calls]
            check(recorder, hopper.kernel, arguments[0], arguments)
            recorder.calls.clear()
        # more tile columns than programs
        with mock.patch.object(hopper_backward, "num_sms", lambda _: 1):
            columns = hopper_backward.backward_launches.__wrapped__(
                specs_of(*[out] * 4), plan_specs, WHOLE, None, options, is_uneven=False
            )
        assert columns.workspaces[2] is not None and not columns.adds_by_tma
        lse_delta, tile_counter = torch.empty(2, 512), torch.empty(1, dtype=torch.int32)
        dq_sums = [torch.empty(shape) for _ in calls]
        names = "kv_lengths_ptr splits_ptr slopes_ptr bias_ptr bias_sums_ptr dk_sum_ptr dv_sum_ptr"
        absent = dict.fromkeys(names.split())
        named = {**absent, "tile_counter_ptr": tile_counter}
        arguments = [
            (*call, call[0], *lse_delta, None, *call[1:], ColPointers(*tile_lists, dq_sum_ptr=dq_sum, **named))
            for call, dq_sum in zip(calls, dq_sums, strict=True)
        ]
        check(recorder, columns.cols, arguments[0], arguments)
        recorder.calls.clear()
        assert hopper.combine is not None
        arguments = [(splits, records, call[0], lse) for call in calls]
        check(recorder, hopper.combine, arguments[0], arguments)
        recorder.calls.clear()
    # a message is an argument once for each tensor that it packs
    row_lists = [torch.zeros(shape[2], dtype=torch.int64) for _ in calls]
    messages = [torch.empty(shape[2], *shape[:2], 2 * shape[3], dtype=torch.bfloat16) for _ in calls]
    pack = gather_scatter._move_launch.__wrapped__(specs_of(out, out), "pack", shape[2], ())
    arguments = [
        (call[:2], rows, None, (message, message))
        for call, rows, message in zip(calls, row_lists, messages, strict=True)
    ]
    check(recorder, pack, arguments[0], arguments)
    recorder.calls.clear()
    orders = [torch.zeros(1, 1, shape[2], dtype=torch.int32) for _ in calls]
    gather = gather_tokens._gather_launch.__wrapped__(specs_of(out, orders[0], out), out.device)
    arguments = [(*call[:1], order, call[1]) for call, order in zip(calls, orders, strict=True)]
    check(recorder, gather, arguments[0], arguments)
    recorder.calls.clear()
    table = torch.zeros(2, shape[2], dtype=torch.int32)
    add = gather_scatter._add_launch.__wrapped__(specs_of(*[out] * 6), 2, 1, shape[2], 0, 2, ())
    arguments = [
        (call[:2], call[1:], None, message, table, None, call[1:])
        for call, message in zip(calls, messages, strict=True)
    ]
    check(recorder, add, arguments[0], arguments)
    recorder.calls.clear()
    # integer arguments, also 1 and multiples of 16, which Triton specializes
    grid = plan_builder.Grid(block_selection.BlockGrid(2, 3, 3, 384, 384, (128, 128)), causal=False)
    bits, counts = torch.zeros(2, 3, 1, dtype=torch.int32), torch.zeros(24, dtype=torch.int32)
    arguments = [
        (bits, None, counts, *(torch.empty(8 * n, dtype=torch.int32) for _ in range(6)), n) for n in (9, 1, 16, 33)
    ]
    check(recorder, plan_builder.plan_launches.__wrapped__(grid, torch.device("cpu")).lists, arguments[0], arguments)
    print(f"Triton {triton.__version__}: every launch passes equal arguments")


if __name__ == "__main__":
    main()
