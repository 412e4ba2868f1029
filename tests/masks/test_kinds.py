"""masks/kinds.py: numbers are equal if and only if what they stand for is equal."""

from __future__ import annotations

import numpy as np

from masks.kinds import joint_ids, kinds_of_rows, kinds_of_sides


def alike(things: list[object], numbers: np.ndarray) -> bool:
    """Whether numbers are equal if and only if things are."""
    return len({*things}) == len({*numbers.tolist()}) == len({*zip(things, numbers.tolist(), strict=True)})


def test_rows_of_a_table():
    generator = np.random.default_rng(0)
    for dtype in (bool, np.uint8, np.int16, np.int64):
        for width in (0, 1, 3, 40):
            table = generator.integers(0, 2, (50, width)).astype(dtype)
            assert alike([tuple(row) for row in table.tolist()], kinds_of_rows(table))
            # every second row of every second column: not contiguous
            assert alike([tuple(row) for row in table[::2, ::2].tolist()], kinds_of_rows(table[::2, ::2]))


def test_sides():
    generator = np.random.default_rng(0)
    for length, side in ((0, 16), (1, 16), (400, 16), (403, 48)):
        marks = generator.random(length) < 0.02
        sides = [tuple(np.flatnonzero(marks[begin : begin + side])) for begin in range(0, length, side)]
        kinds = kinds_of_sides(marks, side)
        assert alike(sides, kinds)
        assert [not part for part in sides] == (kinds == 0).tolist()


def test_joint_ids_are_equal_for_equal_parts_only():
    generator = np.random.default_rng(0)
    # the wide ones exceed 64 bits together
    for width in (3, 2**40):
        parts = [generator.choice([0, 1, width, -width], 500) for _ in range(5)]
        numbers = joint_ids(*parts)
        pairs = set(zip(numbers.tolist(), zip(*(part.tolist() for part in parts), strict=True), strict=True))
        assert len(pairs) == len({number for number, _ in pairs}) == len({together for _, together in pairs})
