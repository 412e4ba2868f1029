"""masks.build: text gives the same mask as Python, and errors point at the wrong word."""

from __future__ import annotations

import inspect
import warnings

import numpy as np
import pytest

import masks

# a setting for every mask that takes a length; a new one fails test_every_mask_has_a_setting until it has one
SETTINGS = {
    "a_shape": {"sinks": 20, "window": 90},
    "alibi_windows": {"heads": 3, "threshold": 2.5},
    "bigbird": {"random_blocks": 1, "global_blocks": 1, "seed": 3},
    "block_causal": {"size": 70},
    "block_diagonal": {"size": 70, "causal": True},
    "block_diffusion": {"size": 20},
    "butterfly": {"n_factors": 2},
    "causal": {},
    "dilated_window": {"window": 3, "dilation": [1, 7]},
    "erdos_renyi": {"density": 0.3, "seed": 1},
    "expander": {"degree": 2, "seed": 1},
    "fixed": {"stride": 50, "summary": 8, "heads": 2, "verticals": 2},
    "global_tokens": {"tokens": [0, 77]},
    "hierarchical": {"size": 20, "unit": 5},
    "local": {"window": (30, None)},
    "longformer": {"window": 40, "global_tokens": 2},
    "longnet": {"segments": [30, 90], "dilations": [1, 4], "heads": 2},
    "pixelfly": {"n_factors": 1, "global_blocks": 1},
    "prefix_lm": {"prefix": 70},
    "random": {"blocks_per_row": 2, "seed": 1},
    "sink_window": {"sinks": 4, "window": 50},
    "small_world": {"neighbors": 2, "rewire": 0.5, "seed": 1},
    "strided": {"stride": 50, "causal": True},
    "tri_shape": {"sinks": 20, "window": 90, "last": 30},
    "vertical_slash": {"verticals": [[0], [1]], "slashes": [0, 5]},
}


def takes_a_length(name: str) -> bool:
    return next(iter(inspect.signature(getattr(masks, name)).parameters)) == "length"


def test_every_mask_has_a_setting():
    assert sorted(SETTINGS) == [name for name in masks.__all__ if takes_a_length(name)]


@pytest.mark.parametrize("block_size", [16, 48, (32, 64)])
@pytest.mark.parametrize("name", [name for name in masks.__all__ if takes_a_length(name)])
def test_a_text_call_equals_the_python_call(name, block_size):
    setting = SETTINGS[name]
    if name in ("butterfly", "pixelfly"):
        block_size = 48
    length = 320 if not isinstance(block_size, tuple) or name in ("causal", "local") else (160, 320)
    if name == "block_diffusion":
        length = 320
    spec = f"{name}({', '.join(f'{word}={value!r}' for word, value in setting.items())})"
    own_length = length // 2 if name == "block_diffusion" else length
    expected = getattr(masks, name)(own_length, **setting, block_size=block_size)
    assert masks.build(spec, length, block_size=block_size) == expected
    assert masks.build(f"{spec[:-1]}{', ' if setting else ''}block_size={block_size!r})", length) == expected


def test_block_diffusion_has_the_length_of_the_specification() -> None:
    layout = masks.build("block_diffusion(size=16) & ~local(window=5)", 256, block_size=16)
    assert layout == masks.block_diffusion(128, size=16, block_size=16) - masks.local(256, window=5, block_size=16)
    for length in (257, (128, 256)):
        with pytest.raises(ValueError, match="two halves, expected an even length, as many queries as keys, got"):
            masks.build("block_diffusion(size=16)", length)


def test_masks_without_a_length_must_have_the_length_of_the_specification():
    grid = masks.build("neighborhood(grid=(8, 16), kernel=3) | swin((8, 16), window=4)", 128, block_size=16)
    expected = masks.neighborhood((8, 16), kernel=3, block_size=16) | masks.swin((8, 16), window=4, block_size=16)
    assert grid == expected
    assert masks.build("documents([0, 40, 128], causal=True)", 128) == masks.documents([0, 40, 128], causal=True)
    tree = masks.tree([-1, 0, 0, 1], prompt=20)
    assert masks.build("tree([-1, 0, 0, 1], prompt=20)", (4, 24)) == tree


# ---- random expressions, with Python's precedence implemented independently of the parser ----

LEAVES = {
    "butterfly": masks.butterfly(200, block_size=48),
    "causal": masks.causal(200, block_size=48),
    "local(20)": masks.local(200, window=20, block_size=48),
    "local(window=(0, 50))": masks.local(200, window=(0, 50), block_size=48),
    "global_tokens(tokens=[3, 100])": masks.global_tokens(200, tokens=[3, 100], block_size=48),
}
# from the loosest to the tightest
BINDING = [("|", np.logical_or), ("&", np.logical_and), ("-", lambda a, b: a & ~b)]


def drawn(random: np.random.Generator, depth: int, loosest: int = 0) -> tuple[str, np.ndarray]:
    """An expression and its dense mask; operators looser than `loosest` are put into parentheses."""
    if depth == 0:
        text = str(random.choice(list(LEAVES)))
        return text, LEAVES[text].to_dense()[0, 0].numpy()
    if random.random() < 0.2:
        text, mask = drawn(random, depth - 1, len(BINDING))
        return f"~{text}", ~mask
    level = int(random.integers(0, len(BINDING)))
    # the right side of an operator binds tighter: a - b - c is (a - b) - c
    (left, mask), (right, other) = drawn(random, depth - 1, level), drawn(random, depth - 1, level + 1)
    symbol, apply = BINDING[level]
    text = f"{left} {symbol} {right}"
    return (f"({text})" if level < loosest else text), apply(mask, other)


@pytest.mark.parametrize("seed", range(40))
def test_random_expressions(seed):
    text, mask = drawn(np.random.default_rng(seed), depth=1 + seed % 4)
    assert np.array_equal(masks.build(text, 200, block_size=48).to_dense()[0, 0].numpy(), mask), text


def test_exclusive_or_binds_between_and_and_or():
    one, other, third = (masks.local(200, window=window, block_size=48) for window in (10, 50, 90))
    built = masks.build("local(10) ^ local(50) & local(90) | local(10)", 200, block_size=48)
    assert built == (one ^ (other & third)) | one


def test_the_example():
    built = masks.build("butterfly | local(window=512) - causal", 16384, block_size=128)
    assert built == masks.butterfly(16384) | (masks.local(16384, window=512) - masks.causal(16384))


def test_white_space_and_line_ends_do_not_matter():
    spec = "  butterfly\n  | local(\n\twindow = 20)  "
    assert masks.build(spec, 300) == masks.build("butterfly|local(20)", 300)


def test_lengths_may_differ():
    assert masks.build("causal & local(5)", (10, 30)) == masks.causal((10, 30)) & masks.local((10, 30), window=5)


@pytest.mark.parametrize(
    ("spec", "message", "pointed"),
    [
        ("locl(3)", "no mask is called locl. Did you mean local? There are: a_shape, alibi_windows, ", "locl"),
        ("butterfly | caussal", "no mask is called caussal. Did you mean causal or block_causal?", "caussal"),
        ("butterfly & zzz", "no mask is called zzz. There are: ", "zzz"),
        ("build('causal')", "no mask is called build.", "build"),
        ("causal | tile_order((8, 8), tile=4)", "no mask is called tile_order.", "tile_order"),
        ("neighborhood(kernel=3)", "neighborhood needs grid", "neighborhood(kernel=3)"),
        (
            "neighborhood(grid=(8, 9), kernel=3)",
            "neighborhood is a mask of 72 x 72 tokens, expected",
            "neighborhood(grid=(8, 9), kernel=3)",
        ),
        ("documents", "documents needs cu_seqlens", "documents"),
        (
            "documents(cu_seqlens=[0, 5])",
            "documents is a mask of 5 x 5 tokens, expected",
            "documents(cu_seqlens=[0, 5])",
        ),
        ("top_k(scores=3, q_len=9, kv_len=9, k=1)", "scores", "3"),
        ("local", "local needs window. It takes window, block_size=128", "local"),
        ("causal - erdos_renyi(heads=2)", "erdos_renyi needs density and seed.", "erdos_renyi(heads=2)"),
        ("local(windw=3)", "local takes window, block_size=128, not windw. Did you mean window?", "windw=3"),
        ("local(3, 64, 5)", "local takes window, block_size=128: expected at most 2 values, got 3", "5"),
        ("local(3, window=3)", "window is given twice", "window=3"),
        ("local(length=9, window=3)", "the length is that of the whole specification", "length=9"),
        ("local(**{})", "expected arguments by name, got **", "**{}"),
        ("local(*[3])", "expected a number, a string, True, False, None", "*[3]"),
        ("local(window=-1)", "window: expected int, a number of tokens, of at least 0, got -1", "-1"),
        ("local(window=(1, 'x'))", "window: expected int, a number of tokens, got 'x' (str)", "(1, 'x')"),
        ("local(3, block_size=20)", "block_size: expected multiples of 16", "20"),
        ("random(seed=0)", "blocks_per_row, density: expected exactly one of the two", "random(seed=0)"),
        ("causal & local(3, block_size=64)", "layout & other: block_size must be equal", None),
        ("causal + local(3)", "expected a mask, or masks joined by | & - ^ ~ and parentheses", None),
        ("-causal", "expected a mask, or masks joined by", None),
        ("causal and local(3)", "expected a mask, or masks joined by", None),
        ("'causal'", "expected a mask, or masks joined by", None),
        ("local(window=2 + 3)", "expected a number, a string", "2 + 3"),
        ("local(window=range(3))", "expected a number, a string", "range(3)"),
        ("local(window={3})", "expected a number, a string", "{3}"),
        ("local(window=3j)", "expected a number, a string", "3j"),
        ("local(window=-True)", "expected a number, a string", "-True"),
        ("local(window=seed)", "expected a number, a string", "seed"),
        ("masks.causal", "expected a mask, or masks joined by", None),
        ("masks.causal()", "expected the name of a mask before the parenthesis", "masks.causal"),
        ("__import__('os').system('true')", "expected the name of a mask", "__import__('os').system"),
        ("(lambda: causal)()", "expected the name of a mask", "lambda: causal"),
        ("causal if 1 else causal", "expected a mask, or masks", None),
        ("butterfly | (causal -", "spec: '(' was never closed", "("),
        ("local(window=3", "spec: '(' was never closed", "("),
        ("causal causal", "spec: invalid syntax", "c"),
        # on one line, which a specification becomes, everything after it would be a comment
        ("causal # decoder & local(window=3)", "a specification has no comments, got #", "#"),
        ("häßlich | causal", "no mask is called häßlich", "häßlich"),
        ("local(window='ß') | locl", "window: expected int, a number of tokens, got 'ß' (str)", "'ß'"),
        ("|".join(["causal"] * 120), "expected at most 100 operators inside each other", None),
    ],
)
def test_a_wrong_word_is_pointed_at(spec, message, pointed):
    with pytest.raises(ValueError, match=r"\^") as refused:
        masks.build(spec, 320)
    said, line, carets = str(refused.value).rsplit("\n", 2)
    assert message in said
    # all of these are short enough, and on one line
    assert line == f"    {spec}"
    assert {*carets} <= {" ", "^"}
    begin, end = carets.index("^"), len(carets)
    assert pointed is None or line[begin:end] == pointed


@pytest.mark.parametrize(
    "spec", ["~" * 1900 + "causal", "(" * 900 + "causal" + ")" * 900, "causal\0", "local(" + "[" * 900]
)
def test_text_beyond_the_limits_of_the_parser_is_refused(spec):
    with warnings.catch_warnings(), pytest.raises(ValueError, match=r"spec: |at most 100 operators"):
        masks.build(spec, 320)


@pytest.mark.parametrize("spec", ["causal", "block_diffusion(size=4)"])
def test_lengths_may_be_a_list(spec: str) -> None:
    assert masks.build(spec, [64, 64], block_size=16) == masks.build(spec, (64, 64), block_size=16)


@pytest.mark.parametrize(
    ("spec", "arguments", "error", "message"),
    [
        ("", {}, ValueError, "spec: expected the name of a mask, got nothing"),
        ("  \n ", {}, ValueError, "spec: expected the name of a mask, got nothing"),
        (None, {}, TypeError, "spec: expected a string, got None"),
        (b"causal", {}, TypeError, "spec: expected a string"),
        ("causal" + " " * 2000, {}, ValueError, "spec: expected at most 2000 characters, got 2006"),
        ("causal", {"length": -1}, ValueError, "^length: .* got -1$"),
        ("causal", {"length": 1.5}, TypeError, "^length: .* got 1.5"),
        ("causal", {"block_size": 20}, ValueError, "^block_size: .* got 20$"),
    ],
)
def test_refused(spec, arguments, error, message):
    with pytest.raises(error, match=message):
        masks.build(spec, **{"length": 320, **arguments})
