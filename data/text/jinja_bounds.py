"""How much may a chat template of strangers do? As many letters as no real one needs; then it is stopped.

Jinja's sandbox lets a template neither import nor reach into Python, but it may loop for days, and a few signs of it may ask
for more memory than there is. So all that it does costs letters, of which each rendering has `MOST_WORK`: a turn of a loop
and a call cost as many as the template has (`LEAST_PRICE` at least), a value that is made its own length. What would make long texts out of short
ones in ways that cannot be foreseen is not there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

LONGEST_TEMPLATE = 64 * 1024  # letters; each takes up to 2 KB when it is compiled
RENDERED_LETTERS = 1024 * 1024  # that are believed
MOST_LETTERS = 16 * 1024 * 1024  # of one value: a row of data has no more
MOST_VALUES = 256 * 1024  # in one list, and in those that are in it
MOST_WORK = 16 * MOST_LETTERS  # of all values that one rendering makes or looks through
LEAST_PRICE = 4096  # of a turn of a loop, or of a call
PART_PRICE = 8  # of a value in a list, which takes as long as so many letters to look at
MOST_BITS = 4096  # of a whole number
COUNTED, MADE, TEXT = "_counted", "_made", "string"  # names of filters that `_Counting` puts into a template
FILTERS = frozenset(
    (
        "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "indent", "int", "items", "join",
        "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe",
        "select", "selectattr", "sort", TEXT, "sum", "title", "tojson", "trim", "unique", "upper",
    )
)  # fmt: skip
# of texts: what becomes wide, and the way to bytes; to_bytes of numbers
NO_METHODS = frozenset(
    ("center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate", "encode", "to_bytes")
)
_WIDE = re.compile(r"\d{4}|\*")  # what may be a width or a precision in a text with %
MOST_WIDE = 64  # an indent, or digits
_left: ContextVar[int] = ContextVar("_left")
_price: ContextVar[int] = ContextVar("_price")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which work is counted; `bounded` renders."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, finalize=_charged)
        del self.globals["lipsum"]
        self.filters = {name: _bounded_filter(name, self.filters[name]) for name in FILTERS}
        self.filters |= {COUNTED: _counted, MADE: _charged}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator, where it is not too large."""
        _foresee(operator, left, right)
        return _charged(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> None:
        """No `format` that the sandbox would let pass by `is_safe_attribute`."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use it."""
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, (str, int)) and attr in NO_METHODS)

    def call(self, context: Any, obj: Any, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        """The result of a call, where it is not too large."""
        _spend(_price.get(0))
        text, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(text, str):
            args = (list(args[0]),) if name == "join" and args else args
            _charged((text, args))
            _foresee(name, text, args)
        return _charged(super().call(context, obj, *args, **named))


def bounded(environment: BoundedEnvironment, source: str) -> Callable[..., str]:
    """What renders a template, at most `RENDERED_LETTERS` of it.

    Raises:
        TemplateError: it is none; rendering it: it takes too much.
    """
    if len(source) > LONGEST_TEMPLATE:
        raise TemplateError(f"it is longer than {LONGEST_TEMPLATE:,} letters")
    template = environment.from_string(_Counting().visit(environment.parse(source)))

    def render(**values: Any) -> str:
        _left.set(MOST_WORK)
        _price.set(max(len(source), LEAST_PRICE))
        parts: list[str] = []
        size = 0
        for part in template.generate(**values):
            parts.append(part)
            size += len(part)
            if size > RENDERED_LETTERS:
                break
        return "".join(parts)[:RENDERED_LETTERS]

    return render


class _Counting(NodeTransformer):
    """Puts the counting into a template: around what is looped over, made anew or joined by `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """A loop."""
        if node.recursive:
            raise TemplateError("it has a recursive loop")
        self.generic_visit(node)
        node.iter = _filtered(node.iter, COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`a ~ b` is the text of a + the text of b."""
        self.generic_visit(node)
        texts = [_filtered(part, TEXT) for part in node.nodes]
        whole: nodes.Expr = texts[0]
        for text in texts[1:]:
            whole = nodes.Add(whole, text, lineno=node.lineno)
        return whole

    def _made(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, MADE) if getattr(node, "ctx", "load") == "load" else node

    visit_List = visit_Dict = visit_Tuple = _made

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """A part of a text or of a list."""
        return self._made(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """What is compared is looked through."""
        self.generic_visit(node)
        node.expr = _filtered(node.expr, MADE)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, MADE)
        return node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _spend(_price.get(0))
        yield value


def _charged(value: Any) -> Any:
    """A value, paid for by its size."""
    _spend(_size(value))
    return value


def _spend(letters: int) -> None:
    _left.set(_left.get(MOST_WORK) - letters)
    if _left.get() < 0:
        raise TemplateError("it does more than a template of conversations has to")


def _size(value: Any) -> int:
    """Letters of a value and all that is in it.

    Raises:
        TemplateError: they are too many.
    """
    size, count, left = 0, 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, (str, bytes)):
            size += len(one)
        elif isinstance(one, int):
            size += one.bit_length() // 8
        elif isinstance(one, Mapping):
            left.extend((*one.keys(), *one.values()))
        elif isinstance(one, (list, tuple, set, frozenset)):
            left.extend(one)
        elif isinstance(one, Namespace):  # shows what is in it
            left.append(object.__getattribute__(one, "_Namespace__attrs"))
        count += 1
        if size > MOST_LETTERS or count + len(left) > MOST_VALUES:
            raise TemplateError(f"it makes a value of more than {MOST_LETTERS:,} letters or {MOST_VALUES:,} parts")
    return size + PART_PRICE * count


def _foresee(operator: str, left: Any, right: Any) -> None:
    """Refuse what would be too large, before it is made."""
    size = 0
    if operator == "join":
        size = len(left) * len(right[0]) if right else 0
    elif operator == "replace":
        size = len(right[1]) * (left.count(right[0]) if right[0] else len(left) + 1) if len(right) > 1 else 0
    elif operator == "%" and isinstance(left, str):
        size = MOST_LETTERS if _WIDE.search(left) else len(left) + left.count("%") * _size(right)
    elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        size = MOST_LETTERS * (bits > MOST_BITS)
    elif operator == "*":
        number, other = (left, right) if isinstance(left, int) else (right, left)
        size = _size(other) * number if isinstance(number, int) else 0
    if size >= MOST_LETTERS:
        raise TemplateError(f"it makes a value of more than {MOST_LETTERS:,} letters")


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, paid for; its marks for Jinja stay."""
    place = int(hasattr(function, "jinja_pass_arg"))  # of its value among the arguments

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        _spend(_price.get(0))
        value, further = args[place], [*args[place + 1 :], *named.values()]
        if name in ("join", "list"):
            value = list(_counted(value))
        _charged([value, *further])
        if name in ("indent", "round", "tojson") and any(_is_wide(one) for one in further):
            raise TemplateError(f"{name} is asked for more than {MOST_WIDE}")
        if name == "join":
            _foresee(name, max((str(one) for one in further), key=len, default=""), [value])
        if name == "replace" and len(further) > 1:
            _foresee(name, str(value), [str(one) for one in further])
        return _charged(function(*args[:place], value, *args[place + 1 :], **named))

    return call


def _is_wide(value: Any) -> bool:
    return (isinstance(value, int) and value > MOST_WIDE) or (isinstance(value, str) and len(value) > MOST_WIDE)
