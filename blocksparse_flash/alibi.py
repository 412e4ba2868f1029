"""How steep is the penalty of each head under ALiBi? The slopes of its authors, as exact numbers.

Must not know what is done with them: a term of the scores, a window.
"""

from __future__ import annotations


def slopes_of(heads: int) -> list[float]:
    """The slopes that ALiBi's authors give to so many heads, 1 or more.

    2**(-8 (h + 1) / heads) for a power of two; for another number those of the power of two below, then every other one of
    the power of two above, from its first. Press et al., "Train Short, Test Long", arXiv:2108.12409, section 3, and the code
    they published with it.
    """
    n_regular = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (head + 1) / n_regular) for head in range(n_regular)]
    # the next power of two has half the step
    return slopes + [2.0 ** (-4.0 * (2 * head + 1) / n_regular) for head in range(heads - n_regular)]
