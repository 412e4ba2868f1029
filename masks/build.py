"""Parser for masks written as text, such as "butterfly | local(window=512)".

Builders are called by name and check their own arguments; errors point at the wrong word.
"""

from __future__ import annotations

import ast
import inspect
import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Length, read_canvas
from .checks import type_name
from .other_names import close_masks, meant_argument
from .public import public

# no mask needs as much, and Python's own parser and stack can take far more
MAX_CHARACTERS = 2000
MAX_NESTED = 100
# masks whose length is half that of their layout
OF_HALF = ("block_diffusion",)

Builder = Callable[..., BlockLayout]

BINARY: dict[type[ast.operator], Callable[..., BlockLayout]] = {
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.BitXor: operator.xor,
    ast.Sub: operator.sub,
}


class Specification(NamedTuple):
    """A text to be parsed, and the length (a pair as a tuple) and block size of all of its masks."""

    text: str
    length: int | tuple[int, int]
    block_size: BlockSize

    def wrong(self, place: ast.expr | ast.keyword, message: str) -> ValueError:
        """The message, followed by the text with carets under the place."""
        # offsets of ast count UTF-8 bytes
        begin, end = (len(self.text.encode()[:offset].decode()) for offset in (place.col_offset, place.end_col_offset))
        return self.wrong_at(begin, end, message)

    def wrong_at(self, begin: int, end: int, message: str) -> ValueError:
        """As `wrong`, from characters begin .. end - 1."""
        return ValueError(f"{message}\n    {self.text}\n    {' ' * begin}{'^' * max(1, end - begin)}")


# ------------------------------------------------------------------------------------------------------------- builders


def _gives_a_layout(function: Callable[..., object]) -> bool:
    return inspect.signature(function, eval_str=True).return_annotation is BlockLayout


def exported() -> dict[str, Builder]:
    """Name -> builder, of all masks that `masks` exports, without token orders and `build` itself."""
    # importing the package here would be circular; it is loaded by the time of any call
    package = sys.modules[__package__]
    public = {name: getattr(package, name) for name in package.__all__ if name != build.__name__}
    return {name: function for name, function in public.items() if _gives_a_layout(function)}


def arguments_of(builder: Builder) -> dict[str, inspect.Parameter]:
    """Parameters of a builder without `length`, which the whole specification shares."""
    parameters = inspect.signature(builder).parameters
    return {name: parameter for name, parameter in parameters.items() if name != "length"}


def arguments_line(builder: Builder) -> str:
    """Parameters of a builder without `length`, as in a call: window, block_size=128."""
    return ", ".join(
        name if parameter.default is parameter.empty else f"{name}={parameter.default!r}"
        for name, parameter in arguments_of(builder).items()
    )


def _builder(spec: Specification, name: ast.Name) -> Builder:
    known = exported()
    if name.id not in known:
        raise spec.wrong(
            name, f"no mask is called {name.id}.{close_masks(name.id, known)} There are: {', '.join(known)}"
        )
    return known[name.id]


# -------------------------------------------------------------------------------------------------------------- reading


def _literal(spec: Specification, node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool | int | float | str)):
        return node.value
    if isinstance(node, ast.Tuple):
        return tuple(_literal(spec, part) for part in node.elts)
    if isinstance(node, ast.List):
        return [_literal(spec, part) for part in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    raise spec.wrong(node, "expected a number, a string, True, False, None, or a list or tuple of these")


def _given(spec: Specification, name: str, builder: Builder, call: ast.Call) -> dict[str, ast.expr]:
    """Argument -> the node of its value. Positional values follow the order of the parameters, without `length`."""
    allowed = list(arguments_of(builder))
    takes = f"{name} takes {arguments_line(builder)}"
    if len(call.args) > len(allowed):
        raise spec.wrong(
            call.args[len(allowed)], f"{takes}: expected at most {len(allowed)} values, got {len(call.args)}"
        )
    given = dict(zip(allowed, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg is None:
            raise spec.wrong(keyword, f"{takes}: expected arguments by name, got **")
        if keyword.arg == "length":
            raise spec.wrong(keyword, f"{takes}: the length is that of the whole specification")
        if keyword.arg not in allowed:
            raise spec.wrong(
                keyword, f"{takes}, not {keyword.arg}.{meant_argument(keyword.arg, allowed, causal='causal')}"
            )
        if keyword.arg in given:
            raise spec.wrong(keyword, f"{takes}: {keyword.arg} is given twice")
        given[keyword.arg] = keyword.value
    return given


def _lengths(spec: Specification) -> tuple[int, int]:
    """(q_len, kv_len) of a specification."""
    return spec.length if isinstance(spec.length, tuple) else (spec.length, spec.length)


def _half(spec: Specification, name: str, node: ast.expr) -> int:
    q_len, kv_len = _lengths(spec)
    if q_len != kv_len or q_len % 2:
        raise spec.wrong(
            node, f"{name} is a mask of two halves, expected an even length, as many queries as keys, got {spec.length}"
        )
    return q_len // 2


def _called(spec: Specification, node: ast.Name | ast.Call) -> BlockLayout:
    if isinstance(node, ast.Name):
        node = ast.copy_location(ast.Call(func=node, args=[], keywords=[]), node)
    if not isinstance(node.func, ast.Name):
        raise spec.wrong(node.func, "expected the name of a mask before the parenthesis")
    name, builder = node.func.id, _builder(spec, node.func)
    given = _given(spec, name, builder, node)
    missing = [
        word
        for word, parameter in arguments_of(builder).items()
        if parameter.default is parameter.empty and word not in given
    ]
    if missing:
        raise spec.wrong(node, f"{name} needs {' and '.join(missing)}. It takes {arguments_line(builder)}")
    values = {"block_size": spec.block_size, **{word: _literal(spec, part) for word, part in given.items()}}
    length = inspect.signature(builder).parameters.get("length")
    # a builder whose length has a default takes it from its other arguments; it is compared below
    takes_length = length is not None and length.default is length.empty
    if takes_length:
        values["length"] = _half(spec, name, node) if name in OF_HALF else spec.length
    try:
        layout = builder(**values)
    except (TypeError, ValueError) as error:
        # error messages of builders begin with the name of the argument
        place = given.get(str(error).partition(":")[0], node)
        raise spec.wrong(place, str(error)) from error
    lengths = _lengths(spec)
    if (layout.q_len, layout.kv_len) != lengths:
        raise spec.wrong(
            node, f"{name} is a mask of {layout.q_len} x {layout.kv_len} tokens, expected {lengths[0]} x {lengths[1]}"
        )
    return layout


def _evaluate(spec: Specification, node: ast.expr, depth: int = 0) -> BlockLayout:
    if depth > MAX_NESTED:
        raise spec.wrong(node, f"expected at most {MAX_NESTED} operators inside each other")
    if isinstance(node, ast.Name | ast.Call):
        return _called(spec, node)
    apply: Callable[..., BlockLayout]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        operands, apply = [node.operand], operator.invert
    elif isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        operands, apply = [node.left, node.right], BINARY[type(node.op)]
    else:
        raise spec.wrong(node, "expected a mask, or masks joined by | & - ^ ~ and parentheses")
    layouts = [_evaluate(spec, operand, depth + 1) for operand in operands]
    try:
        return apply(*layouts)
    except (TypeError, ValueError) as error:
        raise spec.wrong(node, str(error)) from error


@public
def build(spec: str, length: Length, *, block_size: BlockSize = 128) -> BlockLayout:
    """The layout of a mask written as text, for configuration files and command lines.

    A specification combines masks of this package, called with their arguments except `length`, by the operators of
    layouts: `|` either, `&` both, `-` the first but not the second, `^` exactly one, `~` not, and parentheses. As in
    Python `~` binds first, then `-`, `&`, `^` and `|`. Arguments are numbers, strings, True, False, None, lists and
    tuples, by name or by position. Nothing else is evaluated: no other names, no arithmetic, no attributes.

    spec        for example "butterfly | local(window=512) - local(64)"; at most 2000 characters
    length      tokens, or (q_len, kv_len), passed to every mask that needs a length; others must have it by their other
                arguments, such as "neighborhood(grid=(32, 32), kernel=7)" and "documents([0, 256, 1024])", whose last
                document ends at the length. `block_diffusion` gets half of it: its layout has
                this many noised and clean tokens together
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv), passed to every mask that does not
                set its own
    returns     BlockLayout of shape (1, heads | 1, q_len, kv_len)
    raises      ValueError if the text is not a specification or a mask refuses its arguments; the message has the text
                with carets under the wrong word, similar names and the accepted arguments. TypeError if spec is not a
                string

    >>> build("butterfly | local(window=512)", 16384).nnz
    1644
    """
    if not isinstance(spec, str):
        raise TypeError(f"spec: expected a string, got {spec!r} ({type_name(spec)})")
    if len(spec) > MAX_CHARACTERS:
        raise ValueError(f"spec: expected at most {MAX_CHARACTERS} characters, got {len(spec)}")
    canvas = read_canvas(length, block_size)
    tokens = length if isinstance(length, int) else (canvas.q_len, canvas.kv_len)
    # on one line, since a specification may span several
    specification = Specification(" ".join(spec.split()), tokens, block_size)
    if not specification.text:
        raise ValueError("spec: expected the name of a mask, got nothing")
    if "#" in specification.text:
        # to Python everything after it would be a comment
        begin = specification.text.index("#")
        raise specification.wrong_at(begin, begin + 1, "spec: a specification has no comments, got #")
    try:
        tree = ast.parse(specification.text, mode="eval")
    except SyntaxError as error:
        # offset counts characters from 1, or is None
        begin = 0 if error.offset is None else error.offset - 1
        raise specification.wrong_at(begin, begin + 1, f"spec: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        # a null byte, or nesting too deep for the parser
        raise ValueError(
            f"spec: expected a specification, got what cannot be parsed: {error or 'too deeply nested'}"
        ) from None
    return _evaluate(specification, tree.body)
