"""Arguments and masks of the benchmark scripts for several GPUs."""

from __future__ import annotations

import pytest
import torch

from benchmarks.run import context_parallel, context_providers, train_context_parallel
from benchmarks.run.patterns import patterns


def test_defaults_are_what_the_help_says() -> None:
    options = context_parallel.parsed([])
    assert (options.lengths, options.providers) == ([65536], list(context_providers.PROVIDERS))
    assert train_context_parallel.parsed(["--context", "4"]).context == 4


@pytest.mark.parametrize(
    "arguments", [["--lengths", "100"], ["--kv-heads", "3"], ["--patterns", "spiral"], ["--providers", "ring"]]
)
def test_what_cannot_run_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        context_parallel.parsed(arguments)
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize("pattern", list(patterns(1024)), ids=lambda pattern: pattern.name)
def test_flex_gets_the_same_mask(pattern) -> None:
    """Every pair of the layout, and no other, for queries from the middle on."""
    attends = context_providers.table_mask(pattern, 512, "cpu")
    zero = torch.zeros((), dtype=torch.long)
    found = attends(zero, zero, torch.arange(512)[:, None], torch.arange(1024))
    assert torch.equal(found, context_providers.whole_layout(pattern).to_dense()[0, 0, 512:])


def test_labels_are_earlier_tokens() -> None:
    tokens, labels = next(train_context_parallel.batches(20, 2, 3, seed=1))
    assert torch.equal(labels[:, 3:], tokens[:, :-3])


def test_a_start_without_torchrun_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="start with torchrun"):
        context_parallel.initialized()
    with pytest.raises(SystemExit, match="start with torchrun"):
        train_context_parallel.train(train_context_parallel.parsed([]))
