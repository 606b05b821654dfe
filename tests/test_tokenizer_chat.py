"""Chat templates: the same text as transformers renders, and a sandbox around foreign code."""

import datetime
import json
import re
from pathlib import Path

import pytest

from jaxinfer.tokenization import bounds
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


DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "2000 steps"),
        ("{% for i in range(90000) %}{% for j in range(90000) if false %}{% endfor %}{% endfor %}", "2000 steps"),
        ("{% for i in range(90000) %}{% set x = range(90000) | map('abs') | list %}{% endfor %}", "2000 steps"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "2000 steps",
        ),
        ("{% for i in range(90000) %}{{ 'ten chars.' * 1000 }}{% endfor %}", "500000 characters"),
        ("{% set x %}{% for i in range(900) %}" + "ten chars." * 100 + "{% endfor %}{% endset %}", "500000 char"),
        (DOUBLED.replace("EXPRESSION", "ns.x ~ ns.x"), "500000 characters"),
        (DOUBLED.replace("EXPRESSION", "ns.x + ns.x"), "500000 characters"),
        (DOUBLED.replace("EXPRESSION", "ns.x.replace('a', ns.x)"), "500000 characters"),
        (DOUBLED.replace("EXPRESSION", "ns.x | replace('', ns.x)"), "500000 characters"),
        (DOUBLED.replace("EXPRESSION", "ns.x.join([ns.x, ns.x])"), "500000 characters"),
        (DOUBLED.replace("EXPRESSION", "'{0}{0}'.format(ns.x)"), "500000 characters"),
        (DOUBLED.replace("EXPRESSION", "'%s%s' % (ns.x, ns.x)"), "500000 characters"),
        (DOUBLED.replace("EXPRESSION", "[ns.x, ns.x]") + "{{ ns.x }}", "500000 characters"),
        (DOUBLED.replace("EXPRESSION", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x | tojson }}", "500000 characters"),
        (DOUBLED.replace("EXPRESSION", "range(99999) | join(ns.x)"), "500000 characters"),
        ("{% for i in range(50) %}{% set x = 'ab' * 200000 %}{% endfor %}", "8000000 characters together"),
        ("{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}", "digits"),
        ("{{ 'x' * 1000000000000 }}", "500000 characters"),
        ("{{ 9 ** 999999999 }}", "to the power 999999999"),
        ("{{ '{:>999999999}'.format(1) }}", "500000 characters"),
        ("{{ '{:>{}}'.format(1, 999999999) }}", "500000 characters"),
        ("{{ '%999999999d' % 1 }}", "500000 characters"),
        ("{{ '%*d' % (999999999, 1) }}", "500000 characters"),
        ("{{ ('%9999999d' * 1000) % messages }}", "500000 characters"),
        ("{{ '%999999999d' | format(1) }}", "500000 characters"),
        ("{{ 'x'.ljust(999999999) }}", "500000 characters"),
        ("{{ 'x' | center(999999999) }}", "500000 characters"),
        ("{{ 'x' | indent(999999999, first=true) }}", "500000 characters"),
        ("{{ [1] | tojson(indent=999999999) }}", "500000 characters"),
        ("{{ [1] | batch(999999999, 0) | list }}", "500000 characters"),
        ("{{ 'a\tb'.expandtabs(999999999) }}", "500000 characters"),
        ("{{ (5).to_bytes(999999999) }}", "500000 characters"),
        ("x" * 300000, "300000 characters"),
    ],
)
def test_runaway_templates_are_stopped(template: str, why: str, monkeypatch):
    """With bounds that are soon reached: checking the types of each step takes the tests longer than the step."""
    monkeypatch.setattr(bounds, "MAX_STEPS", 2000)
    monkeypatch.setattr(bounds, "MAX_CHARACTERS", 500_000)
    monkeypatch.setattr(bounds, "MAX_BUILT", 8_000_000)
    with pytest.raises(ValueError, match=rf"^the chat template is stopped: .*{why}.*; pass another one"):
        rendered(template)


def test_stops_by_the_clock(monkeypatch):
    """Looking for something in a long list is one step, and takes a millisecond."""
    monkeypatch.setattr(bounds, "MAX_SECONDS", 0.1)
    with pytest.raises(ValueError, match=r"the chat template 'mine' is stopped: it runs for more than 0\.1 seconds"):
        rendered(
            "{% set x = range(90000) | list %}{% for i in range(90000) %}{% if -1 in x %}{% endif %}{% endfor %}",
            template_name="mine",
        )


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ [0] * 1000000000000 | length }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ lipsum(1000000) }}",
    ],
)
def test_what_jinja_stops_itself(template: str):
    with pytest.raises(ValueError, match="chat template refuses"):
        rendered(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.strip() }}",
        "{{ messages[0].content.split('</think>')[-1] }}",
        "{{ messages[0].content | trim }}",
        "{{ '%s' % messages[0].content }}",
        "{{ '{}'.format(messages[0].content) }}",
        "{{ '%s%d' % (messages[0].content[:-1], 3) }}",
    ],
)
def test_numbers_in_messages_are_no_widths(template: str):
    """A telephone number and a moment in seconds stay what they are."""
    content = "call 4912345678901 at 1796018123"
    assert rendered(template, [{"role": "user", "content": content}]) == content


def test_numbers_given_to_a_format_are_no_widths():
    assert rendered("{{ '{}: {}'.format(1796018123, 'x') }}{{ '%d' % 1796018123 }}") == "1796018123: x1796018123"


def test_long_conversations_are_no_runaways():
    """300 messages of 300 characters through loops, slices, filters and joins."""
    template = (
        "{% for m in messages %}{% set ns = namespace(text='') %}{% for word in m.content.split(' ')[:2] %}"
        "{% set ns.text = ns.text ~ word %}{% endfor %}{{ '<' + m.role + '>' + ns.text | trim }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "ab cd " * 50}] * 300
    assert rendered(template, messages) == "<user>abcd" * 300


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
