"""Which file may import which? The house rules that no single file can hold.

A new file needs a row in TABLE: what it imports when it is loaded, and what it imports inside functions, when needed.
"""

from __future__ import annotations

import ast
import graphlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import blocksparse_flash
import masks

ROOT = Path(__file__).resolve().parents[1]
CODE = ("blocksparse_flash", "masks", "benchmarks")

OURS = "blocksparse_flash"
NUMPY, TORCH, TRITON = "numpy", "torch", "triton"


class Arrows(NamedTuple):
    """What a file may import: modules of ours by full name, others by their top-level package. Python's own are free."""

    loaded: set[str]
    when_needed: set[str] | frozenset[str] = frozenset()


# files of masks/ whose names masks/__init__.py gives out
FAMILIES = (
    *("alibi_windows", "block_diagonal", "block_diffusion", "build", "butterfly", "content", "dilated", "documents"),
    *("erdos_renyi", "expander", "global_tokens", "grid", "hierarchical", "local", "longnet", "lsh", "orders"),
    *("prefix", "presets", "random", "shared_prefix", "sinks", "small_world", "sparse_transformer", "strided"),
    *("tree", "vertical_slash"),
)

# file: arrows. Reading down, a file only points up (kernels excepted: they point at tile, launch and philox)
TABLE = {
    "blocksparse_flash/alibi.py": Arrows(set()),
    "blocksparse_flash/blocks.py": Arrows({NUMPY}),
    "blocksparse_flash/algebra.py": Arrows({NUMPY, f"{OURS}.blocks"}),
    "blocksparse_flash/gather.py": Arrows({NUMPY, f"{OURS}.algebra", f"{OURS}.blocks"}),
    "blocksparse_flash/description.py": Arrows({NUMPY, f"{OURS}.algebra", f"{OURS}.blocks"}, {"scipy"}),
    "blocksparse_flash/packing.py": Arrows({NUMPY, TORCH}),
    "blocksparse_flash/storage.py": Arrows({NUMPY, TORCH, f"{OURS}.blocks", f"{OURS}.packing"}),
    "blocksparse_flash/arguments.py": Arrows({NUMPY, TORCH, f"{OURS}.blocks"}),
    "blocksparse_flash/full_blocks.py": Arrows({NUMPY, f"{OURS}.arguments", f"{OURS}.blocks"}, {"scipy"}),
    "blocksparse_flash/orders.py": Arrows(
        {NUMPY, TORCH, *(f"{OURS}.{name}" for name in ("arguments", "blocks", "gather"))}
    ),
    "blocksparse_flash/drawing.py": Arrows(
        {NUMPY, *(f"{OURS}.{name}" for name in ("algebra", "arguments", "blocks"))}, {"matplotlib"}
    ),
    "blocksparse_flash/predicate.py": Arrows({NUMPY, TORCH, f"{OURS}.blocks"}),
    "blocksparse_flash/plan.py": Arrows({NUMPY, TORCH, f"{OURS}.blocks", f"{OURS}.packing"}),
    "blocksparse_flash/block_bias.py": Arrows({TORCH, *(f"{OURS}.{name}" for name in ("blocks", "plan", "watchers"))}),
    "blocksparse_flash/watchers.py": Arrows({TORCH}, {TORCH, TRITON}),
    "blocksparse_flash/selection.py": Arrows(
        {TORCH, *(f"{OURS}.{name}" for name in ("arguments", "blocks", "plan", "watchers"))},
        {f"{OURS}.kernels.{name}" for name in ("selecting", "listing")},
    ),
    "blocksparse_flash/sent_blocks.py": Arrows(
        {TORCH, *(f"{OURS}.{name}" for name in ("blocks", "packing", "plan", "selection", "watchers"))},
        {f"{OURS}.kernels.{name}" for name in ("selecting", "listing")},
    ),
    "blocksparse_flash/layout.py": Arrows(
        {NUMPY, TORCH, *(f"{OURS}.{name}" for name in ("algebra", "arguments", "block_bias", "blocks", "description"))}
        | {f"{OURS}.drawing"}
        | {
            f"{OURS}.{name}"
            for name in (
                "full_blocks",
                "gather",
                "orders",
                "packing",
                "plan",
                "predicate",
                "selection",
                "sent_blocks",
                "storage",
                "watchers",
            )
        }
    ),
    "blocksparse_flash/philox.py": Arrows({TORCH}),
    "blocksparse_flash/copy_engine.py": Arrows({TORCH, f"{OURS}.watchers"}),
    "blocksparse_flash/seen.py": Arrows({TORCH, f"{OURS}.copy_engine"}),
    "blocksparse_flash/reference.py": Arrows({TORCH, "einops", f"{OURS}.philox"}),
    "blocksparse_flash/separate_dq.py": Arrows({TORCH}),
    "blocksparse_flash/service.py": Arrows({TORCH, f"{OURS}.splitting"}),
    "blocksparse_flash/splitting.py": Arrows({TORCH}),
    "blocksparse_flash/kernels/__init__.py": Arrows(set()),
    "blocksparse_flash/kernels/tile.py": Arrows({TRITON}),
    "blocksparse_flash/kernels/scores.py": Arrows({TORCH}),
    "blocksparse_flash/kernels/score_tile.py": Arrows({TRITON, f"{OURS}.kernels.tile"}),
    "blocksparse_flash/kernels/launcher.py": Arrows({TRITON}),
    "blocksparse_flash/kernels/launch.py": Arrows(
        {
            TORCH,
            TRITON,
            *(f"{OURS}.{name}" for name in ("copy_engine", "philox", "seen", "kernels.launcher", "kernels.scores")),
        }
    ),
    "blocksparse_flash/kernels/parts.py": Arrows(
        {TRITON, f"{OURS}.seen", f"{OURS}.splitting", f"{OURS}.kernels.tile", f"{OURS}.kernels.launch"},
    ),
    "blocksparse_flash/kernels/decode.py": Arrows(
        {
            TORCH,
            TRITON,
            f"{OURS}.seen",
            *(f"{OURS}.kernels.{name}" for name in ("tile", "launch", "parts", "scores", "score_tile")),
        },
    ),
    "blocksparse_flash/kernels/forward.py": Arrows(
        {
            TORCH,
            TRITON,
            f"{OURS}.seen",
            *(f"{OURS}.kernels.{name}" for name in ("tile", "launch", "decode", "scores", "score_tile")),
        },
    ),
    "blocksparse_flash/kernels/statistics.py": Arrows(
        {TRITON, f"{OURS}.seen", f"{OURS}.kernels.tile", f"{OURS}.kernels.launch"}
    ),
    "blocksparse_flash/kernels/backward_programs.py": Arrows(
        {TRITON, *(f"{OURS}.kernels.{name}" for name in ("tile", "score_tile", "statistics"))}
    ),
    "blocksparse_flash/kernels/backward.py": Arrows(
        {
            TORCH,
            f"{OURS}.seen",
            *(f"{OURS}.kernels.{name}" for name in ("launch", "scores", "statistics", "backward_programs")),
        },
    ),
    "blocksparse_flash/kernels/rows.py": Arrows(
        {TORCH, TRITON, *(f"{OURS}.{name}" for name in ("seen", "kernels.launch", "kernels.tile"))}
    ),
    "blocksparse_flash/kernels/selecting.py": Arrows({TORCH, TRITON, f"{OURS}.kernels.launch"}),
    "blocksparse_flash/kernels/listing.py": Arrows(
        {TORCH, TRITON, *(f"{OURS}.kernels.{name}" for name in ("launch", "selecting", "tile"))},
    ),
    "blocksparse_flash/kernels/hopper.py": Arrows(
        {TORCH, TRITON, f"{OURS}.seen", f"{OURS}.kernels.tile", f"{OURS}.kernels.launch"}
    ),
    "blocksparse_flash/kernels/hopper_rows.py": Arrows(
        {TRITON, *(f"{OURS}.kernels.{name}" for name in ("tile", "hopper"))},
    ),
    "blocksparse_flash/kernels/hopper_softmax.py": Arrows(
        {TRITON, *(f"{OURS}.kernels.{name}" for name in ("tile", "hopper", "hopper_rows"))},
    ),
    "blocksparse_flash/kernels/hopper_forward.py": Arrows(
        {TORCH, TRITON, f"{OURS}.seen", f"{OURS}.splitting"}
        | {f"{OURS}.kernels.{name}" for name in ("tile", "launch", "parts", "hopper", "hopper_rows", "hopper_softmax")},
    ),
    "blocksparse_flash/kernels/hopper_service.py": Arrows(
        {TRITON, f"{OURS}.service", f"{OURS}.kernels.tile", f"{OURS}.kernels.hopper"}
    ),
    "blocksparse_flash/kernels/hopper_cols.py": Arrows(
        {TRITON, *(f"{OURS}.kernels.{name}" for name in ("tile", "hopper", "hopper_service"))},
    ),
    "blocksparse_flash/kernels/hopper_backward.py": Arrows(
        {
            TORCH,
            TRITON,
            f"{OURS}.seen",
            f"{OURS}.separate_dq",
            f"{OURS}.service",
            f"{OURS}.splitting",
            *(
                f"{OURS}.kernels.{name}"
                for name in (
                    "tile",
                    "launch",
                    "parts",
                    "statistics",
                    "hopper",
                    "hopper_cols",
                    "hopper_service",
                    "backward",
                )
            ),
        }
    ),
    "blocksparse_flash/kernels/eager_scores.py": Arrows({TORCH, f"{OURS}.kernels.scores"}),
    "blocksparse_flash/kernels/eager.py": Arrows(
        {NUMPY, TORCH, f"{OURS}.philox", f"{OURS}.kernels.scores", f"{OURS}.kernels.eager_scores"}
    ),
    "blocksparse_flash/ops.py": Arrows(
        {TORCH, *(f"{OURS}.{name}" for name in ("copy_engine", "seen", "watchers", "kernels.scores"))},
        {f"{OURS}.kernels.{name}" for name in ("eager", "forward", "backward", "hopper_forward", "hopper_backward")},
    ),
    "blocksparse_flash/contract.py": Arrows({TORCH, *(f"{OURS}.{name}" for name in ("layout", "seen", "watchers"))}),
    "blocksparse_flash/explanation/dispatch.py": Arrows({NUMPY}),
    "blocksparse_flash/explanation/call.py": Arrows(
        {TORCH, *(f"{OURS}.{name}" for name in ("copy_engine", "explanation.dispatch", "layout", "plan"))}
    ),
    "blocksparse_flash/explanation/memory.py": Arrows(
        {f"{OURS}.separate_dq", f"{OURS}.service", f"{OURS}.splitting"}
        | {f"{OURS}.explanation.{name}" for name in ("call", "dispatch", "prediction")}
    ),
    "blocksparse_flash/explanation/prediction.py": Arrows({f"{OURS}.explanation.dispatch"}),
    "blocksparse_flash/explanation/cost.py": Arrows(
        {NUMPY, TORCH, f"{OURS}.ops", f"{OURS}.plan"}
        | {f"{OURS}.explanation.{name}" for name in ("call", "dispatch", "memory", "prediction")}
    ),
    "blocksparse_flash/explanation/advice.py": Arrows(
        {TORCH, f"{OURS}.watchers"}
        | {f"{OURS}.explanation.{name}" for name in ("call", "cost", "dispatch", "prediction")}
    ),
    "blocksparse_flash/explanation/__init__.py": Arrows(
        {f"{OURS}.explanation.{name}" for name in ("advice", "call", "cost", "dispatch", "memory", "prediction")}
    ),
    "blocksparse_flash/functional.py": Arrows(
        {TORCH}
        | {
            f"{OURS}.{name}"
            for name in (
                "block_bias",
                "contract",
                "copy_engine",
                "explanation",
                "explanation.call",
                "layout",
                "ops",
                "reference",
                "seen",
                "watchers",
            )
        },
        {TRITON},
    ),
    "blocksparse_flash/merging.py": Arrows({TORCH, f"{OURS}.watchers"}),
    "blocksparse_flash/__init__.py": Arrows(
        {f"{OURS}.{name}" for name in ("explanation", "functional", "layout", "merging")}
    ),
    "blocksparse_flash/crops.py": Arrows({TORCH, f"{OURS}.layout"}, {"masks"}),
    "blocksparse_flash/huggingface.py": Arrows(
        {TORCH, *(f"{OURS}.{name}" for name in ("crops", "functional", "layout"))}, {TORCH, "transformers"}
    ),
    "blocksparse_flash/holding.py": Arrows({TORCH, f"{OURS}.layout"}),
    "blocksparse_flash/torch_modules.py": Arrows({TORCH, "einops", f"{OURS}.functional", f"{OURS}.holding"}),
    "blocksparse_flash/nn.py": Arrows(
        {TORCH, "einops"}
        | {f"{OURS}.{name}" for name in ("alibi", "contract", "functional", "holding", "layout", "torch_modules")}
    ),
    "blocksparse_flash/interop/stored.py": Arrows(
        {NUMPY, TORCH, *(f"{OURS}.{name}" for name in ("arguments", "blocks", "layout"))}
    ),
    "blocksparse_flash/interop/runs.py": Arrows({NUMPY, f"{OURS}.blocks", f"{OURS}.layout", f"{OURS}.interop.stored"}),
    "blocksparse_flash/interop/kv_lists.py": Arrows(
        {NUMPY, TORCH, *(f"{OURS}.{name}" for name in ("arguments", "blocks", "layout", "interop.stored"))}
    ),
    **{
        f"blocksparse_flash/interop/{peer}.py": Arrows(
            {TORCH, *(f"{OURS}.{name}" for name in ("arguments", "layout", "interop.kv_lists", "interop.stored"))}
        )
        for peer in ("flex_attention", "flash_attention_4")
    },
    "blocksparse_flash/interop/bsr.py": Arrows(
        {
            NUMPY,
            TORCH,
            *(f"{OURS}.{name}" for name in ("arguments", "blocks", "layout", "interop.runs", "interop.stored")),
        },
        {"scipy"},
    ),
    **{
        f"blocksparse_flash/interop/{peer}.py": Arrows(
            {
                NUMPY,
                TORCH,
                *(f"{OURS}.{name}" for name in ("arguments", "blocks", "layout", "interop.runs", "interop.stored")),
            }
        )
        for peer in ("flashmask", "magi")
    },
    "blocksparse_flash/interop/block_masks.py": Arrows(
        {NUMPY, TORCH, *(f"{OURS}.{name}" for name in ("arguments", "blocks", "layout", "interop.stored"))}
    ),
    "blocksparse_flash/interop/attention_masks.py": Arrows(
        {TORCH, *(f"{OURS}.{name}" for name in ("arguments", "blocks", "layout", "interop.stored"))}
    ),
    "blocksparse_flash/interop/__init__.py": Arrows(
        {
            f"{OURS}.interop.{name}"
            for name in (
                "attention_masks",
                "block_masks",
                "bsr",
                "flash_attention_4",
                "flashmask",
                "flex_attention",
                "magi",
            )
        }
    ),
    "blocksparse_flash/distributed/ownership.py": Arrows({NUMPY, f"{OURS}.blocks"}, {"scipy"}),
    "blocksparse_flash/distributed/traffic.py": Arrows({NUMPY, f"{OURS}.blocks", f"{OURS}.plan"}),
    "blocksparse_flash/distributed/times.py": Arrows({f"{OURS}.plan"}),
    "blocksparse_flash/distributed/costs.py": Arrows(
        {NUMPY, *(f"{OURS}.{name}" for name in ("blocks", "plan"))}
        | {f"{OURS}.distributed.{name}" for name in ("ownership", "times", "traffic")}
    ),
    "blocksparse_flash/distributed/agreement.py": Arrows({TORCH}),
    "blocksparse_flash/distributed/local.py": Arrows({TORCH, f"{OURS}.ops"}),
    "blocksparse_flash/distributed/rows.py": Arrows(
        {TORCH, f"{OURS}.merging", f"{OURS}.distributed.local"}, {f"{OURS}.kernels.rows"}
    ),
    "blocksparse_flash/distributed/messages.py": Arrows({TORCH}),
    "blocksparse_flash/distributed/side.py": Arrows({TORCH}),
    "blocksparse_flash/distributed/shipping.py": Arrows(
        {TORCH, *(f"{OURS}.distributed.{name}" for name in ("local", "messages", "rows", "side"))}
    ),
    "blocksparse_flash/distributed/exchange.py": Arrows(
        {
            TORCH,
            f"{OURS}.ops",
            f"{OURS}.watchers",
            *(f"{OURS}.distributed.{name}" for name in ("local", "messages", "rows", "shipping", "side")),
        }
    ),
    "blocksparse_flash/distributed/context_plan.py": Arrows(
        {NUMPY, TORCH, *(f"{OURS}.{name}" for name in ("arguments", "blocks", "layout", "plan"))}
        | {
            f"{OURS}.distributed.{name}"
            for name in ("agreement", "costs", "messages", "ownership", "side", "times", "traffic")
        }
    ),
    "blocksparse_flash/distributed/packed_heads.py": Arrows({TORCH}),
    "blocksparse_flash/distributed/whole_heads.py": Arrows(
        {
            TORCH,
            f"{OURS}.ops",
            f"{OURS}.watchers",
            *(f"{OURS}.distributed.{name}" for name in ("exchange", "local", "messages", "packed_heads")),
        }
    ),
    "blocksparse_flash/distributed/ulysses.py": Arrows(
        {
            TORCH,
            *(f"{OURS}.{name}" for name in ("contract", "functional", "layout")),
            *(f"{OURS}.distributed.{name}" for name in ("messages", "packed_heads", "times", "whole_heads")),
        },
        {f"{OURS}.distributed.context_plan"},
    ),
    "blocksparse_flash/distributed/functional.py": Arrows(
        {TORCH, *(f"{OURS}.{name}" for name in ("contract", "functional", "ops", "seen", "watchers"))}
        | {
            f"{OURS}.distributed.{name}"
            for name in ("agreement", "context_plan", "dtensors", "exchange", "times", "ulysses")
        }
    ),
    "blocksparse_flash/distributed/dtensors.py": Arrows({TORCH}, {f"{OURS}.distributed.context_plan"}),
    "blocksparse_flash/distributed/nn.py": Arrows(
        {TORCH, "einops", *(f"{OURS}.{name}" for name in ("nn", "distributed.context_plan", "distributed.functional"))}
    ),
    "blocksparse_flash/distributed/__init__.py": Arrows(
        {f"{OURS}.distributed.{name}" for name in ("context_plan", "functional", "nn")}
    ),
    "benchmarks/context_choices.py": Arrows(
        {NUMPY, *(f"{OURS}.distributed.{name}" for name in ("costs", "ownership"))}
        | {f"benchmarks.{name}" for name in ("context_report", "lines", "markdown", "patterns")}
    ),
    "benchmarks/context_providers.py": Arrows(
        {NUMPY, TORCH, OURS, "benchmarks.patterns"}
        | {
            f"{OURS}.distributed{name}"
            for name in ("", ".exchange", ".functional", ".local", ".rows", ".shipping", ".side")
        }
        | {f"{OURS}.functional"}
    ),
    "benchmarks/context_parallel.py": Arrows(
        {TORCH, OURS, *(f"benchmarks.{name}" for name in ("context_providers", "measure", "patterns"))}
    ),
    "benchmarks/markdown.py": Arrows(set()),
    "benchmarks/context_report.py": Arrows({"benchmarks.lines", "benchmarks.markdown"}),
    "benchmarks/train_context_parallel.py": Arrows({TORCH, OURS, "masks", f"{OURS}.distributed"}),
    "masks/checks.py": Arrows({NUMPY, TORCH}),
    "masks/canvas.py": Arrows({NUMPY, "masks.checks"}),
    "masks/chunks.py": Arrows({NUMPY, "masks.canvas", "masks.checks"}),
    "masks/kinds.py": Arrows({NUMPY}),
    "masks/heads.py": Arrows({OURS, "masks.checks"}),
    "masks/boxes.py": Arrows({NUMPY, TORCH, OURS, "masks.canvas", "masks.kinds"}),
    "masks/orders.py": Arrows({NUMPY, TORCH, "masks.canvas", "masks.checks"}),
    "masks/block_diagonal.py": Arrows(
        {NUMPY, TORCH, OURS, *(f"masks.{name}" for name in ("canvas", "checks", "chunks", "kinds"))}
    ),
    "masks/butterfly.py": Arrows({NUMPY, OURS, "masks.canvas", "masks.checks"}),
    "masks/dilated.py": Arrows({NUMPY, TORCH, OURS, "masks.canvas", "masks.checks", "masks.heads"}),
    "masks/documents.py": Arrows({NUMPY, TORCH, OURS, "masks.canvas", "masks.checks", "masks.kinds"}),
    "masks/global_tokens.py": Arrows({NUMPY, TORCH, OURS, "masks.canvas", "masks.checks", "masks.kinds"}),
    "masks/grid.py": Arrows(
        {NUMPY, TORCH, OURS, *(f"masks.{name}" for name in ("boxes", "canvas", "checks", "orders"))}
    ),
    "masks/hierarchical.py": Arrows(
        {NUMPY, TORCH, OURS, *(f"masks.{name}" for name in ("canvas", "checks", "chunks", "kinds"))}
    ),
    "masks/local.py": Arrows({NUMPY, TORCH, OURS, "masks.canvas", "masks.checks"}),
    "masks/longnet.py": Arrows(
        {NUMPY, TORCH, OURS, *(f"masks.{name}" for name in ("canvas", "checks", "chunks", "heads", "kinds"))}
    ),
    "masks/prefix.py": Arrows({NUMPY, TORCH, OURS, "masks.canvas", "masks.checks"}),
    "masks/random.py": Arrows({NUMPY, OURS, "masks.canvas", "masks.checks"}),
    "masks/sinks.py": Arrows({NUMPY, TORCH, OURS, "masks.canvas", "masks.checks"}),
    "masks/sparse_transformer.py": Arrows(
        {NUMPY, TORCH, OURS, *(f"masks.{name}" for name in ("canvas", "checks", "chunks", "heads", "kinds"))}
    ),
    "masks/strided.py": Arrows({NUMPY, TORCH, OURS, "masks.canvas", "masks.checks"}),
    "masks/vertical_slash.py": Arrows(
        {NUMPY, TORCH, OURS, *(f"masks.{name}" for name in ("canvas", "checks", "heads", "kinds"))}
    ),
    "masks/tree.py": Arrows({NUMPY, TORCH, OURS, "masks.canvas", "masks.checks"}),
    "masks/block_diffusion.py": Arrows({NUMPY, TORCH, OURS, "masks.canvas", "masks.checks"}),
    "masks/alibi_windows.py": Arrows(
        {NUMPY, TORCH, OURS, f"{OURS}.alibi", *(f"masks.{name}" for name in ("canvas", "checks", "heads", "local"))}
    ),
    "masks/shared_prefix.py": Arrows({NUMPY, TORCH, OURS, "masks.canvas", "masks.documents"}),
    "masks/erdos_renyi.py": Arrows(
        {NUMPY, OURS, *(f"masks.{name}" for name in ("canvas", "checks", "heads", "random"))}
    ),
    "masks/expander.py": Arrows({NUMPY, OURS, "masks.canvas", "masks.checks", "masks.random"}),
    "masks/small_world.py": Arrows({NUMPY, OURS, "masks.canvas", "masks.checks", "masks.random"}),
    "masks/lsh.py": Arrows({NUMPY, TORCH, OURS, "masks.canvas", "masks.checks", "masks.heads"}),
    "masks/content.py": Arrows({NUMPY, TORCH, OURS, "masks.canvas", "masks.checks", "masks.local"}),
    "masks/deepspeed.py": Arrows(
        {NUMPY, TORCH, OURS, *(f"masks.{name}" for name in ("canvas", "checks", "heads", "local", "random"))}
    ),
    "masks/presets.py": Arrows(
        {
            NUMPY,
            OURS,
            *(f"masks.{name}" for name in ("butterfly", "canvas", "checks", "global_tokens", "local", "random")),
        }
    ),
    "masks/build.py": Arrows({OURS, "masks.canvas", "masks.checks"}),
    "masks/command_line.py": Arrows({"masks.build"}),
    "masks/__main__.py": Arrows({"masks.command_line"}),
    "masks/__init__.py": Arrows({f"masks.{name}" for name in FAMILIES}),
    "benchmarks/__init__.py": Arrows(set()),
    "benchmarks/lra/__init__.py": Arrows(set()),
    "benchmarks/measure.py": Arrows({TORCH}, {TRITON}),
    "benchmarks/patterns.py": Arrows({NUMPY, OURS}),
    "benchmarks/sweeps.py": Arrows({"benchmarks.patterns"}),
    "benchmarks/peers.py": Arrows(
        {NUMPY, TORCH, OURS, f"{OURS}.interop", "benchmarks.patterns"},
        {"block_sparse_attn", "flash_attn", "flashinfer", "natten", "xformers"},
    ),
    "benchmarks/correctness.py": Arrows({TORCH, "benchmarks.patterns"}),
    "benchmarks/attention.py": Arrows(
        {TORCH, *(f"benchmarks.{name}" for name in ("correctness", "lines", "measure", "patterns", "peers", "sweeps"))}
    ),
    "benchmarks/small.py": Arrows(
        {TORCH, *(f"benchmarks.{name}" for name in ("attention", "measure", "patterns", "peers"))}
    ),
    "benchmarks/small_report.py": Arrows({"benchmarks.lines", "benchmarks.markdown"}),
    "benchmarks/decode.py": Arrows(
        {TORCH, OURS, f"{OURS}.interop", "masks"}
        | {f"benchmarks.{name}" for name in ("correctness", "measure", "peers")}
    ),
    "benchmarks/masks.py": Arrows({NUMPY, TORCH, OURS, "masks", "benchmarks.measure"}),
    "benchmarks/lines.py": Arrows(set()),
    "benchmarks/crossings.py": Arrows({"benchmarks.lines"}),
    "benchmarks/findings.py": Arrows({"benchmarks.crossings", "benchmarks.lines"}),
    "benchmarks/calibrate.py": Arrows(
        {NUMPY, TORCH, "scipy", OURS, "benchmarks.lines", "benchmarks.sweeps"}
        | {f"{OURS}.explanation.{name}" for name in ("call", "cost", "dispatch", "memory", "prediction")}
    ),
    "benchmarks/io.py": Arrows({TORCH, OURS, "benchmarks.measure", "benchmarks.patterns"}),
    "benchmarks/bounds.py": Arrows(
        {NUMPY, TORCH, *(f"{OURS}.explanation.{name}" for name in ("call", "dispatch", "memory", "prediction"))}
        | {"benchmarks.calibrate", "benchmarks.lines"}
    ),
    "benchmarks/plots.py": Arrows({"benchmarks.crossings", "benchmarks.lines"}, {"matplotlib"}),
    "benchmarks/report.py": Arrows(
        {f"{OURS}.explanation.prediction"}
        | {
            f"benchmarks.{name}"
            for name in ("bounds", "context_report", "findings", "lines", "markdown", "plots", "small_report")
        }
    ),
    "benchmarks/huggingface.py": Arrows(
        {TORCH, OURS, "masks", "transformers", f"{OURS}.huggingface", "benchmarks.measure"}
    ),
    "benchmarks/overhead.py": Arrows({TORCH, OURS, "masks"}, {f"{OURS}.kernels.launch"}),
    "benchmarks/gallery.py": Arrows({NUMPY, TORCH, OURS, "masks"}, {"matplotlib"}),
    "benchmarks/lra/listops.py": Arrows(set()),
    "benchmarks/lra/paddles.py": Arrows({NUMPY, "PIL"}),
    "benchmarks/lra/snakes.py": Arrows({NUMPY, "numba"}),
    "benchmarks/lra/pathfinder.py": Arrows({NUMPY, "benchmarks.lra.paddles", "benchmarks.lra.snakes"}),
    "benchmarks/lra/sources.py": Arrows({NUMPY, "benchmarks.lra.listops", "benchmarks.lra.pathfinder"}),
    "benchmarks/lra/floors.py": Arrows({NUMPY, TORCH, "benchmarks.lra.listops", "benchmarks.lra.pathfinder"}),
    "benchmarks/lra/sets.py": Arrows({NUMPY, "tqdm", "benchmarks.lra.sources"}),
    "benchmarks/lra/official/__init__.py": Arrows(set()),
    "benchmarks/lra/official/places.py": Arrows({NUMPY}),
    "benchmarks/lra/official/listops.py": Arrows({"benchmarks.lra.listops", "benchmarks.lra.official.places"}),
    "benchmarks/lra/official/retrieval.py": Arrows({NUMPY, "benchmarks.lra.official.places"}),
    "benchmarks/lra/official/text.py": Arrows({NUMPY, "benchmarks.lra.official.places"}),
    "benchmarks/lra/official/image.py": Arrows({NUMPY, TORCH, "benchmarks.lra.official.places"}),
    "benchmarks/lra/official/pathfinder.py": Arrows({NUMPY, TORCH, "PIL", "benchmarks.lra.official.places"}),
    "benchmarks/lra/stand_ins.py": Arrows({NUMPY, "benchmarks.lra.official.places"}),
    "benchmarks/lra/markers.py": Arrows({NUMPY, TORCH, "benchmarks.lra.paddles"}),
    "benchmarks/lra/tasks.py": Arrows({"benchmarks.lra.listops", "benchmarks.lra.pathfinder"}),
    "benchmarks/lra/batches.py": Arrows({NUMPY, TORCH, "benchmarks.lra.sources", "benchmarks.lra.official.places"}),
    "benchmarks/lra/data.py": Arrows(
        {NUMPY, TORCH, "lightning"}
        | {
            f"benchmarks.lra.{name}"
            for name in ("batches", "listops", "pathfinder", "sets", "sources", "stand_ins", "tasks")
        }
        | {
            f"benchmarks.lra.official.{name}"
            for name in ("image", "listops", "pathfinder", "places", "retrieval", "text")
        }
    ),
    "benchmarks/lra/scoring.py": Arrows(
        {
            NUMPY,
            *(
                f"benchmarks.lra.{name}"
                for name in ("batches", "data", "floors", "listops", "markers", "pathfinder", "tasks")
            ),
        }
    ),
    "benchmarks/lra/model.py": Arrows({TORCH, OURS, f"{OURS}.nn", "benchmarks.lra.tasks"}, {"masks"}),
    "benchmarks/lra/transfer.py": Arrows({TORCH, "benchmarks.lra.model"}),
    "benchmarks/lra/compiling.py": Arrows({TORCH, f"{OURS}.nn"}),
    "benchmarks/lra/training.py": Arrows(
        {NUMPY, TORCH, "lightning", "torchmetrics", f"{OURS}.nn", "benchmarks.measure"}
        | {
            f"benchmarks.lra.{name}"
            for name in ("batches", "compiling", "floors", "model", "scoring", "tasks", "transfer")
        }
    ),
    "benchmarks/lra/progress.py": Arrows({TORCH, "lightning"}),
    "benchmarks/lra/published.py": Arrows(set()),
    "benchmarks/lra/lines.py": Arrows({TORCH, "benchmarks.measure", "benchmarks.lra.floors"}),
    "benchmarks/lra/peers.py": Arrows({TORCH, OURS, "benchmarks.peers"}, {f"{OURS}.interop"}),
    "benchmarks/lra/speed.py": Arrows(
        {TORCH, "einops", "yaml", OURS, f"{OURS}.nn", "benchmarks.measure"}
        | {f"benchmarks.lra.{name}" for name in ("lines", "model", "peers", "tasks")}
    ),
    "benchmarks/lra/runtime.py": Arrows(
        {NUMPY, TORCH, OURS, "benchmarks.measure"}
        | {f"benchmarks.lra.{name}" for name in ("lines", "peers", "published")}
    ),
    "benchmarks/lra/tables.py": Arrows({f"benchmarks.lra.{name}" for name in ("peers", "published")}),
    "benchmarks/lra/plots.py": Arrows(
        {"matplotlib", "yaml", *(f"benchmarks.lra.{name}" for name in ("data", "published", "tasks"))}
    ),
    "benchmarks/lra/reporting.py": Arrows(
        {"benchmarks.measure", *(f"benchmarks.lra.{name}" for name in ("lines", "plots", "tables"))}
    ),
    "benchmarks/lra/__main__.py": Arrows(
        {"jsonargparse"},
        {"lightning", TORCH, "benchmarks.measure"}
        | {f"benchmarks.lra.{name}" for name in ("data", "scoring", "sets", "tasks", "training")}
        | {
            f"benchmarks.lra.{name}"
            for name in ("lines", "peers", "published", "reporting", "runtime", "speed", "tables")
        },
    ),
    "benchmarks/lra/demo.py": Arrows(
        {TORCH, "lightning", "matplotlib", "torchmetrics", "masks", "benchmarks.lra.listops", OURS, f"{OURS}.nn"}
    ),
}


# ---- reading imports ----


def python_files(root: Path) -> dict[str, Path]:
    """Path inside the repository -> file, of all code that ships."""
    return {
        path.relative_to(root).as_posix(): path for folder in CODE for path in sorted((root / folder).rglob("*.py"))
    }


def module_of(name: str) -> str:
    """blocksparse_flash/kernels/__init__.py -> blocksparse_flash.kernels"""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def nodes(tree: ast.AST, is_needed: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """(node, whether it runs only when needed: inside a function, or for a type checker) of every node."""
    for node in ast.iter_child_nodes(tree):
        is_lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_lazy |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        yield node, is_needed
        yield from nodes(node, is_needed or is_lazy)


def targets(node: ast.AST, name: str, modules: set[str]) -> Iterator[str]:
    """Full names of the modules that an import statement, or import_module("..."), loads."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = module_of(name).split(".")
            # a package's own __init__.py is already one level up
            up = node.level - name.endswith("__init__.py")
            base = ".".join([*package[: len(package) - up], *filter(None, [node.module])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            yield inner if inner in modules else base
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        yield ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else "a name made at run time"


def arrows_of(name: str, path: Path, modules: set[str]) -> Arrows:
    """What a file does import."""
    loaded: set[str] = set()
    when_needed: set[str] = set()
    for node, is_needed in nodes(ast.parse(path.read_text(encoding="utf-8"))):
        for target in targets(node, name, modules):
            top = target.split(".")[0]
            if top not in sys.stdlib_module_names:
                (when_needed if is_needed else loaded).add(target if top in CODE else top)
    return Arrows(loaded, when_needed)


def violations(root: Path, table: dict[str, Arrows]) -> list[str]:
    """One sentence for each import that the table does not allow."""
    files = python_files(root)
    modules = {module_of(name) for name in files}
    said = []
    for name, path in files.items():
        if name not in table:
            said.append(f"{name} has no row in the table")
            continue
        found, allowed = arrows_of(name, path, modules), table[name]
        # what may be loaded at once may be loaded later too
        late = found.when_needed - allowed.when_needed - allowed.loaded
        said += [f"{name} imports {target}" for target in sorted(found.loaded - allowed.loaded)]
        said += [f"{name} imports {target} when needed" for target in sorted(late)]
    return said


# ---- imports ----


def test_imports_follow_the_table() -> None:
    assert violations(ROOT, TABLE) == []


def test_the_table_names_only_files_that_exist() -> None:
    assert sorted(TABLE.keys() - python_files(ROOT).keys()) == []


def test_arrows_never_turn_back() -> None:
    """No cycle, lazy imports included; raises CycleError with the cycle."""
    graph = {
        module_of(name): {target for target in arrows.loaded | arrows.when_needed if target.split(".")[0] in CODE}
        for name, arrows in TABLE.items()
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("blocksparse_flash.blocks") < order.index("blocksparse_flash") < order.index("masks")


def test_the_core_never_imports_masks() -> None:
    """But for what is given a specification of a mask as text, and then only."""
    assert [
        (name, target)
        for name, arrows in TABLE.items()
        if name.startswith("blocksparse_flash/")
        for target in arrows.loaded | arrows.when_needed
        if target.split(".")[0] in ("masks", "benchmarks")
    ] == [("blocksparse_flash/crops.py", "masks")]
    assert "masks" not in TABLE["blocksparse_flash/crops.py"].loaded


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("import masks", "blocksparse_flash/blocks.py imports masks"),
        ("from masks.local import local", "blocksparse_flash/blocks.py imports masks.local"),
        ("from . import plan", "blocksparse_flash/blocks.py imports blocksparse_flash.plan"),
        ("from .plan import Plan", "blocksparse_flash/blocks.py imports blocksparse_flash.plan"),
        ("import scipy.sparse", "blocksparse_flash/blocks.py imports scipy"),
        ("try:\n    import triton\nexcept ImportError: pass", "blocksparse_flash/blocks.py imports triton"),
        (
            "def late():\n    from . import plan",
            "blocksparse_flash/blocks.py imports blocksparse_flash.plan when needed",
        ),
        (
            "import importlib\ndef late(): importlib.import_module('triton')",
            "blocksparse_flash/blocks.py imports triton when needed",
        ),
    ],
)
def test_a_planted_import_is_caught(tmp_path: Path, line: str, sentence: str) -> None:
    for name in ("blocksparse_flash/blocks.py", "blocksparse_flash/plan.py", "masks/local.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import os\n")
    (tmp_path / "blocksparse_flash/blocks.py").write_text(f"import numpy\n{line}\n")
    table = {name: TABLE[name] for name in ("blocksparse_flash/blocks.py", "blocksparse_flash/plan.py")}
    assert violations(tmp_path, table) == [sentence, "masks/local.py has no row in the table"]


def modules_after(statement: str) -> set[str]:
    """Top-level packages loaded in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(said.stdout.split())


@pytest.mark.parametrize("package", ["blocksparse_flash", "blocksparse_flash.interop"])
def test_importing_the_package_loads_nothing_heavy(package: str) -> None:
    # what torch itself loads is not ours to say
    added = modules_after(f"import {package}") - modules_after("import torch, numpy, einops")
    assert "blocksparse_flash" in added
    assert not added & {"triton", "scipy", "matplotlib", "masks", "benchmarks", "networkx", "pandas"}


def test_peers_formats_are_loaded_when_asked_for() -> None:
    code = "import sys, blocksparse_flash; print([name for name in sys.modules if 'interop' in name or 'flex' in name])"
    before = "import sys, torch; print([name for name in sys.modules if 'interop' in name or 'flex' in name])"
    said = [
        subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for run in (code, before)
    ]
    assert said[0] == said[1]


# ---- names ----


def test_public_names() -> None:
    assert blocksparse_flash.__all__ == [
        "BlockLayout",
        "Explanation",
        "attention",
        "attention_with_lse",
        "explain",
        "merge",
    ]
    assert masks.__all__ == [
        "a_shape",
        "alibi_windows",
        "axial",
        "bigbird",
        "block_causal",
        "block_diagonal",
        "block_diffusion",
        "build",
        "butterfly",
        "causal",
        "dilated_window",
        "documents",
        "erdos_renyi",
        "expander",
        "fixed",
        "global_tokens",
        "hierarchical",
        "hilbert_order",
        "local",
        "longformer",
        "longnet",
        "lsh",
        "morton_order",
        "neighborhood",
        "pixelfly",
        "prefix_lm",
        "random",
        "shared_prefix",
        "sink_window",
        "sliding_tile",
        "small_world",
        "strided",
        "swin",
        "tile_order",
        "top_k",
        "top_p",
        "tree",
        "tri_shape",
        "vertical_slash",
    ]
    assert all(hasattr(module, name) for module in (blocksparse_flash, masks) for name in module.__all__)


def test_attention_has_its_exact_signature() -> None:
    expected = (
        "q, k, v, layout=None, *, causal=False, scale=None, kv_lengths=None, dropout_p=0.0, seed=None, "
        "deterministic=None, backend='auto', sinks=None, softcap=None, alibi_slopes=None, block_bias=None"
    )
    for function in (blocksparse_flash.attention, blocksparse_flash.attention_with_lse, blocksparse_flash.explain):
        signature = inspect.signature(function)
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        assert str(inspect.Signature(bare)) == f"({expected})"


def test_every_file_answers_a_question() -> None:
    """The first line of a file is a question, the second part says what it knows and must not know."""
    mute = [
        name
        for name, path in python_files(ROOT).items()
        if "?" not in (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
        and not name.endswith("__init__.py")
    ]
    assert mute == []


def test_no_file_is_a_drawer() -> None:
    drawers = {"util", "utils", "common", "helper", "helpers", "config", "misc"}
    everything = [path for folder in (*CODE, "tests") for path in (ROOT / folder).rglob("*")]
    assert [path for path in everything if path.stem in drawers] == []


def test_no_environment_variables_are_read() -> None:
    reading = re.compile(r"\b(environ|getenv|putenv)\b")
    readers = [name for name, path in python_files(ROOT).items() if reading.search(path.read_text(encoding="utf-8"))]
    assert readers == []


# ---- the repository ----


def tracked_text() -> dict[str, str]:
    """Path -> text of the files in the repository, pictures left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("needs a git checkout")
    paths = (ROOT / name for name in listed.stdout.splitlines())
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in paths
        if path.is_file() and path.suffix != ".png"
    }


def test_no_path_of_a_machine() -> None:
    machine = re.compile(r"(?<![\w.*}$)])/(home|root|work|Users|mnt|opt|tmp)/\w")
    assert machine.search(" /home/someone")
    assert [name for name, text in tracked_text().items() if machine.search(text)] == ["tests/test_architecture.py"]


def test_nothing_is_left_for_later() -> None:
    words = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")))
    assert [name for name, text in tracked_text().items() if words.search(text)] == []


def test_rooms_at_the_top_are_fixed() -> None:
    folders = {name.split("/")[0] for name in tracked_text() if "/" in name}
    assert folders <= {*CODE, "tests", "docs", ".ci"}
