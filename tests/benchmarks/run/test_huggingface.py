"""benchmarks.run.huggingface: all three train the same model, one line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")
import transformers

from benchmarks.run import huggingface as benchmark
from benchmarks.run import measure
from blocksparse_flash.huggingface import Mask, mask_builder, register

CPU = torch.device("cpu")
# what the vocabulary is named, and the width, differs between the two
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": None, "eos_token_id": None},
    "bert-large": {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
}


@pytest.mark.sweep
@pytest.mark.parametrize("pattern", [None, "butterfly(n_factors=1) | local(window=20)"])
@pytest.mark.parametrize("model", SMALL)
def test_lines_are_written_for_all_three(model: str, pattern: str | None, tmp_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    register()
    case = benchmark.Case(model, 384, 2)
    for line in benchmark.run(case, pattern, CPU, n_steps=2, sizes=SMALL[model]):
        measure.append(tmp_path / "lines.jsonl", line, benchmark.KEYS)
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [line["provider"] for line in lines] == ["transformers sdpa", "blocksparse_flash", "transformers eager"]
    assert all(line["tokens_per_s"] == pytest.approx(1000 * 768 / line["ms"]) for line in lines)
    assert all((line["density"] < 0.9) == (pattern is not None or model == "gpt2") for line in lines)


def test_what_attends_otherwise_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register()
    monkeypatch.setattr(benchmark, "mask_of", lambda *arguments: None)
    case = benchmark.Case("gpt2", 384, 2)
    lines = list(benchmark.run(case, "local(window=0)", CPU, n_steps=1, sizes=SMALL["gpt2"]))
    assert [line["provider"] for line in lines] == ["transformers sdpa", "transformers eager"]
    assert "blocksparse_flash  Case(model='gpt2', n=384, batch=2) local(window=0): WRONG" in capsys.readouterr().out


LLAMA: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
PACKED = benchmark.Case("llama", 300, 1)


def test_packed_documents_are_trained_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch has FlashAttention-2 on GPUs only."""
    register()
    lines = benchmark.run_packed(
        PACKED, 4, CPU, n_steps=2, sizes=LLAMA, providers=["sdpa", "blocksparse", benchmark.VARLEN, "flash_attention_2"]
    )
    found = measure.appended(tmp_path / "lines.jsonl", lines, benchmark.KEYS)
    assert [line["provider"] for line in found] == ["transformers sdpa", "blocksparse_flash"]
    assert all(line["tokens_per_s"] == pytest.approx(1000 * 300 / line["ms"]) for line in found)
    assert {line["pattern"] for line in found} == {"packed, 4 documents"}
    assert "torch varlen_attn: refused" in capsys.readouterr().out


def test_documents_of_unequal_length_are_packed_with_their_boundaries() -> None:
    given = benchmark.packed_inputs(PACKED, 4, 50)
    lengths = given["cu_seq_lens_q"].diff()
    assert len(set(lengths.tolist())) == 4 and lengths.sum() == 300 and given["max_length_q"] == lengths.max()
    place = torch.cat([torch.arange(length) for length in lengths.tolist()])
    assert torch.equal(given["position_ids"][0], place)


def test_packed_documents_that_attend_to_each_other_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register()
    monkeypatch.setattr(mask_builder, "_by_documents", lambda request, documents: Mask(None, True, "causal"))
    lines = list(benchmark.run_packed(PACKED, 4, CPU, n_steps=1, sizes=LLAMA, providers=["sdpa", "blocksparse"]))
    assert [line["provider"] for line in lines] == ["transformers sdpa"]
    assert "blocksparse_flash: WRONG, relative errors of loss and gradients" in capsys.readouterr().out


def test_published_sizes_are_those_published() -> None:
    """124 and 335 million weights: BERT-large's pooler, which predicts no words, is not there."""
    with torch.device("meta"):
        sizes = [
            sum(p.numel() for p in benchmark.model_of(case, "sdpa", None, None, torch.device("meta")).parameters())
            for case in (benchmark.Case("gpt2", 1024, 1), benchmark.Case("bert-large", 512, 1))
        ]
    assert [round(size / 1e6) for size in sizes] == [124, 335]


def test_results_are_lines_of_these_keys() -> None:
    path = Path(benchmark.__file__).parents[1] / "results" / "huggingface.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    assert all([*json.loads(line)] == benchmark.KEYS for line in lines)
