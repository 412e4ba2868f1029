"""A sample of a sweep has every value; the rest is marked, and nothing is lost."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.support.sampling import sample

pytest_plugins = ["pytester"]

SWEEPS = """
import pytest

@pytest.mark.sweep
@pytest.mark.parametrize("a", [[1], [2], [3]])
@pytest.mark.parametrize("b", "xy")
def test_of_all_values(a, b): ...

@pytest.mark.sweep(by=lambda i: {i % 3})
@pytest.mark.parametrize("i", range(12))
def test_of_given_values(i): ...

def test_alone(): ...
"""


def test_a_sample_has_every_value_and_no_case_in_vain() -> None:
    generator = random.Random(0)
    for _ in range(100):
        values = [set(generator.sample(range(20), generator.randrange(1, 5))) for _ in range(generator.randrange(40))]
        chosen = sample(values)
        assert chosen == sorted(set(chosen)) == sample(values)
        assert set().union(*(values[i] for i in chosen)) == set().union(*values)
        assert len(chosen) <= len(set().union(*values))


def test_a_sample_and_the_rest_are_the_whole(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest
        from tests.support import sampling

        def pytest_configure(config):
            for name in ("sweep", "thorough"):
                config.addinivalue_line("markers", name)

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(config, items):
            sampling.mark_the_rest(items)
            outside = sampling.not_in_part(items, config.getoption("--part"))
            items[:] = [item for item in items if item.nodeid not in outside]

        def pytest_addoption(parser):
            parser.addoption("--part", default="0/1")
        """
    )
    pytester.makepyfile(SWEEPS)

    def names(*options: str) -> set[str]:
        lines = pytester.runpytest("--collect-only", "-q", *options).outlines
        return {line.rpartition("::")[2] for line in lines if "::" in line}

    whole, few, rest = names(), names("-m", "not thorough"), names("-m", "thorough")
    assert len(whole) == 19 and few | rest == whole and not few & rest
    assert few == {
        "test_of_all_values[x-a0]", "test_of_all_values[x-a2]", "test_of_all_values[y-a1]",
        "test_of_given_values[0]", "test_of_given_values[1]", "test_of_given_values[2]", "test_alone",
    }  # fmt: skip
    parts = [names("--part", f"{k}/3") for k in range(3)]
    assert set().union(*parts) == whole
    assert all(one & other == few for one, other in itertools.combinations(parts, 2))
    result = pytester.runpytest("--part", "3/3")
    result.stderr.fnmatch_lines(["*--part must be K/N with K from 0 to N - 1*got '3/3'"])
