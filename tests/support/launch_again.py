"""The cached launcher against Triton's own, without a GPU: `python -m tests.support.launch_again`.

A mock driver records what would have reached the GPU. Must run in its own process: the test process interprets kernels.
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

from blocksparse_flash.kernels import arguments as launch
from blocksparse_flash.kernels.hopper import backward as hopper_backward
from blocksparse_flash.kernels.hopper import forward as hopper_forward
from blocksparse_flash.kernels.hopper.backward_producer import Pointers
from blocksparse_flash.kernels.schedule import WHOLE, Split
from blocksparse_flash.kernels.triton import (
    backward,
    backward_preprocess,
    block_selection,
    forward,
    gather_scatter,
    plan_builder,
    split_kv,
)
from blocksparse_flash.runtime import launcher
from blocksparse_flash.runtime.tensor_spec import specs_of
from blocksparse_flash.score_mods import Scores

LIMITS = (9, 232448)


class PyCUtensorMap:
    """What a descriptor becomes; here what it was made from."""

    def __init__(self, *made_from: Any) -> None:
        self.made_from = made_from


class Recorder:
    """The compiled function."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *given: Any) -> None:
        self.calls.append(given)


def install(recorder: Recorder) -> None:
    """Make Triton launch on the recorder; the driver's streams count up."""
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


def flat(given: Any) -> Any:
    """What was handed on, comparable: tensors as addresses, maps as what they were made from."""
    if isinstance(given, (list, tuple)):
        return [flat(each) for each in given]
    if isinstance(given, torch.Tensor):
        return given.data_ptr()
    if isinstance(given, PyCUtensorMap):
        return flat(given.made_from)
    return given


def check(recorder: Recorder, run: launch.Launch, first: tuple[Any, ...], others: list[tuple[Any, ...]]) -> None:
    """Launch on the first arguments and then on others: Triton's own launch is handed the same."""
    knobs = triton.knobs.runtime
    run(*first)
    assert len(recorder.calls) == 1
    bound = run._run
    assert isinstance(bound, launcher.Bound), "Triton's launcher has changed: see blocksparse_flash/runtime/launcher.py"
    compiled, grid, descriptor_factories, values = bound._compiled, bound._grid, bound._factories, bound._values
    for arguments in others:
        recorder.calls.clear()
        run(*arguments)
        # neither a chain of hooks nor their metadata
        with mock.patch.multiple(knobs, launch_enter_hook=None, launch_exit_hook=None):
            compiled[grid](*launcher.described(arguments, descriptor_factories), *values)
        ours, theirs = (flat(call) for call in recorder.calls)
        # the stream is asked for at each launch
        assert theirs[3] == ours[3] + 1
        ours[3] = theirs[3] = None
        assert ours == theirs, f"\n{ours}\n{theirs}"
    launched: list[Any] = []
    with mock.patch.object(knobs, "launch_enter_hook", launched.append):
        run(*first)
    assert launched.append in recorder.calls[-1], "the hook of a profiler must be passed on"


def check_holds_nothing(run: launch.Launch, shape: tuple[int, ...], rest: tuple[Any, ...]) -> None:
    """A launch on tensors that it has not met lets go of them, without the collector of garbage."""
    gc.disable()
    tensors = [torch.empty(shape, dtype=torch.bfloat16) for _ in "qkv"]
    out, lse = torch.empty_like(tensors[0]), torch.empty(shape[:3])
    refs = [weakref.ref(tensor) for tensor in (*tensors, out, lse)]
    run(*tensors, *rest, out, lse)
    del tensors, out, lse
    assert all(ref() is None for ref in refs), "a launch holds its tensors"
    gc.enable()


def kinds(shape: tuple[int, ...], n: int) -> list[tuple[torch.Tensor, ...]]:
    """n times q, k, v at other addresses, the last time one tensor for all."""
    made = [tuple(torch.empty(shape, dtype=torch.bfloat16) for _ in "qkv") for _ in range(n - 1)]
    one = torch.empty(shape, dtype=torch.bfloat16)
    return [*made, (one, one, one)]


def main() -> None:
    if triton.knobs.runtime.interpret:
        raise SystemExit("TRITON_INTERPRET=1 interprets the kernels; unset it to compile them")
    recorder = Recorder()
    install(recorder)
    shape = (1, 2, 256, 64)
    out, lse = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape[:3])
    # more than are kept
    calls = kinds(shape, 6)
    items = torch.zeros(1, 1, 2, 8, dtype=torch.int32)
    indices = torch.zeros(9, dtype=torch.int32)
    plan = [items, indices, indices, items, indices, indices, torch.zeros(3, 128, 4, dtype=torch.int32)]
    with (
        mock.patch.object(launch, "device_limits", lambda _: LIMITS),
        mock.patch.object(split_kv, "num_sms", lambda _: 132),
        mock.patch.object(launcher, "MAX_TENSOR_MAPS", 2),
    ):
        options = launch.options_of(out, 0.125, False, 0.0, None)
        specs = specs_of(out, out, out)
        (seen,) = specs_of(out).tensors
        walks = launch.tile_lists(plan, 0)

        for worth in (1 << 40, 0):
            with mock.patch.object(launch, "MIN_TMA_ELEMENTS", worth):
                run = forward.forward_launch.__wrapped__(specs, launch.plan_specs_of(walks), options)[-1]
            assert any(run._factories) == (worth == 0)
            rest = (*walks, None, None, None, None, None, out, lse)
            given = [(*call, *rest) for call in calls]
            check(recorder, run, given[0], given)
            # which holds what it was handed
            with mock.patch.object(Recorder, "__call__", lambda *_: None):
                check_holds_nothing(run, shape, rest[:-2])
            recorder.calls.clear()

        preprocess = backward_preprocess.preprocess_launch(seen, 256)
        given = [(call[0], call[1], lse, None, torch.empty(2, 256, 2), None, None, None) for call in calls]
        check(recorder, preprocess, given[0], given)
        recorder.calls.clear()

        with mock.patch.object(backward, "num_sms", lambda _: 132):
            joint = backward.backward_launches.__wrapped__(
                specs_of(*[out] * 4), launch.plan_specs_of(walks), launch.plan_specs_of(walks), options
            ).joint
        assert joint is not None
        pairs = torch.empty(2, 256, 2)
        given = [(*call, call[0], pairs, *walks[:3], *walks, call[0], *call[1:]) for call in calls]
        check(recorder, joint, given[0], given)
        recorder.calls.clear()

        # of a few queries; sinks go to the merge
        q, added = torch.empty(1, 2, 1, 64, dtype=torch.bfloat16), torch.zeros(2)
        scored = options._replace(scores=launch.score_specs_of(Scores(added, added, None, [], 30.0), None))
        split_keys = split_kv.split_kv_launches.__wrapped__(specs_of(q, out, out), (None, ()), 0, scored)
        assert split_keys.combine is not None and not any(split_keys.split._factories)
        parts, lses = torch.empty(split_keys.n_splits, 2, 64), torch.empty(split_keys.n_splits, 2)
        dense = (None,) * 6
        given = [(q, *call[1:], *dense, added, None, parts, lses) for call in calls]
        check(recorder, split_keys.split, given[0], given)
        recorder.calls.clear()
        given = [(parts, lses, added, call[0], lse) for call in calls]
        check(recorder, split_keys.combine, given[0], given)
        recorder.calls.clear()

        # with more rows than programs, which have a queue, and without
        for split, n_sms, has_subtiles in ((WHOLE, 132, True), (WHOLE, 3, False), (Split(1, 3), 132, False)):
            with mock.patch.object(hopper_forward, "num_sms", lambda _, n=n_sms: n):
                hopper = hopper_forward.forward_launches.__wrapped__(
                    specs, launch.plan_specs_of(walks), None, split, has_subtiles, 0.125, False, None
                )
            assert hopper.has_tile_counter == (n_sms == 3)
            queue = torch.zeros(1, dtype=torch.int32) if hopper.has_tile_counter else None
            parts = torch.empty(hopper.n_split_floats) if hopper.combine else None
            given = [(*call, *walks, None, queue, torch.empty_like(out), lse, parts) for call in calls]
            check(recorder, hopper.kernel, given[0], given)
            recorder.calls.clear()
        # more tile columns than programs
        with mock.patch.object(hopper_backward, "num_sms", lambda _: 1):
            columns = hopper_backward.backward_launches.__wrapped__(
                specs_of(*[out] * 4), launch.plan_specs_of(walks), WHOLE, False, True, options
            )
        assert columns.workspaces[2] is not None and not columns.adds_by_tma
        lines, counter = torch.empty(2, 512), torch.empty(1, dtype=torch.int32)
        given = [
            (*call, call[0], *lines, None, *call[1:], Pointers(*walks, None, counter, None, torch.empty(shape)))
            for call in calls
        ]
        check(recorder, columns.cols, given[0], given)
        recorder.calls.clear()
        assert hopper.combine is not None
        given = [(parts, items, call[0], lse) for call in calls]
        check(recorder, hopper.combine, given[0], given)
        recorder.calls.clear()
    # a message is given once for each of its parts
    lists = [torch.zeros(shape[2], dtype=torch.int64) for _ in calls]
    messages = [torch.empty(shape[2], *shape[:2], 2 * shape[3], dtype=torch.bfloat16) for _ in calls]
    pack = gather_scatter._move_launch.__wrapped__(specs_of(out, out), "pack", shape[2], ())
    given = [
        (*call[:2], None, None, taken, None, message, message, None, None)
        for call, taken, message in zip(calls, lists, messages, strict=True)
    ]
    check(recorder, pack, given[0], given)
    recorder.calls.clear()
    table = torch.zeros(2, shape[2], dtype=torch.int32)
    add = gather_scatter._add_launch.__wrapped__(specs_of(*[out] * 6), 2, 1, shape[2], 0, 2, ())
    given = [
        (*call[:2], *call[1:], None, None, message, table, None, *call[1:])
        for call, message in zip(calls, messages, strict=True)
    ]
    check(recorder, add, given[0], given)
    recorder.calls.clear()
    # numbers among the tensors, 1 and multiples of 16 too
    grid = plan_builder.Grid(block_selection.Rows(2, 3, 3, 384, 384, (128, 128)), causal=False)
    bits, counts = torch.zeros(2, 3, 1, dtype=torch.int32), torch.zeros(24, dtype=torch.int32)
    given = [
        (bits, counts, *(torch.empty(8 * n, dtype=torch.int32) for _ in range(6)), n, 16 * n, n + 2)
        for n in (9, 1, 16, 33)
    ]
    check(recorder, plan_builder.plan_launches.__wrapped__(grid, torch.device("cpu")).lists, given[0], given)
    print(f"Triton {triton.__version__}: every launch is handed on alike")


if __name__ == "__main__":
    main()
