"""Renders chat templates with transformers, for comparison.

    python tests/oracle/make_chat_template_fixture.py   # needs transformers; writes tests/fixtures/chat_templates.json

The templates are written for this, each around what real ones rely on.
"""

import json
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

FIXTURE = Path(__file__).parents[1] / "fixtures" / "chat_templates.json"

TURNS = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "  What's 2 + 2? é 😀\n"},
    {"role": "assistant", "content": "<think>\nsum\n</think>\n\n4"},
    {"role": "user", "content": "And 3 + 3?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "météo",
            "description": "Température <°C> à un endroit",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TEMPLATES = {
    "chatml": """{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
<|im_start|>system
default<|im_end|>
    {% endif %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "instruct": """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- set lead = system + '\\n\\n' if system is defined and loop.last else '' %}
        {{- '[INST] ' + lead + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}""",
    "thinking": """{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {%- set content = message.content %}
    {%- if '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|' ~ message.role ~ '|>\\n' ~ content ~ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""",
    "tools": """{%- macro turn(message) -%}
<turn {{ message.role | upper }}>{{ message.content | trim }}</turn>
{%- endmacro -%}
{% if tools %}{{ tools | tojson }}
{{ tools[0] | tojson(indent=2) }}
{% for tool in tools %}
- {{ tool.function.name }}: {{ tool.function.parameters.properties.items() | list }}
{% endfor %}{% endif %}
{% for message in messages %}{{ turn(message) }}
{% endfor %}{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}""",
    "generation": """{% for message in messages %}
{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}

{% else %}
{{ message.role }}: {{ message.content }}
{% endif %}
{% endfor %}""",
}
CASES: list[dict[str, Any]] = [
    {"template": "chatml", "messages": TURNS, "add_generation_prompt": True},
    {"template": "chatml", "messages": TURNS[1:2], "add_generation_prompt": False},
    {"template": "instruct", "messages": TURNS, "add_generation_prompt": True},
    {"template": "instruct", "messages": TURNS[1:3], "add_generation_prompt": False},
    {"template": "thinking", "messages": TURNS, "add_generation_prompt": True},
    {"template": "thinking", "messages": TURNS, "add_generation_prompt": True, "variables": {"enable_thinking": False}},
    {"template": "thinking", "messages": TURNS, "add_generation_prompt": True, "variables": {"enable_thinking": True}},
    {"template": "tools", "messages": TURNS, "add_generation_prompt": True, "tools": TOOLS},
    {"template": "tools", "messages": TURNS, "add_generation_prompt": True},
    {"template": "generation", "messages": TURNS, "add_generation_prompt": False},
]


def main() -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    for case in CASES:
        rendered, _ = render_jinja_template(
            conversations=[case["messages"]],
            tools=case.get("tools"),
            chat_template=TEMPLATES[case["template"]],
            add_generation_prompt=case["add_generation_prompt"],
            **special,
            **case.get("variables", {}),
        )
        case["rendered"] = rendered[0]
    fixture = {"special_tokens": special, "templates": TEMPLATES, "cases": CASES}
    FIXTURE.write_text(json.dumps(fixture, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
