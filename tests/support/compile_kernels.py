"""Compiles every kernel without a GPU: `python -m tests.support.compile_kernels 90` prints a JSON line per launch.

The argument is an architecture, or `hopper` for the Gluon kernels on sm90. `90-few` and `hopper-few` select the tuned
configurations, `90-rest` and `hopper-rest` all others. With `-` the program answers requests on standard input.

It runs the launchers on CPU tensors for the calls of compiled_calls.py, intercepts each launch (caught_launches.py),
and compiles it ahead of time for the architecture, with the ptxas that ships with Triton. ptx_and_sass.py reads the
result. It needs a process of its own, because the test process runs kernels in the interpreter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from blocksparse_flash.kernels.hopper import selected_backward, selected_forward
from tests.support.caught_launches import launches
from tests.support.compiled_calls import (
    SHARED_MEMORY,
    calls,
    each_option_once,
    few_hopper_calls,
    hopper_calls,
    table_calls,
)
from tests.support.ptx_and_sass import (
    disassembled,
    early_arrivals,
    instructions_of,
    lost_operands,
    spills_beside_products,
    unwritten_registers,
)
from tests.support.scoreboards import unwaited


def source_of(kernel: JITFunction, kwargs: dict[str, Any], arch: int) -> tuple[ASTSource, dict[str, Any]]:
    """The source and options that Triton would compile for a launch."""
    backend = make_backend(GPUTarget("cuda", arch, 32))
    kwargs = {"debug": False, **kwargs}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(**kwargs)
    options, signature, constexprs, attrs = kernel._pack_args(backend, kwargs, bound, specialization, options)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attrs)
    return source, options.__dict__


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel with the source and options to compile, and the calls that launch it."""

    kernel: JITFunction
    source: ASTSource
    options: dict[str, Any]
    calls: list[dict[str, Any]]
    # that should share an SM
    programs: int = 1


def programs_per_sm(kernel: JITFunction, kwargs: dict[str, Any]) -> int:
    """Programs of a launch that should share an SM."""
    if kernel is selected_forward.selected_forward_kernel:
        return selected_forward.PROGRAMS_PER_SM
    return kwargs["CONFIG"].programs_per_sm if kernel is selected_backward.selected_backward_kernel else 1


def compile_launches(launches: list[Launch], arch: int) -> list[dict[str, Any]]:
    """Compile launches; returns registers, spills, shared memory and products of each, and faults in PTX and SASS."""
    compiled = [compile_launch(launch, arch) for launch in launches]
    # disassembly takes time, and only kernels with wgmma need it
    with_wgmma = [i for i, (_, ptx, _) in enumerate(compiled) if "wgmma" in ptx]
    sass = dict(zip(with_wgmma, disassembled([compiled[i][2] for i in with_wgmma]), strict=True)) if with_wgmma else {}
    assert all("HGMMA" in text for text in sass.values())
    return [
        {
            **record,
            "lost_operands": lost_operands(ptx, sass.get(i, "")),
            "spills_beside_products": spills_beside_products(sass.get(i, "")),
            "unwritten_registers": unwritten_registers(sass.get(i, "")),
            "unwaited": unwaited(sass[i], instructions_of(cubin)) if i in sass else [],
        }
        for i, (record, ptx, cubin) in enumerate(compiled)
    ]


def compile_launch(launch: Launch, arch: int) -> tuple[dict[str, Any], str, bytes]:
    """Compile a launch; returns what is seen without its SASS, its PTX and its cubin."""
    with (
        triton.knobs.compilation.scope(),
        triton.knobs.nvidia.scope(),
        contextlib.redirect_stdout(io.StringIO()) as log,
    ):
        # the ptxas log exists only if Triton compiles, not if it finds the kernel in its cache; running ptxas here
        # would miss the options that Triton passes
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(launch.source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    ptx = compiled.asm["ptx"]

    def number(pattern: str) -> int:
        return int(re.findall(pattern, log.getvalue())[-1])

    record = {
        "kernel": launch.kernel.fn.__name__,
        "arch": arch,
        "triton": triton.__version__,
        "registers": number(r"Used (\d+) registers"),
        "spills": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "shared": compiled.metadata.shared,
        "shared_limit": SHARED_MEMORY[arch],
        "tensor_memory": getattr(compiled.metadata, "tmem_size", 0) or 0,
        "warps": compiled.metadata.num_warps,
        "programs": launch.programs,
        # matrix products in the source
        "products": len(
            re.findall(r"\btt\.dot\b|\bttng\.warp_group_dot\b", compiled.asm.get("ttir", compiled.asm["ttgir"]))
        ),
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "wgmma_waits": len(re.findall(r"wgmma\.wait_group", ptx)),
        "early_arrivals": early_arrivals(ptx),
        "async_copies": len(re.findall(r"cp\.async\.(?:ca|cg|bulk\.tensor)", ptx)),
        # warnings of ptxas that it has serialized wgmma
        "serialized": sorted(set(re.findall(r"C75\d\d", log.getvalue()))),
    }
    return record, ptx, compiled.asm["cubin"]


def launches_of_calls(arch: int, chosen: list[dict[str, Any]], *, is_hopper: bool) -> dict[str, Launch]:
    """The distinct launches of some calls, which share many kernels, such as the preprocess."""
    distinct: dict[str, Launch] = {}
    portable: set[str] = set()
    for call in chosen:
        named = {**call, "dtype": str(call["dtype"]).removeprefix("torch.")}
        for kernel, kwargs in launches(arch, **call):
            # once per Triton kernel that backend `hopper` launches: other targets compile their configurations
            if is_hopper and not kernel.is_gluon():
                if kernel.fn.__name__ in portable:
                    continue
                portable.add(kernel.fn.__name__)
            source, options = source_of(kernel, kwargs, arch)
            key = f"{source.hash()} {sorted(options.items(), key=str)}"
            launch = Launch(kernel, source, options, [], programs_per_sm(kernel, kwargs))
            distinct.setdefault(key, launch).calls.append(named)
    return distinct


@functools.cache
def launches_of(target: str) -> list[Launch]:
    """The distinct launches of a target: "80", "86", "90", "100" or "hopper".

    A suffix selects: "-few" the tuned configurations, "-rest" all others, "-once" (hopper) what each_option_once keeps.
    """
    name, _, which = target.partition("-")
    is_hopper = name == "hopper"
    arch = 90 if is_hopper else int(name)
    all_calls = hopper_calls() if is_hopper else calls(arch)
    if which == "once":
        return [*launches_of_calls(arch, each_option_once(all_calls), is_hopper=is_hopper).values()]
    few = launches_of_calls(arch, few_hopper_calls() if is_hopper else table_calls(arch), is_hopper=is_hopper)
    every = few | launches_of_calls(arch, all_calls, is_hopper=is_hopper)
    return [launch for key, launch in every.items() if not which or (key in few) == (which == "few")]


def listed(target: str) -> list[dict[str, Any]]:
    """Name and calls of each launch of a target, without compiling."""
    return [{"kernel": launch.kernel.fn.__name__, "calls": launch.calls} for launch in launches_of(target)]


def records(target: str, kernel: str | None = None, shard: int = 0, n_shards: int = 1) -> Iterator[dict[str, Any]]:
    """The results of compile_launches for a target: for each launch, once for each call that launches it.

    kernel           compile the launches of this kernel only
    shard, n_shards  compile every n_shards-th of them, from number `shard` on
    """
    arch = 90 if target.startswith("hopper") else int(target.partition("-")[0])
    chosen = [launch for launch in launches_of(target) if kernel in (None, launch.kernel.fn.__name__)]
    chosen = chosen[shard::n_shards]
    for launch, record in zip(chosen, compile_launches(chosen, arch), strict=True):
        for call in launch.calls:
            yield {**record, "call": call}


def answer_requests() -> None:
    """Answer each line of standard input with a line of JSON.

    list TARGET                            `listed`
    compile TARGET KERNEL SHARD N_SHARDS   `records`
    """
    for line in sys.stdin:
        verb, target, *arguments = line.split()
        if verb == "list":
            answer = listed(target)
        else:
            kernel, shard, n_shards = arguments
            answer = list(records(target, kernel, int(shard), int(n_shards)))
        print(json.dumps(answer), flush=True)


def main(targets: list[str]) -> None:
    if triton.knobs.runtime.interpret:
        raise SystemExit("TRITON_INTERPRET=1 interprets the kernels; unset it to compile them")
    if targets == ["-"]:
        answer_requests()
        return
    for target in targets:
        for record in records(target):
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or [*map(str, sorted(SHARED_MEMORY)), "hopper"])
