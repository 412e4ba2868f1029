"""Calls reach every configuration of the launch tables, and are accurate on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support import launch_tables
from tests.support.launch_runs import assert_is_accurate, run
from tests.support.launch_tables import A10, A100, B200, H200, Call, Gpu

HAS_CUDA = torch.cuda.is_available()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is not test_every_configuration_is_accurate:
        return
    calls: tuple[Call, ...] = ()
    if HAS_CUDA:
        chosen = {"all": launch_tables.cover, "few": launch_tables.few}[metafunc.config.getoption("--launch-tables")]
        calls = chosen(launch_tables.this_gpu())
    metafunc.parametrize(("call", "is_first"), [(call, call == calls[0]) for call in calls], ids=map(str, calls))


@pytest.mark.thorough
@pytest.mark.parametrize("gpu", [H200, A100, A10, B200], ids=["H200", "A100", "A10", "B200"])
def test_calls_reach_every_configuration_with_every_sign_of_scale(gpu: Gpu) -> None:
    known = launch_tables.known(gpu)
    signs: dict[launch_tables.Key, set[int]] = {}
    for call in launch_tables.cover(gpu):
        assert call.scale is not None
        for key in launch_tables.chosen(call, gpu):
            signs.setdefault(key, set()).add((call.scale > 0) - (call.scale < 0))
    print(
        f"{len(known)} configurations known, {len(known & set(signs))} reached by {len(launch_tables.cover(gpu))} calls"
    )
    assert known - set(signs) == set(), "no call reaches these: delete them, or add a call to launch_tables.candidates"
    assert set(signs) - known == set(), "launch_tables.known does not list these"
    assert {key for key, seen in signs.items() if seen != {-1, 0, 1}} == set()


def test_few_calls_reach_every_configuration() -> None:
    few = launch_tables.few(H200)
    reached = set().union(*(launch_tables.chosen(call, H200) for call in few))
    assert reached == launch_tables.known(H200) and 8 * len(few) < len(launch_tables.cover(H200))


@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")
def test_every_configuration_is_accurate(
    call: Call, is_first: bool, record_property: Callable[[str, object], None]
) -> None:
    gpu = launch_tables.this_gpu()
    with launch_tables.recorded(runs=True) as found:
        actual = run(call)
    assert found == launch_tables.chosen(call, gpu), "`cover` predicted other launches"
    assert_is_accurate(call, actual)
    record_property("configurations", sorted(map(str, found)))
    if is_first:
        record_property("configurations known", sorted(map(str, launch_tables.known(gpu))))


@pytest.mark.parametrize(
    "variant",
    [launch_tables.ALL[4], pytest.param(launch_tables.ALL[12], marks=pytest.mark.thorough)],
    ids=lambda variant: variant.name,
)
def test_a_wrong_result_is_detected(variant: launch_tables.Variant) -> None:
    call = Call("eager", (2, 2, 70, 90), 16, torch.bfloat16, variant, scale=-0.2)
    actual = run(call)
    assert_is_accurate(call, actual)
    for i in range(len(actual)):
        # the largest value, off by 30 %
        wrong = [tensor.clone(memory_format=torch.contiguous_format) for tensor in actual]
        wrong[i].view(-1)[actual[i].nan_to_num(neginf=0.0).abs().argmax()] *= 1.3
        with pytest.raises(AssertionError, match="too far"):
            assert_is_accurate(call, wrong)
