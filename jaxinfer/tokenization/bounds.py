"""What a chat template may take: steps, seconds, and characters, measured before they are built.

A template is a program that comes with a checkpoint. Nested loops, a text joined with itself some thirty times, a width
or a separator of a million: each would take minutes or all of the memory. `jaxinfer.tokenization.sandbox` asks here.
"""

import contextlib
import contextvars
import dataclasses
import re
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import jinja2
import jinja2.utils

MAX_CHARACTERS = 16_000_000
"""Longest text a template may build; real conversations are a few hundred thousand characters."""
MAX_BUILT = 16 * MAX_CHARACTERS
"""Characters of all texts on the way to the result together; an item of a list counts as eight."""
MAX_STEPS = 1_000_000
"""Passes of loops and calls together: real templates take some tens for a message, and a handful for a tool."""
MAX_SECONDS = 30.0
"""Bounds what steps do not, such as looking for something in a long list a million times."""
MAX_TEMPLATE = 200_000
"""Characters of a template itself; the longest real ones have some tens of thousands."""


class Runaway(jinja2.exceptions.SecurityError):
    """A template takes more than any conversation needs."""


@dataclasses.dataclass
class _Spent:
    """What a rendering has taken so far."""

    deadline: float
    steps: int = 0
    built: int = 0


_spent: contextvars.ContextVar[_Spent] = contextvars.ContextVar("what a template has taken")


@contextlib.contextmanager
def one_rendering() -> Iterator[None]:
    """Bounds all that templates of a `BoundedSandbox` do in this block, together."""
    token = _spent.set(_Spent(time.monotonic() + MAX_SECONDS))
    try:
        yield
    finally:
        _spent.reset(token)


def check_length(length: int) -> None:
    """Raises Runaway for a text of more characters than a template may build."""
    if length > MAX_CHARACTERS:
        raise Runaway(f"it builds a text of more than {MAX_CHARACTERS} characters, which no conversation needs")


def printed_length(value: object, indent: int = 0, between: int = 2) -> int:
    """About how many characters a value is as text; lists that hold a list twice are twice as long, however deep.

    `indent` and `between` are the characters before a value for each level, and those between two of them.

    Raises Runaway where that is more than a template may build.
    """
    total, rest = 0, [(value, 0)]
    while rest:
        item, depth = rest.pop()
        total += between + depth * indent
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, Mapping):
            rest += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
            rest += [(part, depth + 1) for part in item]
        elif isinstance(item, jinja2.utils.Namespace):
            raise Runaway("it prints a namespace")
        elif isinstance(item, int):
            total += item.bit_length() // 3
        if total > MAX_CHARACTERS:
            break
    check_length(total)
    return total


def take(steps: int = 0, built: int = 0) -> None:
    """Counts steps, and characters that are built. Raises Runaway when it is too much."""
    spent = _spent.get(None)
    if spent is None:  # Jinja computes constants while it compiles
        return
    spent.steps += steps
    spent.built += built
    if spent.steps > MAX_STEPS:
        raise Runaway(f"it takes more than {MAX_STEPS} steps, which no conversation needs")
    if spent.built > MAX_BUILT:
        raise Runaway(f"it builds texts of more than {MAX_BUILT} characters together, which no conversation needs")
    if time.monotonic() > spent.deadline:
        raise Runaway(f"it runs for more than {MAX_SECONDS:g} seconds, which no conversation needs")


def charged(result: Any) -> Any:
    """What an operation has made, counted. Items of a lazy one are steps when they are asked for."""
    if isinstance(result, str | bytes):
        take(built=len(result))
    elif isinstance(result, list | tuple | dict):
        take(built=8 * len(result))
    elif isinstance(result, Iterator):
        return _counted(result)
    return result


def _counted(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        take(steps=1)
        yield item


def printable(value: Any) -> Any:
    """The value, which is about to become text. Raises Runaway where that would be too long."""
    if not isinstance(value, str):
        printed_length(value)
    return value


def joined(parts: Iterable[str]) -> str:
    """One text of many, measured first."""
    listed = list(parts)
    length = sum(map(len, listed))
    check_length(length)
    take(built=length)
    return "".join(listed)


def check_filter(name: str, given: list[Any]) -> None:
    """What a filter would build of more than its arguments, once."""
    text, arguments = given[0] if given else "", given[1:]
    if name == "format":
        check_percent(text, arguments)
    elif name == "join":
        _check_join(text, arguments[:1])
    elif name == "replace":
        _check_replace(text, arguments)
    elif name == "center":
        check_widths(arguments)
    elif name == "indent" and isinstance(text, str):
        indents = [one if isinstance(one, int) else printed_length(one) for one in arguments]
        check_length(len(text) + (1 + text.count("\n")) * max(indents, default=0))


def check_method(name: str, text: str | bytes, arguments: list[Any]) -> None:
    """What a text's own method would build."""
    if name in ("format", "format_map"):
        _check_braces(text, arguments)
    elif name == "join":
        _check_join(arguments[0] if arguments else (), [text])
    elif name == "replace":
        _check_replace(text, arguments)
    elif name in ("center", "ljust", "rjust", "zfill"):
        check_widths(arguments)
    elif name == "expandtabs":
        tabs = text.count("\t") if isinstance(text, str) else text.count(b"\t")
        check_widths(tabs * one for one in arguments if isinstance(one, int))
    elif name == "translate":
        table = arguments[0] if arguments and isinstance(arguments[0], Mapping) else {}
        check_length(len(text) * max((printed_length(value) for value in table.values()), default=0))


def check_widths(arguments: Iterable[Any]) -> None:
    """Whole numbers among the arguments are what something is padded or cut to."""
    check_length(max((one for one in arguments if isinstance(one, int)), default=0))


def _check_join(parts: Any, between: list[Any]) -> None:
    count = len(parts) if isinstance(parts, list | tuple | str | bytes | Mapping) else 0
    check_length(printed_length(parts) + count * printed_length(between))


def _check_replace(text: Any, arguments: list[Any]) -> None:
    if len(arguments) >= 2 and isinstance(text, str | bytes) and isinstance(arguments[0], str | bytes):
        old = arguments[0]
        places = text.count(old) if isinstance(text, str) and isinstance(old, str) else len(text) + 1
        check_length(len(text) + places * printed_length(arguments[1]))


def check_percent(text: Any, arguments: list[Any]) -> None:
    """`text % arguments`: a width or a precision may stand in the text or, for a star, among the values."""
    spelled = text.decode("latin-1") if isinstance(text, bytes) else str(text)
    widths = re.findall(r"%(?:\([^)]*\))?[-+ #0]*(\d*)\.?(\d*)", spelled)
    _check_places(spelled, "%", [digits for pair in widths for digits in pair], arguments, "*" in spelled)


def _check_braces(text: Any, arguments: list[Any]) -> None:
    """`text.format(*arguments)`, where the widths in a place may come from another."""
    spelled = str(text)
    places = re.findall(r"\{[^{}]*:([^{}]*)", spelled)
    is_nested = re.search(r"\{[^{}]*:[^{}]*\{", spelled) is not None
    _check_places(
        spelled, "{", [digits for place in places for digits in re.findall(r"\d+", place)], arguments, is_nested
    )


def _check_places(text: str, mark: str, widths: list[str], arguments: list[Any], from_values: bool) -> None:
    """Each place takes the longest value at most, and where widths are values, the largest number."""
    values = [part for one in arguments for part in (one if isinstance(one, tuple | list) else [one])]
    longest = max(map(printed_length, values), default=0)
    if from_values:
        longest = max([longest, *(abs(one) for one in values if isinstance(one, int))])
    check_length(len(text) + sum(int(digits[:12]) for digits in widths if digits) + text.count(mark) * longest)
