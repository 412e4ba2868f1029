"""Training speed of transformers models with a layout: `python -m benchmarks.run.huggingface`, a JSON line per figure.

A step is forward, loss, backward and AdamW, in bfloat16 autocast, of GPT-2 small and BERT-large with random weights,
longer sequences and no dropout. Baselines are transformers' "sdpa" and "eager"; first with the model's own attention
(causal, dense), then with a layout, which the baselines get as a mask of every pair. Outputs are compared before
timing; cases that do not fit into memory are reported.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.huggingface import ATTENTION_NAME, CONFIG_KEY, register

from . import measure
from .correctness import relative_error

LAYOUT = "butterfly | local(window=256)"
PROVIDERS = {ATTENTION_NAME: "blocksparse_flash", "sdpa": "transformers sdpa", "eager": "transformers eager"}
KEYS = [
    "bench", "provider", "model", "pattern", "density", "n", "batch", "dtype", "direction", "ms", "ms_p20", "ms_p80",
    "tokens_per_s", "peak_bytes", "setup_ms", "device", "torch", "transformers", "commit",
]  # fmt: skip


# values of a config that replace the published ones
Sizes = dict[str, Any] | None


class Case(NamedTuple):
    """A model, tokens in a sequence, sequences in a batch."""

    model: str
    n: int
    batch: int


CASES = [Case("gpt2", 4096, 4), Case("gpt2", 16384, 1), Case("bert-large", 512, 32), Case("bert-large", 4096, 4)]


def config_of(case: Case, sizes: Sizes = None) -> Any:
    """The published sizes without dropout, for the length of the case; `sizes` replaces some."""
    if case.model == "gpt2":
        dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        return transformers.GPT2Config(**{"n_positions": case.n, "use_cache": False, **dropouts, **(sizes or {})})
    settings = {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "max_position_embeddings": case.n, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    return transformers.BertConfig(**{**settings, **(sizes or {})})


def model_of(case: Case, how: str, pattern: str | None, sizes: Sizes, device: torch.device) -> Any:
    """The model, the same weights for every `how`."""
    config = config_of(case, sizes)
    if how == ATTENTION_NAME:
        setattr(config, CONFIG_KEY, pattern)
    kind = transformers.GPT2LMHeadModel if case.model == "gpt2" else transformers.BertForMaskedLM
    torch.manual_seed(0)
    return kind._from_config(config, attn_implementation=how).to(device).train()


def layout_of(case: Case, pattern: str | None) -> BlockLayout:
    """The layout, including the model's causality."""
    everything = masks.local(case.n, window=(None, None)) if pattern is None else masks.build(pattern, case.n)
    return everything & masks.causal(case.n) if case.model == "gpt2" else everything


def mask_of(case: Case, how: str, pattern: str | None, device: torch.device) -> Tensor | None:
    """The attention_mask that gives transformers' own attention the same mask."""
    if pattern is None or how == ATTENTION_NAME:
        return None
    attends = layout_of(case, pattern).to_dense().to(device)
    if how == "sdpa":
        return attends
    zeros = torch.zeros(attends.shape, dtype=torch.bfloat16, device=device)
    return zeros.masked_fill_(~attends, torch.finfo(torch.bfloat16).min)


def train(model: Any, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> None:
    """One step."""
    optimizer.zero_grad()
    with torch.autocast(inputs["input_ids"].device.type, dtype=torch.bfloat16):
        loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    optimizer.step()


def measured(
    case: Case, how: str, pattern: str | None, expected: Tensor | None, device: torch.device, n_steps: int, sizes: Sizes
) -> tuple[Tensor, dict[str, Any] | None]:
    """The hidden states, on the host, and the figures, None if the hidden states are wrong."""
    model, mask = model_of(case, how, pattern, sizes, device), mask_of(case, how, pattern, device)
    tokens = torch.randint(model.config.vocab_size, (case.batch, case.n), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": tokens.to(device), "attention_mask": mask}
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        hidden = model.base_model(**inputs).last_hidden_state.float().cpu()
    if expected is not None:
        error = relative_error(hidden, expected).item()
        if not error < 0.05:
            print(f"{PROVIDERS[how]:18} {case} {pattern}: WRONG, relative error {error:.3g}; not timed", flush=True)
            return hidden, None
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
    step = functools.partial(train, model, optimizer, inputs)
    setup_ms = measure.timed(step, device, 1)["ms"]
    return hidden, {**measure.timed(step, device, n_steps), "setup_ms": setup_ms}


def run(
    case: Case, pattern: str | None, device: torch.device, *, n_steps: int = 10, sizes: Sizes = None
) -> Iterator[dict[str, Any]]:
    """A result line for each provider that fits; sdpa is first, as the reference of the others."""
    density = layout_of(case, pattern).density
    name = pattern or ("causal" if case.model == "gpt2" else "dense")
    expected: Tensor | None = None
    for how in ("sdpa", ATTENTION_NAME, "eager"):
        try:
            hidden, line = measured(case, how, pattern, expected, device, n_steps, sizes)
        except torch.OutOfMemoryError:
            print(f"{PROVIDERS[how]:18} {case} {name}: out of memory", flush=True)
            continue
        finally:
            measure.release()
        expected = hidden if expected is None else expected
        if line is None:
            continue
        yield {
            "bench": "huggingface", "provider": PROVIDERS[how], "model": case.model, "pattern": name,
            "density": density, "n": case.n, "batch": case.batch, "dtype": "bf16", "direction": "step", **line,
            "tokens_per_s": 1000 * case.batch * case.n / line["ms"], "device": measure.device_name(device),
            "torch": torch.__version__, "transformers": transformers.__version__, "commit": measure.commit(),
        }  # fmt: skip


def main() -> None:
    parser = measure.parser(__doc__, "huggingface.jsonl")
    parser.add_argument("--models", nargs="+", default=["gpt2", "bert-large"], help="of gpt2, bert-large")
    parser.add_argument("--pattern", default=LAYOUT, help="specification of the layout, as masks.build reads it")
    parser.add_argument("--steps", type=int, default=10, help="timed")
    arguments = parser.parse_args()
    measure.require_gpu()
    transformers.logging.set_verbosity_error()
    register()
    cases = [case for case in CASES if case.model in arguments.models]
    for case, pattern in itertools.product(cases, (None, arguments.pattern)):
        lines = run(case, pattern, torch.device("cuda", 0), n_steps=arguments.steps)
        measure.appended(arguments.out, lines, KEYS)


if __name__ == "__main__":
    main()
