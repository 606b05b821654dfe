"""Chat templates: Jinja programs that come with a checkpoint, rendered in a sandbox.

The environment is the one transformers documents for template authors (trim_blocks, lstrip_blocks, loop
controls, `raise_exception`, `strftime_now`, a `tojson` that leaves non-ASCII and HTML characters alone, the
`generation` tag), so that a template written for it renders the same here. Templates are foreign code: they
run in a sandbox, which keeps them from Python attributes, from changing the caller's messages, and from running or
growing without end (`jaxinfer.tokenization.bounds`).
"""

import datetime
import functools
import json
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from jaxinfer.tokenization.bounds import MAX_TEMPLATE, Runaway, check_length, one_rendering, printed_length
from jaxinfer.tokenization.sandbox import BoundedSandbox

_EXAMPLE = '[{"role": "user", "content": "Hello"}]'


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    template_name: str | None = None,
    **variables: Any,
) -> str:
    """Renders `template` for `messages`, each a mapping with at least a "role".

    `special_tokens` (such as {"bos_token": "<s>"}) and `variables` (such as enable_thinking=False) are
    visible to the template by name. Raises ValueError, with `template_name` if it has one, if the template does not
    compile, refuses the messages, leaves the sandbox, or takes more time or memory than any conversation needs.
    """
    named = "the chat template" if template_name is None else f"the chat template {template_name!r}"
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise ValueError(f"messages is {reprlib.repr(messages)}; expected a list of them, such as {_EXAMPLE}")
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            expected = f"expected a dict with a role and a content, such as {_EXAMPLE[1:-1]}"
            raise ValueError(f"messages[{position}] is {reprlib.repr(message)}; {expected}")
    context = {"tools": tools, "documents": None, **(special_tokens or {}), **variables}
    blocks: list[str] = []
    length = 0
    try:
        if len(template) > MAX_TEMPLATE:
            raise Runaway(f"it has {len(template)} characters, and {MAX_TEMPLATE} are the most")
        with one_rendering():
            for block in _compile(template).generate(
                messages=messages, add_generation_prompt=add_generation_prompt, **context
            ):
                length += len(block)
                check_length(length)
                blocks.append(block)
    except Runaway as error:
        raise ValueError(f"{named} is stopped: {error}; pass another one as chat_template") from error
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{named} does not compile: {error.message} (line {error.lineno})") from error
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
        raise ValueError(f"{named} refuses these messages: {str(error) or type(error).__name__}") from error
    return "".join(blocks)


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
    printed_length(
        value,
        indent=indent if isinstance(indent, int) else printed_length(indent),
        between=2 if separators is None else printed_length(separators),
    )
    # Jinja's own filter escapes <, > and & for HTML, json escapes non-ASCII: tokens never seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.add_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)
