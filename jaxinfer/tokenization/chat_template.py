"""Chat templates: Jinja programs that come with a checkpoint, rendered in a sandbox.

The environment is the one transformers documents for template authors (trim_blocks, lstrip_blocks, loop
controls, `raise_exception`, `strftime_now`, a `tojson` that leaves non-ASCII and HTML characters alone, the
`generation` tag), so that a template written for it renders the same here. Templates are foreign code: they
run in Jinja's immutable sandbox, which keeps them from Python attributes and from changing the caller's
messages.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_MAX_CHARACTERS = 16_000_000
"""Longest text a template may build; real conversations are a few hundred thousand characters."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    **variables: Any,
) -> str:
    """Renders `template` for `messages`, each a mapping with at least a "role".

    `special_tokens` (such as {"bos_token": "<s>"}) and `variables` (such as enable_thinking=False) are
    visible to the template by name. Raises ValueError if the template does not compile, refuses the messages,
    or leaves the sandbox.
    """
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(
                f"messages[{position}] is {message!r}; expected a dict with a role and a content, such as "
                '{"role": "user", "content": "Hello"}'
            )
    context = {"tools": tools, "documents": None, **(special_tokens or {}), **variables}
    blocks: list[str] = []
    length = 0
    try:
        compiled = _compile(template)
        for block in compiled.generate(messages=messages, add_generation_prompt=add_generation_prompt, **context):
            length += len(block)
            _check_length(length)
            blocks.append(block)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template does not compile: {error.message} (line {error.lineno})") from error
    except (
        jinja2.TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        SyntaxError,  # of the Python that Jinja writes: more than 20 nested loops
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"the chat template refuses these messages: {str(error) or type(error).__name__}") from error
    return "".join(blocks)


def _check_length(length: int) -> None:
    if length > _MAX_CHARACTERS:
        raise jinja2.exceptions.SecurityError(
            f"it builds a text of more than {_MAX_CHARACTERS} characters, which no conversation needs"
        )


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox limits `range`; one multiplication or padding can allocate just as much, so they are limited too.

    What a template builds by many steps (joining a text with itself in a loop) is not.
    """

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int | float) and abs(right) > 64:
            raise jinja2.exceptions.SecurityError(f"it raises a number to the power {right}")
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, str | list | tuple) and isinstance(times, int):
                _check_length(len(repeated) * times)
        if operator == "%":
            _check_widths(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *arguments: Any, **options: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps `str.format`
        _check_widths(getattr(method, "__self__", None), *arguments, *options.values())
        return super().call(context, obj, *arguments, **options)


def _check_widths(text: object, *arguments: object) -> None:
    """Of what a text's own methods pad it to (`ljust`, `zfill`), or what `%` and `format` have in it as a width."""
    if isinstance(text, str):
        widths = [value for value in arguments if isinstance(value, int)]
        _check_length(max(widths + [int(digits) for digits in re.findall(r"\d{8,}", text)], default=0))


def _checked_filter(function: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(function)
    def checked(text: object, *arguments: object, **options: object) -> str:
        _check_widths(str(text), *arguments, *options.values())
        return function(text, *arguments, **options)

    return checked


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it just renders its body."""

    tags = {"generation"}  # noqa: RUF012 (the type that jinja2 declares)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, json escapes non-ASCII: tokens never seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.filters |= {name: _checked_filter(environment.filters[name]) for name in ("center", "format", "indent")}
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)
