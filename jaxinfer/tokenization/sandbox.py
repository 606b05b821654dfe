"""Jinja's immutable sandbox, with bounds on what a template may build and for how long it may run.

Jinja's own keeps a template from Python's attributes and from its caller's objects, and bounds one `range`, but neither
nested loops nor what a loop, a filter or a method of a text can make of little. Here every pass of a loop and every
call is a step, and every text or list that an operation is about to make is measured before it is made.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

from jaxinfer.tokenization.bounds import (
    Runaway,
    charged,
    check_filter,
    check_length,
    check_method,
    check_percent,
    check_widths,
    joined,
    printable,
    printed_length,
    take,
)

# fmt: off
SEQUENCE_FILTERS = frozenset((
    "abs", "attr", "batch", "count", "d", "default", "dictsort", "filesizeformat", "first", "float", "groupby", "int",
    "items", "last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "round",
    "select", "selectattr", "slice", "sort", "sum", "unique",
))
TEXT_FILTERS = frozenset((
    "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower", "pprint", "replace",
    "safe", "string", "title", "trim", "truncate", "upper", "urlencode", "wordcount", "xmlattr",
))
# fmt: on
"""Together Jinja's own, but for `tojson`, which chat templates have another of, and for `striptags`, `urlize` and
`wordwrap`: these are for pages, and slow on long texts."""


class BoundedSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """For templates that are rendered within `one_rendering`. Raises Runaway there."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=printable)
        known, self.filters = self.filters, {}
        for name in (*SEQUENCE_FILTERS, *TEXT_FILTERS):
            self.add_filter(name, known[name])
        del self.globals["lipsum"]  # paragraphs of a made-up language, any number of them

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Makes a filter known to templates; all that it is given is measured unless it is one of SEQUENCE_FILTERS."""
        self.filters[name] = _bounded_filter(name, function)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What Jinja makes the text of a block or a macro by."""
        return joined(parts)

    def _generate(self, source: jinja2.nodes.Template, *arguments: Any, **options: Any) -> str:
        """Jinja's hook between parsing and writing Python: the tree gets its bounds."""
        return super()._generate(_Bounds().visit(source), *arguments, **options)

    def step(self, count: int) -> bool:
        """Counts steps. True, so that it can stand before a condition."""
        take(steps=count)
        return True

    def joined(self, *parts: object) -> str:
        """What `~` does."""
        return joined([part if isinstance(part, str) else str(printable(part)) for part in parts])

    def made(self, part: Any) -> Any:
        """Counts what a slice has made."""
        return charged(part)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int | float) and abs(right) > 64:
            raise Runaway(f"it raises a number to the power {right}")
        if operator == "*" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > 4096:
                raise Runaway("it computes with a number of more than a thousand digits")
        elif operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(repeated, str | bytes | list | tuple) and isinstance(times, int):
                    check_length(len(repeated) * times)
        elif operator == "%" and isinstance(left, str | bytes):
            check_percent(left, [right])
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            check_length(len(left) + len(right))
        return charged(super().call_binop(context, operator, left, right))

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *arguments: Any, **options: Any) -> Any:
        take(steps=1)
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps `str.format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes):
            arguments = tuple(list(one) if isinstance(one, Iterator | range) else one for one in arguments)
            check_method(method.__name__, owner, [*arguments, *options.values()])
        elif isinstance(owner, int):  # to_bytes
            check_widths([*arguments, *options.values()])
        return charged(super().call(context, obj, *arguments, **options))


class _Bounds(jinja2.visitor.NodeTransformer):
    """Puts a step into every pass of a loop, and `BoundedSandbox`'s methods in the place of `~` and around slices."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:
        self.generic_visit(node)
        # A long pass is several steps: it may write out a list of a thousand entries.
        weight = 1 + sum(1 for _ in node.find_all(jinja2.nodes.Expr)) // 100
        step = _call("step", [jinja2.nodes.Const(weight)], node)
        node.body.insert(0, jinja2.nodes.ExprStmt(step, lineno=node.lineno))
        if node.test is not None:
            node.test = jinja2.nodes.And(_call("step", [jinja2.nodes.Const(1)], node), node.test, lineno=node.lineno)
        return node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Expr:
        self.generic_visit(node)
        return _call("made", [node], node) if isinstance(node.arg, jinja2.nodes.Slice) else node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Call:
        self.generic_visit(node)
        return _call("joined", node.nodes, node)


def _call(method: str, arguments: list[jinja2.nodes.Expr], place: jinja2.nodes.Node) -> jinja2.nodes.Call:
    """A call of the environment's own method, which templates cannot name."""
    function = jinja2.nodes.EnvironmentAttribute(method)
    return jinja2.nodes.Call(function, arguments, [], None, None, lineno=place.lineno)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    makes_text = name not in SEQUENCE_FILTERS

    @functools.wraps(function)
    def bounded(*arguments: Any, **options: Any) -> Any:
        take(steps=1)
        if makes_text:
            arguments = tuple(list(one) if isinstance(one, Iterator | range) else one for one in arguments)
        given = [*arguments, *options.values()]
        if given and isinstance(given[0], jinja2.Environment | jinja2.runtime.Context | jinja2.nodes.EvalContext):
            given = given[1:]
        if makes_text:
            printed_length(given)
            check_filter(name, given)
        elif name in ("batch", "slice", "round"):
            check_widths(given[1:])
        return charged(function(*arguments, **options))

    return bounded
