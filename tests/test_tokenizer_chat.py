"""Chat templates: the same text as transformers renders, and a sandbox around foreign code."""

import datetime
import json
import re
from pathlib import Path

import pytest

from jaxinfer.tokenization.chat_template import render

FIXTURE = json.loads((Path(__file__).parent / "fixtures" / "chat_templates.json").read_text(encoding="utf-8"))
USER = [{"role": "user", "content": "Hi"}]


def rendered(template: str, messages=USER, **variables) -> str:
    return render(template, messages, add_generation_prompt=True, **variables)


@pytest.mark.parametrize("case", FIXTURE["cases"], ids=lambda case: case["template"])
def test_renders_as_transformers(case):
    assert case["rendered"] == render(
        FIXTURE["templates"][case["template"]],
        case["messages"],
        add_generation_prompt=case["add_generation_prompt"],
        tools=case.get("tools"),
        special_tokens=FIXTURE["special_tokens"],
        **case.get("variables", {}),
    )


def test_template_may_refuse():
    messages = [*USER, *USER]
    with pytest.raises(ValueError, match=r"refuses these messages: roles must alternate user/assistant"):
        rendered(FIXTURE["templates"]["instruct"], messages, special_tokens=FIXTURE["special_tokens"])


def test_date():
    today = datetime.datetime.now().strftime("%d %b %Y")
    assert rendered("{{ strftime_now('%d %b %Y') }}") == today


def test_tojson_options():
    value = {"b": "é<", "a": [1]}
    assert rendered("{{ v | tojson(sort_keys=true) }}", v=value) == '{"a": [1], "b": "é<"}'
    assert rendered("{{ v | tojson(separators=(',', ':'), ensure_ascii=true) }}", v=value) == '{"b":"\\u00e9<","a":[1]}'


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ ('%s' | attr('format'))('{0.__class__}') }}{{ messages | attr('__class__') }}",
        "{{ lipsum.__globals__ }}",
    ],
)
def test_python_is_out_of_reach(template: str):
    """An unsafe attribute is an error or, where Jinja makes it undefined, no text."""
    try:
        text = rendered(template)
    except ValueError as error:
        assert "chat template" in str(error)  # noqa: PT017 (both outcomes are safe)
        return
    assert not re.search(r"class|uid=|module|builtin", text)


@pytest.mark.parametrize(
    "template",
    [
        "{% set x = messages.append(1) %}",
        "{% set x = messages[0].update(role='system') %}",
        "{% set x = messages[0].pop('role') %}",
    ],
)
def test_messages_cannot_be_changed(template: str):
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ValueError, match="chat template refuses"):
        rendered(template, messages)
    assert messages == USER


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ 'x' * 1000000000000 }}",
        "{{ [0] * 1000000000000 | length }}",
        "{{ 9 ** 999999999 }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ 'x'.ljust(999999999) }}",
        "{{ 'x' | center(999999999) }}",
        "{{ '%999999999d' | format(1) }}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{{ 'ten chars.' * 100 }}{% endfor %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_runaway_templates_end(template: str):
    with pytest.raises(ValueError, match="chat template refuses"):
        rendered(template)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{% for m in messages %}", USER, r"does not compile: .*\(line 1\)"),
        ("{{ messages[0].content + 1 }}", USER, "refuses these messages: can only concatenate str"),
        ("{{ messages[0].missing.name }}", USER, "refuses these messages: .*missing"),
        ("{{ 1 // 0 }}", USER, "refuses these messages"),
        ("x", [{"content": "Hi"}], r"messages\[0\] is .*expected a dict with a role"),
        ("x", [{"role": "user", "content": ""}, {}], r"messages\[1\] is {}"),
    ],
)
def test_errors_name_the_cause(template: str, messages, message: str):
    with pytest.raises(ValueError, match=message):
        rendered(template, messages)
