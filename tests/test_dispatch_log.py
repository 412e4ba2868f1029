"""The log of chosen backends has each distinct decision once, with its reasons, and nothing if it is off."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from blocksparse_flash import attention, dispatch, explain

NAME = "blocksparse_flash"


@pytest.fixture(autouse=True)
def empty_log() -> Iterator[None]:
    dispatch._log.cache_clear()
    yield
    dispatch._log.cache_clear()


def q(dtype: torch.dtype = torch.float32, length: int = 32) -> torch.Tensor:
    return torch.zeros(1, 1, length, 16, dtype=dtype)


def test_each_decision_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger=NAME)
    for dtype in (torch.float32, torch.float32, torch.float64):
        for length in (32, 48):
            attention(*[q(dtype, length)] * 3)
    for _ in range(2):
        attention(*[q()] * 3, backend="reference")
    assert {record.name for record in caplog.records} == {NAME}
    messages = caplog.messages
    assert len(messages) == 3, messages
    assert messages[0].startswith(
        'backend="auto" runs calls of torch.float32 on cpu as backend "eager": the backend for'
    )
    assert "; not hopper: it needs a CUDA device, got cpu; not triton: " in messages[0]
    assert "torch.float64" in messages[1] and "not triton: it needs float16, bfloat16 or float32" in messages[1]
    assert messages[2] == (
        'backend="reference" runs calls of torch.float32 on cpu as backend "reference": asked for by name'
    )


def test_nothing_is_logged_or_cached_at_other_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=NAME)
    attention(*[q()] * 3)
    assert not caplog.messages and not dispatch._log.cache_info().misses
    # the decision is logged once the level is set
    caplog.set_level(logging.DEBUG, logger=NAME)
    attention(*[q()] * 3)
    assert len(caplog.messages) == 1


def test_explain_and_errors_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger=NAME)
    explain(*[q()] * 3)
    with pytest.raises(ValueError, match="hopper"):
        attention(*[q()] * 3, backend="hopper")
    assert not caplog.messages


def test_small_calls_log_why_hopper_does_not_run_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_why_not_on_gpu", lambda backend, index: None)
    caplog.set_level(logging.DEBUG, logger=NAME)
    device = torch.device("cuda", 0)
    assert dispatch.choose("auto", device, torch.bfloat16, dispatch.SMALL) == "triton"
    assert dispatch.choose("auto", device, torch.bfloat16) == "hopper"
    assert caplog.messages[0].endswith(f"which runs the Triton kernels; not hopper: {dispatch.SMALL}")
    assert caplog.messages[1].endswith("which runs the kernels for compute capability 9.0")
    # a traced call whose sizes are known
    dispatch._log.cache_clear()
    assert dispatch.resolve(q(), q(), q(), 128) == "triton"
    assert len(caplog.messages) == 3 and 'as backend "triton"' in caplog.messages[2]


def test_a_compiled_call_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger=NAME)
    torch.compile(attention, backend="eager", fullgraph=True)(*[q()] * 3)
    assert len([record for record in caplog.records if record.name == NAME]) == 1
