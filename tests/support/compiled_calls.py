"""The calls whose kernels compile_kernels.py compiles, by architecture and backend.

Each is keyword arguments of `launches` and `run_both` in caught_launches.py, which say what they mean.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

# bytes of shared memory available to a program, by architecture
SHARED_MEMORY = {80: 166912, 86: 101376, 90: 232448, 100: 232448}
# the scales whose sign is compiled into the kernels
SIGNS: list[dict[str, Any]] = [{"scale": -0.125}, {"scale": 0.0}]
# every score mod, in the words of scores_of
EVERYTHING = "sinks softcap slopes learned bias16"
# keys in small pages
PAGED = {"mode": "paged16"}
# modes of the kernels for steps of 64 x 64
FINE = ("fine", "gathered", "neighbors")


def table_calls(arch: int) -> list[dict[str, Any]]:
    """A call for every configuration in the launch tables of the Triton kernels, which depend on the architecture."""
    half = torch.bfloat16
    if SHARED_MEMORY[arch] < 160 * 1024:
        # the configurations for little shared memory; all others are those of sm80
        little = [{"head_dim": dim, "dtype": dtype} for dim in (64, 128, 256) for dtype in (half, torch.float32)]
        little += [{**call, "q_len": q_len, **mode} for call in little for q_len in (1, 64) for mode in ({}, PAGED)]
        little += [{"head_dim": 64, "dtype": half, **option} for option in SIGNS]
        return [*little, {"head_dim": 128, "dtype": half, "q_len": 16, "group": 4, "scores": EVERYTHING}]
    grid = [{"head_dim": head_dim, "dtype": half} for head_dim in (64, 128, 256)]
    grid += [{"head_dim": head_dim, "dtype": torch.float32} for head_dim in (64, 128, 256)]
    grid += [
        {"head_dim": head_dim, "dtype": half, **option}
        for head_dim in (64, 128)
        for option in ({"dropout_p": 0.1}, {"scores": "softcap"})
    ]
    # tiles of 64 x 64
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": "fine", **option}
        for head_dim in (64, 128)
        for option in ({}, {"dropout_p": 0.1}, {"scores": "softcap"}, {"q_len": 16, "group": 4})
    ]
    # split-KV: q_len * group is 4, 32, 64 and 256 rows per KV head
    grid += [
        {"head_dim": head_dim, "dtype": half, "q_len": q_len, "group": 4}
        for head_dim, q_len in itertools.product((64, 128), (1, 8, 16, 64))
    ]
    grid += [{"head_dim": 256, "dtype": half, "q_len": q_len, "group": 4} for q_len in (1, 64)]
    grid += [{"head_dim": 128, "dtype": torch.float32, "q_len": 1, "group": 4}]
    # the same configurations over pages
    grid += [{**call, **PAGED} for call in grid if "q_len" in call and "mode" not in call]
    if arch >= 90:
        # so short that the kernels use pointers instead of TMA descriptors
        grid += [{"head_dim": head_dim, "dtype": half, "length": 256} for head_dim in (64, 128)]
    if arch == 90:
        small = {"dtype": half, "small": True}
        grid += [
            {"head_dim": head_dim, "mode": mode, **small}
            for head_dim, mode in itertools.product((64, 128), ("layout", "causal"))
        ]
        grid += [{"head_dim": head_dim, "length": 256, **small} for head_dim in (64, 128)]
        # values narrower than keys beyond 128
        grid += [{"head_dim": 192, "v_dim": 128, "dtype": half, "mode": mode} for mode in ("layout", "causal")]
        # v with rows that neither TMA nor cp.async can copy
        grid += [
            {"head_dim": head_dim, "v_dim": v_dim, "length": 256, **option}
            for head_dim, v_dim in ((100, 3), (64, 3), (128, 17))
            for option in ({"dtype": half}, small)
        ]
        # the same with split-KV and grouped heads
        grid += [{"head_dim": 100, "v_dim": 3, "dtype": half, "q_len": q_len, "group": 4} for q_len in (16, 64)]
        # with grouped heads, as without TMA descriptors, dk and dv have a launch of their own
        grid += [{"head_dim": 128, "dtype": half, "group": 4, "mode": mode} for mode in ("layout", "causal")]
        grid += [{"head_dim": head_dim, "length": 256, "mode": "fine", **small} for head_dim in (64, 128)]
        # kernels with a running maximum are compiled separately for a negative scale, and for 0
        grid += [{**call, "scale": -0.125} for call in grid if call["dtype"] == half]
    grid += [{"head_dim": head_dim, "dtype": half, **option} for head_dim in (64, 128) for option in SIGNS]
    return [*grid, {"head_dim": 128, "dtype": half, "q_len": 1, "group": 4, "scale": 0.0}]


def calls(arch: int) -> list[dict[str, Any]]:
    """Calls of the Triton kernels to compile: every configuration of the launch tables, and every option once."""
    grid = table_calls(arch)
    if SHARED_MEMORY[arch] < 160 * 1024:
        return grid
    half = torch.bfloat16
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": mode}
        for head_dim, mode in itertools.product((64, 128), ("dense", "causal"))
    ]
    # 3 and 100: rows of 6 and 200 bytes, which TMA cannot load
    grid += [{"head_dim": head_dim, "dtype": half} for head_dim in (3, 16, 40, 96, 100)]
    grid += [{"head_dim": head_dim, "dtype": torch.float16} for head_dim in (64, 128)]
    grid += [{"head_dim": 64, "dtype": half, **option} for option in ({"group": 4}, {"limited": True}, {"dlse": True})]
    grid += [
        {"head_dim": head_dim, "dtype": dtype, "by_token": True, **option}
        for head_dim, dtype in itertools.product((64, 128, 256), (half, torch.float32))
        for option in ({}, {"group": 4, "dropout_p": 0.1})
    ]
    few = {"dtype": half, "q_len": 1, "group": 4}
    grid += [
        {"head_dim": 128, **few, **option} for option in ({"mode": "dense"}, {"mode": "causal"}, {"limited": True})
    ]
    grid += [{"head_dim": head_dim, **few} for head_dim in (3, 40)]
    grid += [{"head_dim": head_dim, "dtype": half, "mode": "rows"} for head_dim in (64, 128)]
    # selection of blocks of head_dim tokens; at 131,072 tokens a row has more blocks than a warp holds
    grid += [{"head_dim": 64, "dtype": half, "mode": "select"}]
    grid += [{"head_dim": 128, "dtype": torch.float32, "mode": "select", "length": 1 << 17}]
    grid += [{"head_dim": head_dim, "dtype": half, "scores": EVERYTHING} for head_dim in (64, 128)]
    grid += [{"head_dim": 64, "dtype": half, "scores": scores} for scores in ("sinks", "bias128")]
    grid += [{"head_dim": 64, "dtype": half, "mode": "causal", "scores": "slopes"}]
    # a pair bias of each type, with and without the loop over the batches and heads that share it
    grid += [{"head_dim": head_dim, "dtype": half, "scores": "pairs"} for head_dim in (64, 128)]
    grid += [{"head_dim": 128, "dtype": half, "mode": "causal", "scores": "halfpairs"}]
    everything = {"scores": f"{EVERYTHING} pairs", "dropout_p": 0.1, "limited": True}
    grid += [{"head_dim": 64, "dtype": half, **everything, "has_gpu_seed": has} for has in (False, True)]
    grid += [{"head_dim": 64, "dtype": half, "mode": "fine", "scores": "halfpairs", "group": 4}]
    grid += [
        {"head_dim": 256, "dtype": half, "scores": "pairs"},
        {"head_dim": 64, "dtype": torch.float32, "scores": "pairs"},
    ]
    # split-KV with score mods that differ between heads: 4 and 64 rows per KV head
    grid += [{**few, "head_dim": 128, "q_len": q_len, "scores": f"{EVERYTHING} pairs"} for q_len in (1, 16)]
    # pages as small and as large as a step, and every option over them
    grid += [
        {**few, "head_dim": 128, "q_len": q_len, "mode": mode, **option}
        for q_len, mode in itertools.product((1, 16), ("paged64", "selected16", "selected64", "window16", "window64"))
        for option in ({}, {"scores": "sinks softcap"})
    ]
    grid += [{**few, "head_dim": head_dim, "v_dim": v_dim, **PAGED} for head_dim, v_dim in ((100, 3), (80, 128))]
    return grid


def hopper_calls() -> list[dict[str, Any]]:
    """Calls of backend `hopper` to compile: every configuration, and every option once."""
    half = torch.bfloat16
    grid: list[dict[str, Any]] = [
        {"head_dim": head_dim, "dtype": half, "mode": mode}
        for head_dim, mode in itertools.product((64, 128, 256), ("layout", "dense", "causal"))
    ]
    # so long that tile rows of 192 queries are chosen
    grid += [{"head_dim": 64, "dtype": half, "mode": mode, "length": 24576} for mode in ("dense", "causal")]
    # so few tile rows that there is no tile counter
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": mode, "length": 1024}
        for head_dim, mode in itertools.product((64, 128), ("layout", "causal"))
    ]
    grid += [{"head_dim": head_dim, "dtype": half, "limited": True} for head_dim in (64, 128)]
    grid += [{"head_dim": head_dim, "dtype": half, "limited": True, "mode": "dense"} for head_dim in (64, 128)]
    grid += [{"head_dim": head_dim, "dtype": half, "deterministic": True} for head_dim in (64, 128)]
    # head_dim 100: rows of 200 bytes, which TMA cannot load, are copied
    grid += [{"head_dim": 128, "dtype": torch.float16, "group": 4}, {"head_dim": 100, "dtype": half, "dlse": True}]
    grid += [{"head_dim": head_dim, "dtype": half, "by_token": True} for head_dim in (64, 128)]
    # each kernel with splits
    grid += [{"head_dim": 64, "dtype": half, "mode": mode, "num_splits": 3} for mode in ("layout", "causal")]
    grid += [{"head_dim": 64, "dtype": half, "num_splits": 3, "limited": True}]
    options: list[dict[str, Any]] = [{}, {"group": 4}, {"limited": True}]
    grid += [{"head_dim": 128, "dtype": half, "num_splits": 3, **option} for option in options]
    grid += [{"head_dim": 256, "dtype": half, "num_splits": 3}]
    grid += [{"head_dim": head_dim, "dtype": half, **option} for head_dim in (64, 128, 256) for option in SIGNS]
    grid += [{"head_dim": 64, "dtype": half, "mode": mode, **SIGNS[0]} for mode in ("dense", "causal")]
    # steps of 64 x 64
    options += [{"num_splits": 3}]
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": mode, **option}
        for head_dim, mode in itertools.product((64, 128), FINE[:2])
        for option in options
    ]
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": "fine", **option} for head_dim in (64, 128) for option in SIGNS
    ]
    grid += [{"head_dim": 64, "dtype": half, "mode": "gathered", **SIGNS[0]}]
    grid += [{"head_dim": head_dim, "dtype": half, "mode": "neighbors"} for head_dim in (64, 128)]
    # score mods
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": mode, "scores": scores}
        for head_dim, (mode, scores) in itertools.product(
            (64, 128),
            (
                ("layout", "sinks"),
                ("fine", "sinks"),
                ("causal", "softcap"),
                ("gathered", "softcap"),
                ("layout", "slopes"),
                ("causal", "slopes causal"),
                ("layout", "slopes causal"),
                ("fine", "slopes causal"),
            ),
        )
    ]
    # a number for each tile, and the sums for its gradient
    grid += [
        {"head_dim": head_dim, "dtype": half, "scores": f"{mods}bias128"}
        for head_dim, mods in itertools.product(
            (64, 96, 128, 192, 256), ("", "softcap ", "slopes causal ", "sinks softcap slopes ")
        )
    ]
    grid += [
        {"head_dim": head_dim, "dtype": half, "scores": "bias128", **option}
        for head_dim in (64, 128)
        for option in ({"limited": True}, {"num_splits": 3}, {"group": 4}, *SIGNS)
    ]
    grid += [{"head_dim": head_dim, "dtype": half, "scores": "fixed bias128"} for head_dim in (64, 96, 128)]
    # dq of deterministic calls
    grid += [{"head_dim": 64, "dtype": half, "deterministic": True, **option} for option in SIGNS]
    # selected blocks by key block
    options = [{"rows": 8}, {"rows": 32}, {"rounds": 3}, {"tokens": 4, "dlse": True}, *SIGNS]
    options += [{"rows": 8, "group": 8}, {"rows": 16, "group": 16, "by_token": True}, {"rows": 32, "group": 32}]
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": mode, **option}
        for head_dim, mode in itertools.product((64, 128), ("keys64", "keys128"))
        for option in options
    ]
    grid += [
        {"head_dim": head_dim, "v_dim": v_dim, "dtype": torch.float16, "mode": "keys256"}
        for head_dim, v_dim in ((64, 128), (128, 64), (80, 24), (100, 3))
    ]
    # 96 columns in the backward, 192 in the forward
    options = [{"mode": "dense"}, {"mode": "causal"}, {"limited": True}, {"num_splits": 3}]
    options += [{"scores": "softcap"}, {"deterministic": True}, {"group": 4}, *SIGNS]
    grid += [
        {"head_dim": head_dim, "v_dim": v_dim, "dtype": half, **option}
        for head_dim, v_dim in ((96, 96), (192, 128), (192, 192), (96, 128), (64, 96), (96, 64), (128, 96))
        for option in (({}, *options) if head_dim == 192 or v_dim == head_dim else options[1:2])
    ]
    return [{**call, "backend": "hopper"} for call in grid]


def few_hopper_calls() -> list[dict[str, Any]]:
    """Calls of backend `hopper` in tuned configurations, each with kv_lengths, splits and deterministic once."""
    half = torch.bfloat16
    options: list[dict[str, Any]] = [{"mode": mode} for mode in ("layout", "fine", "gathered", "dense", "causal")]
    options += [{"limited": True}, {"num_splits": 3}, {"deterministic": True}]
    options += [{"mode": mode, "limited": True} for mode in FINE[:2]]
    grid = [{"head_dim": head_dim, "dtype": half, **option} for head_dim in (64, 128) for option in options]
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": mode, "scores": "sinks softcap slopes"}
        for head_dim, mode in itertools.product((64, 128), ("layout", "fine"))
    ]
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": mode, "rows": rows}
        for head_dim, mode, rows in itertools.product((64, 128), ("keys64", "keys128"), (8, 16, 32))
    ]
    # so long that dq has a launch of its own
    grid += [
        {"head_dim": head_dim, "dtype": half, "mode": "columns", "group": 4, **option}
        for head_dim, option in itertools.product((64, 128), ({}, {"length": 1 << 15}))
    ]
    grid += [{"head_dim": 64, "dtype": half, "mode": "dense", "length": 24576}]
    grid += [{"head_dim": 256, "dtype": half, "mode": "layout"}]
    grid += [{"head_dim": dim, "v_dim": v_dim, "dtype": half} for dim, v_dim in ((96, 96), (192, 128), (192, 192))]
    grid += [{"head_dim": 64, "dtype": half, **option} for option in SIGNS]
    grid += [{"head_dim": 128, "dtype": half, **SIGNS[0]}]
    return [{**call, "backend": "hopper"} for call in grid]


def each_option_once(chosen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls with a new configuration or pair of options, and all with a scale, because of a bug of ptxas in 3.6."""
    kept, covered = list[dict[str, Any]](), set[Any]()
    for call in chosen:
        options = sorted((name, value) for name, value in call.items() if name not in ("head_dim", "dtype", "backend"))
        covers = {(call["head_dim"], call["dtype"], call.get("mode"), call.get("limited"))}
        covers |= set(itertools.combinations_with_replacement(options, 2))
        if "scale" in call or not covers <= covered:
            kept.append(call)
        covered |= covers
    return kept
