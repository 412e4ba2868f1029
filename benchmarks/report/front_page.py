"""The speed section of README.md: what was measured on, three sentences, and the chart."""

from __future__ import annotations

import re
from collections.abc import Sequence

from . import lines as measurements
from . import summaries
from .lines import DIRECTIONS, Line, Setting, select
from .summaries import Value

HOPPER, FLEX, CUDNN = ("blocksparse_flash", "hopper"), ("flex", "triton"), ("cudnn", "cudnn")
# the mask of the second sentence
SPARSE = "bigbird"
CHART = "![TFLOP/s by mask, forward and backward](benchmarks/results/speed.png)"


def _against_flex(shown: Sequence[Line]) -> str:
    """How many times as fast as FlexAttention, over all masks of the chart; "" if it was not measured."""
    found = [
        value.value
        for value in summaries.speedups(shown)
        if (value.backend, value.baseline) == (measurements.label(HOPPER), measurements.label(FLEX))
    ]
    if not found:
        return ""
    return (
        f"- `hopper` is {min(found):.2f} to {max(found):.2f} times as fast as compiled FlexAttention with the same "
        f"masks (geometric mean {summaries.mean(found):.2f})."
    )


def _against_dense(shown: Sequence[Line]) -> str:
    """Milliseconds with a sparse mask and with dense attention by cuDNN; "" if either was not measured."""
    head_dim = max(line["head_dim"] for line in shown)
    totals = []
    for provider, pattern in ((HOPPER, SPARSE), (CUDNN, "dense")):
        found = select(shown, provider, pattern=pattern, head_dim=head_dim)
        if {line["direction"] for line in found} != {*DIRECTIONS}:
            return ""
        totals.append(sum(line["ms"] for line in found))
    density = select(shown, HOPPER, pattern=SPARSE, head_dim=head_dim)[0]["density"]
    return (
        f"- With a BigBird mask that stores {density:.1%} of the blocks, forward and backward take {totals[0]:.1f} ms "
        f"together at head dimension {head_dim}; dense attention with cuDNN takes {totals[1]:.1f} ms."
    )


def _growth(values: Sequence[Value], lines: Sequence[Line]) -> str:
    """How time grows with the length; "" if one length was measured."""
    found = [value.value for value in values if value.backend == measurements.label(HOPPER)]
    if not found:
        return ""
    lengths = [line["n"] for line in select(lines, pattern="local") if line["n"] >= summaries.LINEAR_FROM]
    return (
        f"- With a fixed number of keys per query, {max(lengths) // min(lengths)} times as many tokens "
        f"({max(lengths):,} instead of {min(lengths):,}) take {min(found):.0f} to {max(found):.0f} times as long."
    )


def section(setting: Setting, shown: Sequence[Line], lines: Sequence[Line]) -> str:
    """The section; sentences about what was not measured are left out.

    setting, shown  of the main benchmark, its forwards and backwards
    lines           all lines of the same GPU
    """
    longer = select(lines, bench="length")
    sentences = [_against_flex(shown), _against_dense(shown), _growth(summaries.growth(longer), longer)]
    versions = measurements.versions(shown, "torch", "triton").replace("torch", "PyTorch").replace("triton", "Triton")
    # without the CUDA version of the wheel: 2.11.0+cu130
    versions = re.sub(r"\+\w+", "", versions)
    head = (
        f"One {setting.device}, {setting.dtype}, {setting.n:,} tokens, batch {setting.batch}, hidden size "
        f"{setting.hidden}, {versions}:"
    )
    return "\n\n".join([CHART, head, "\n".join(filter(None, sentences))])
