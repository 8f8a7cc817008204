"""Chat templates in the forms that published models have, each written anew for tests and cut to what it reads.

What differs between them: the form of content, of tool calls and of their arguments, which roles they know, and what
they refuse.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["NO_SYSTEM", "TEMPLATES", "TOOLS"]

_PARTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
_EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + _PARTS + "{% endif %}"
_ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
)


def _chatml(content: str = "{{ m.content }}", calls: str = "", tail: str = "") -> str:
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}" + content + calls + "{{ '<|im_end|>\n' }}"
        "{% endfor %}" + tail + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def _each_call(body: str) -> str:
    return "{% if m.tool_calls %}{% for c in m.tool_calls %}{% set f = c.function %}" + body + "{% endfor %}{% endif %}"


_HERMES_CALL = _each_call(
    """{{ '<tool_call>{"name": "' + f.name + '", "arguments": ' }}{{ f.arguments | tojson }}{{ '}</tool_call>' }}"""
)
_EITHER_CALL = _each_call(
    "{{ '<tool_call>' + f.name }}{% if f.arguments is string %}{{ f.arguments }}{% else %}"
    "{{ f.arguments | tojson }}{% endif %}</tool_call>"
)
_ITEMS_CALL = _each_call(
    "{{ '<function=' + f.name + '>' }}{% for k, v in f.arguments | items %}{{ '<' + k + '>' + v | string }}{% endfor %}"
)
_DOT_ITEMS_CALL = _each_call(
    "{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>{{ v }}{% endfor %}"
)
_TEXT_CALL = _each_call("{{ '<call>' + f.name + '<sep>' + f.arguments + '</call>' }}")
_LLAMA3_HEAD = "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"

TOOLS: Mapping[str, str] = {
    "hermes 2 pro": _chatml("{% if m.content %}{{ m.content }}{% endif %}", _HERMES_CALL),
    "qwen 2.5": _chatml("{% if m.content %}{{ '\n' + m.content }}{% endif %}", _HERMES_CALL),
    "qwen 3": _chatml(
        "{% if m.content is string %}{% set text = m.content %}{% else %}{% set text = '' %}{% endif %}"
        "{{ text.split('</think>')[-1].lstrip('\n') }}",
        _EITHER_CALL,
    ),
    "qwen 3 coder": _chatml("{{ m.content if m.content is string and m.content | trim else '' }}", _ITEMS_CALL),
    "qwen 3 next": _chatml(
        "{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('Unexpected role') }}"
        "{% endif %}{{ m.content or '' }}",
        _EITHER_CALL,
    ),
    "glm 4.5": (
        "[gMASK]<sop>{% macro visible(content) %}{% if content is string %}{{ content }}"
        "{% elif content is iterable and "
        "content is not mapping %}{% for p in content %}{% if p is mapping and p.type == 'text' %}{{ p.text }}"
        "{% elif p is string %}{{ p }}{% endif %}{% endfor %}{% else %}{{ content }}{% endif %}{% endmacro %}"
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ visible(m.content) }}"
        "{% elif m.role == 'assistant' %}"
        "<|assistant|>{{ visible(m.content) }}" + _DOT_ITEMS_CALL + "{% elif m.role == 'tool' %}<|observation|>"
        "{{ m.content }}{% elif m.role == 'system' %}<|system|>{{ visible(m.content) }}{% endif %}{% endfor %}"
    ),
    "minimax": _chatml("{{ m.content or '' }}", _DOT_ITEMS_CALL),
    "llama 3.1": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
        "{% set messages = messages[1:] %}"
        "{% endif %}<|start_header_id|>system<|end_header_id|>{{ system }}{% for m in messages %}"
        "{% if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}"
        + _LLAMA3_HEAD
        + "{{ m.content | trim }}"
        "{% elif 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
        """{% set f = m.tool_calls[0].function %}{{ '{"name": "' + f.name + '", "parameters": ' }}"""
        """{{ f.arguments | tojson }}}"""
        "{% else %}<|start_header_id|>ipython<|end_header_id|>{% if m.content is mapping or m.content is iterable %}"
        "{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}{% endif %}{% endfor %}"
    ),
    "mistral 7b v0.3": (
        "{% for m in messages %}{% if m.role == 'user' or m.role == 'system' %}[INST] {{ m.content }}[/INST]"
        "{% elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
        "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('Tool call IDs have length 9') }}"
        "{% endif %}"
        "{{ c.function | tojson }}{% endfor %}]{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}"
        """{% elif m.role == 'tool' %}{% set c = m.content %}[TOOL_RESULTS] {"content": """
        """{{ c | string }}}[/TOOL_RESULTS]"""
        "{% else %}{{ raise_exception('Only user, system, assistant and tool roles') }}{% endif %}{% endfor %}"
    ),
    "mistral small 3": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
        "{% elif m.role == 'system' %}"
        "{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}{% elif m.role == 'assistant' %}"
        "{% if m.content %}{{ m.content + eos_token }}{% endif %}" + _EITHER_CALL + "{% elif m.role == 'tool' %}"
        "{{ '[TOOL_RESULTS]' + m.content }}{% else %}{{ raise_exception('Only user, system and assistant roles') }}"
        "{% endif %}{% endfor %}"
    ),
    "deepseek v3": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% for m in messages %}"
        "{% if m['role'] == 'user' %}{{ '<User>' + m['content'] }}{% endif %}"
        "{% if m['role'] == 'assistant' and m['content'] is none %}" + _TEXT_CALL + "{% endif %}"
        "{% if m['role'] == 'assistant' and m['content'] is not none %}{{ '<Assistant>' + m['content'] }}{% endif %}"
        "{% if m['role'] == 'tool' %}{{ '<output>' + m['content'] }}{% endif %}{% endfor %}"
    ),
    "deepseek r1": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% for m in messages %}"
        "{% if m.role == 'user' %}<User>{{ m.content }}{% elif m.role == 'assistant' and 'tool_calls' in m %}"
        + _TEXT_CALL
        + "{% elif m.role == 'assistant' %}<Assistant>{{ m.content.split('</think>')[-1] }}{% elif m.role == 'tool' %}"
        "<output>{{ m.content }}{% endif %}{% endfor %}"
    ),
    "deepseek v3.1": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<User>"
        "{{ m.content }}"
        "{% elif m.role == 'tool' %}<output>{{ m.content }}{% elif m.role == 'assistant' %}"
        "{% if m.tool_calls is defined and m.tool_calls is not none %}{% if m.content is not none and m.content %}"
        "{{ m.content }}{% endif %}"
        + _EITHER_CALL
        + "{% else %}{{ '<Assistant>' + m.content }}{% endif %}{% endif %}{% endfor %}"
    ),
    "gpt-oss": (
        "{% for m in messages %}{% if m.role in ['developer', 'system'] %}<|start|>developer{{ m.content }}<|end|>"
        "{% elif m.role == 'assistant' and 'tool_calls' in m %}{% set f = m.tool_calls[0].function %}"
        "{{ '<|start|>assistant to=functions.' + f.name }}<|message|>{{ f.arguments | tojson }}<|call|>"
        "{% elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}<|end|>"
        "{% elif m.role == 'tool' %}<|start|>functions<|message|>{{ m.content | tojson }}<|end|>"
        "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}<|end|>{% endif %}{% endfor %}"
    ),
    "kimi k2": (
        "{% macro render(content) %}{% if content is string %}{{ content }}{% elif content is not none %}"
        "{% for p in content %}{% if p.type == 'image' %}<|media|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
        "{% endif %}"
        "{% endmacro %}{% for m in messages %}<|im_{{ m.role }}|>{{ render(m.content) }}"
        + _EITHER_CALL
        + "<|im_end|>{% endfor %}"
    ),
    "granite 3": _chatml("{{ m.content or '' }}", _each_call("{{ c | tojson }}")),
    "command r7b": (
        "{% for m in messages %}{% if m.role | lower == 'system' %}<|SYSTEM|>{{ m.content }}"
        "{% elif m.role | lower == 'user' %}"
        "<|USER|>{{ m.content }}{% elif m.role | lower == 'assistant' %}<|CHATBOT|>{% if m.tool_calls %}{% for c in "
        """m.tool_calls %}{"tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}"""
        "{% endfor %}{% else %}{{ m.content }}{% endif %}{% elif m.role | lower == 'tool' %}<|RESULT|>{{ m.content }}"
        "{% endif %}{% endfor %}"
    ),
    "functionary": _chatml("{{ m.content if m.content is not none else '' }}", _TEXT_CALL),
}
"""Templates that write tool calls and their results."""

NO_SYSTEM: Mapping[str, str] = {
    "gemma 2": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}"
        + _ALTERNATE
        + "{{ '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n' }}"
        "{% endfor %}"
    ),
    "mistral 7b v0.1": (
        "{% for m in messages %}" + _ALTERNATE + "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% else %}"
        "{{ raise_exception('Only user and assistant') }}"
        "{% endif %}{% endfor %}"
    ),
    "vicuna, two roles": (
        "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% elif m.role == 'assistant' %}"
        "ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}ASSISTANT:"
    ),
}
"""Templates without a place for a system prompt: they refuse one, or leave it out."""

TEMPLATES: Mapping[str, str] = {
    **TOOLS,
    **NO_SYSTEM,
    "chatml": _chatml(),
    "chatml, concatenated": _chatml("{{ m['content'] + '' }}"),
    "chatml, trimmed": _chatml("{{ m['content'] | trim }}"),
    "zephyr": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}\n{% endfor %}<|assistant|>\n"
    ),
    "llama 2": (
        "{% if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system = messages[0].content %}"
        "{% else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}{% for m in loop_messages %}"
        + _ALTERNATE
        + "{% if loop.index0 == 0 and system %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m.content %}"
        "{% else %}{% set content = m.content %}{% endif %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + content.strip() + ' ' }}{% endif %}{% endfor %}"
    ),
    "llama 3": "{% for m in messages %}" + _LLAMA3_HEAD + "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}",
    "llama 3.2 vision": "{% for m in messages %}" + _LLAMA3_HEAD + _EITHER + "<|eot_id|>{% endfor %}",
    "llama 4": (
        "{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{% if p.type == 'image' %}<|image|>{% elif p.type == 'text' %}"
        "{{ p.text | trim }}"
        "{% endif %}{% endfor %}{% endif %}<|eot|>{% endfor %}"
    ),
    "gemma 3": (
        "{% if messages[0].role == 'system' %}{% if messages[0].content is string %}"
        "{% set first = messages[0].content %}"
        "{% else %}{% set first = messages[0].content[0].text %}{% endif %}{% set loop_messages = messages[1:] %}"
        "{% else %}"
        "{% set first = '' %}{% set loop_messages = messages %}{% endif %}{% for m in loop_messages %}"
        + _ALTERNATE
        + "<start_of_turn>{{ m.role }}\n{{ first if loop.first }}{% if m.content is string %}{{ m.content | trim }}"
        "{% elif m.content is iterable %}"
        + _PARTS
        + "{% else %}{{ raise_exception('Invalid content type') }}{% endif %}"
        "<end_of_turn>{% endfor %}"
    ),
    "qwen 2 vl": _chatml(_EITHER),
    "llava, parts alone": "{% for m in messages %}{{ m.role | upper }}: " + _PARTS + " {% endfor %}ASSISTANT:",
    "idefics, parts by line": (
        "{% for m in messages %}{{ m.role | capitalize }}:{% for p in m.content %}{{ '\n' + p.text }}"
        "{% endfor %}\n{% endfor %}"
    ),
    "first part alone": "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}",
    "first part, or a string": (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{{ m.content[0].text }}"
        "{% endif %}{% endfor %}"
    ),
    "parts of the user alone": (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}"
        + _PARTS
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "phi 3": (
        "{% for m in messages %}{% if m.role == 'system' %}<|system|>\n{{ m.content }}<|end|>"
        "{% elif m.role == 'user' %}<|user|>\n"
        "{{ m.content }}<|end|>{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}<|end|>{% endif %}"
        "{% endfor %}"
    ),
    "phi 4": (
        "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
        "{{ '<|' + m.role + '|>' + m.content }}"
        "{% endif %}{% endfor %}"
    ),
    "deepseek v2": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' + m.content + '\n\n' }}"
        "{% elif m.role == 'assistant' %}"
        "{{ 'Assistant: ' + m.content }}{% elif m.role == 'system' %}{{ m.content + '\n\n' }}{% endif %}"
        "{% endfor %}Assistant:"
    ),
    "first system prompt": (  # gpt-oss, MiniMax, SmolLM3: instructions are read where they come first
        "{% if messages[0].role in ['system', 'developer'] %}<|system|>{{ messages[0].content }}{% endif %}"
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<|{{ m.role }}|>{{ m.content }}{% endif %}"
        "{% endfor %}"
    ),
    "last system prompt": (  # DeepSeek R1's distilled models
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.system = m.content %}{% endif %}{% endfor %}{{ ns.system }}{% for m in messages %}"
        "{% if m.role in ['user', 'assistant'] %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    ),
    "alpaca": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\n\n' }}{% elif m.role == 'user' %}"
        "### Instruction:\n{{ m.content }}\n\n{% else %}### Response:\n{{ m.content }}\n\n{% endif %}{% endfor %}"
    ),
    "glm 4": "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}<|assistant|>",
    "internlm": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "olmo": (
        "{% for m in messages %}{% if m.role == 'system' %}<|system|>\n{{ m.content }}"
        "{% elif m.role == 'user' %}<|user|>\n"
        "{{ m.content }}{% elif m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% endif %}{% endfor %}"
    ),
    "content as json": "{% for m in messages %}{{ {'from': m.role, 'text': m.content} | tojson }}\n{% endfor %}",
}
"""Name -> template; `TOOLS` and `NO_SYSTEM` are among them."""
