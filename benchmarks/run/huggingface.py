"""Training speed of transformers models with a layout: `python -m benchmarks.run.huggingface`, a JSON line per figure.

A step is forward, loss, backward and AdamW, in bfloat16 autocast, of GPT-2 small and BERT-large with random weights,
longer sequences and no dropout. Baselines are transformers' "sdpa" and "eager"; first with the model's own attention
(causal, dense), then with a layout, which the baselines get as a mask of every pair. Outputs are compared before
timing; cases that do not fit into memory are reported.

The model "llama" is shaped like Llama: 8 layers of width 2048, 16 query heads and 4 KV heads of dimension 128, weights
in bfloat16. It trains on packed documents of unequal length, at whose beginnings position_ids restart. Baselines are
transformers' "sdpa", which gets a dense mask, "flex_attention" and, if flash-attn is installed, "flash_attention_2",
and PyTorch's FlashAttention-2, `varlen_attn`. The last two also get the boundaries of the documents. Losses and
gradients are compared first. Then all train the same model, in turns.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.huggingface import ATTENTION_NAME, CONFIG_KEY, register

from . import measure
from .correctness import relative_error
from .peers import is_installed

LAYOUT = "butterfly | local(window=256)"
# the name under which transformers finds PyTorch's own FlashAttention-2 for packed documents
VARLEN = "torch_varlen"
PROVIDERS = {
    "sdpa": "transformers sdpa",
    ATTENTION_NAME: "blocksparse_flash",
    "eager": "transformers eager",
    "flex_attention": "transformers flex_attention",
    "flash_attention_2": "transformers flash_attention_2",
    VARLEN: "torch varlen_attn",
}
PACKED_PROVIDERS = ("sdpa", ATTENTION_NAME, "flex_attention", "flash_attention_2", VARLEN)
# of loss, gradients and hidden states, relative to the largest value
TOLERANCE = 0.05
# weights of the packed model whose gradients are compared
COMPARED = ("embed_tokens", "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj")
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


PACKED = Case("llama", 16384, 1)
CASES = [
    *(Case("gpt2", n, batch) for n, batch in ((1024, 16), (4096, 4), (16384, 1))),
    *(Case("bert-large", n, batch) for n, batch in ((512, 32), (4096, 4))),
]


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
    backpropagate(model, inputs)
    optimizer.step()


def backpropagate(model: Any, inputs: dict[str, Any]) -> Tensor:
    """The loss. Labels are the tokens unless the inputs have others."""
    with torch.autocast(inputs["input_ids"].device.type, dtype=torch.bfloat16):
        loss = model(**{"labels": inputs["input_ids"], **inputs}).loss
    loss.backward()
    return loss.detach()


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
        if not error < TOLERANCE:
            print(f"{PROVIDERS[how]:18} {case} {pattern}: WRONG, relative error {error:.3g}; not timed", flush=True)
            return hidden, None
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
    step = functools.partial(train, model, optimizer, inputs)
    setup_ms = measure.timed(step, device, 1)["ms"]
    return hidden, {**measure.timed(step, device, n_steps), "setup_ms": setup_ms}


def line_of(how: str, case: Case, pattern: str, density: float, figures: dict[str, Any], device: torch.device) -> Any:
    """The result line of a provider, from its `figures`."""
    return {
        "bench": "huggingface", "provider": PROVIDERS[how], "model": case.model, "pattern": pattern,
        "density": density, "n": case.n, "batch": case.batch, "dtype": "bf16", "direction": "step", **figures,
        "tokens_per_s": 1000 * case.batch * case.n / figures["ms"], "device": measure.device_name(device),
        "torch": torch.__version__, "transformers": transformers.__version__, "commit": measure.commit(),
    }  # fmt: skip


def run(
    case: Case, pattern: str | None, device: torch.device, *, n_steps: int = 10, sizes: Sizes = None
) -> Iterator[dict[str, Any]]:
    """A result line for each provider that fits; sdpa is first, as the reference of the others."""
    density = layout_of(case, pattern).density
    name = pattern or ("causal" if case.model == "gpt2" else "dense")
    expected: Tensor | None = None
    for how in ("sdpa", ATTENTION_NAME, "eager"):
        try:
            hidden, figures = measured(case, how, pattern, expected, device, n_steps, sizes)
        except torch.OutOfMemoryError:
            print(f"{PROVIDERS[how]:18} {case} {name}: out of memory", flush=True)
            continue
        finally:
            measure.release()
        expected = hidden if expected is None else expected
        if figures is not None:
            yield line_of(how, case, name, density, figures, device)


def varlen(
    _layer: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: PyTorch's FlashAttention-2, causal within each document."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    else:
        # torch 2.11
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    bounds = cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q
    out: Any = varlen_attn(q, k, v, *bounds, **options)
    return out[None], None


def llama_of(case: Case, sizes: Sizes, device: torch.device) -> Any:
    """A model for the packed tokens of the case; `sizes` replaces some of its sizes."""
    settings = {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 4, "max_position_embeddings": case.n, "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(0)
    with device:
        made: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **(sizes or {})}))
    # rotary positions would make q and k float32 but not v, which FlexAttention refuses
    return made.to(device, torch.bfloat16).train()


def packed_inputs(case: Case, n_documents: int, vocab_size: int) -> dict[str, Any]:
    """Documents of unequal length, packed as in transformers, with their boundaries."""
    generator = torch.Generator().manual_seed(1)
    cuts = torch.randperm(case.n - 1, generator=generator)[: n_documents - 1].sort().values + 1
    tokens = torch.randint(vocab_size, (case.n,), generator=generator)
    collator: Any = transformers.DataCollatorWithFlattening
    documents = [{"input_ids": document.tolist()} for document in torch.tensor_split(tokens, cuts)]
    return dict(collator(return_flash_attn_kwargs=True)(documents, return_tensors="pt"))


def run_packed(
    case: Case,
    n_documents: int,
    device: torch.device,
    *,
    n_steps: int = 10,
    sizes: Sizes = None,
    providers: Sequence[str] = PACKED_PROVIDERS,
) -> Iterator[dict[str, Any]]:
    """A result line for each provider that trains on packed documents; the first is the reference of the others."""
    transformers.AttentionInterface.register(VARLEN, varlen)
    model = llama_of(case, sizes, device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
    given = packed_inputs(case, n_documents, model.config.vocab_size)
    density = masks.documents(given["cu_seq_lens_q"], causal=True).density
    given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    without_bounds = {name: given[name] for name in ("input_ids", "position_ids", "labels")}
    inputs = {how: given if how in ("flash_attention_2", VARLEN) else without_bounds for how in providers}
    expected: list[Tensor] = []
    facts: dict[str, dict[str, Any]] = {}

    def step(how: str) -> None:
        model.set_attn_implementation(how)
        train(model, optimizer, inputs[how])

    def compare(how: str) -> None:
        model.set_attn_implementation(how)
        model.zero_grad()
        losses: list[Tensor] = []
        setup_ms = measure.timed(lambda: losses.append(backpropagate(model, inputs[how])), device, 1)["ms"]
        found = [losses[0], *(model.get_parameter(f"model.{name}.weight").grad for name in COMPARED)]
        if not expected:
            expected.extend(found)
        errors = [relative_error(*pair).item() for pair in zip(found, expected, strict=True)]
        if all(error < TOLERANCE for error in errors):
            print(f"{PROVIDERS[how]}: right, {setup_ms / 1000:.1f} s with compilation", flush=True)
            facts[how] = {"setup_ms": setup_ms}
            return
        said = ", ".join(f"{error:.3g}" for error in errors)
        print(f"{PROVIDERS[how]}: WRONG, relative errors of loss and gradients {said}; not timed", flush=True)

    for how in providers:
        if how == "flash_attention_2" and not is_installed("flash_attn"):
            print(f"{PROVIDERS[how]}: flash-attn is not installed; not timed", flush=True)
            continue
        measure.guarded(PROVIDERS[how], how == ATTENTION_NAME, functools.partial(compare, how))
    steps = [functools.partial(step, how) for how in facts]
    # these steps also warm up
    for others, warm in zip(facts.values(), steps, strict=True):
        others["peak_bytes"] = measure.timed(warm, device, 1)["peak_bytes"]
    for (how, others), each in zip(facts.items(), measure.wall_milliseconds_in_turns(steps, runs=n_steps), strict=True):
        yield line_of(how, case, f"packed, {n_documents} documents", density, {**each, **others}, device)


def main() -> None:
    parser = measure.parser(__doc__, "huggingface.jsonl")
    parser.add_argument(
        "--models", nargs="+", choices=["gpt2", "bert-large", "llama"], default=["gpt2", "bert-large", "llama"]
    )
    parser.add_argument("--pattern", default=LAYOUT, help="specification of the layout, as masks.build reads it")
    parser.add_argument("--steps", type=measure.multiple_of(1), default=10, help="timed")
    parser.add_argument(
        "--packed",
        nargs="+",
        choices=PACKED_PROVIDERS,
        default=PACKED_PROVIDERS,
        metavar="ATTENTION",
        help=f"on packed documents, the first as reference; default: {' '.join(PACKED_PROVIDERS)}",
    )
    arguments = parser.parse_args()
    measure.require_gpu()
    transformers.logging.set_verbosity_error()
    register()
    cases = [case for case in CASES if case.model in arguments.models]
    for case, pattern in itertools.product(cases, (None, arguments.pattern)):
        lines = run(case, pattern, torch.device("cuda", 0), n_steps=arguments.steps)
        measure.appended(arguments.out, lines, KEYS)
    for n_documents in (8, 64) if PACKED.model in arguments.models else ():
        device = torch.device("cuda", 0)
        lines = run_packed(PACKED, n_documents, device, n_steps=arguments.steps, providers=arguments.packed)
        measure.appended(arguments.out, lines, KEYS)
        measure.release()


if __name__ == "__main__":
    main()
