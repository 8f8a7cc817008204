"""What a chat template shows of a model's calls, and what forms come after its reasoning."""

import json
from typing import Any

import pytest
from repository import TINY_CHAT

from serving.structured import Messages, Preamble, StructuredOutputsParams, grammar_text
from serving.text.tokenizer import load_tokenizer
from serving.turns.formats.in_sections import DEEPSEEK, SEPARATOR
from serving.turns.parsers import TOOL_PARSERS, TurnSettings, tool_parser_of, with_defaults
from ubatch import ConfigError

SHOWN = {
    "hermes": "<tool_call>\n{{ call | tojson }}",
    "qwen3_coder": "<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>",
    "glm45": "<tool_call>{{ name }}<arg_key>{{ key }}</arg_key>",
    "llama3_json": """<|start_header_id|>{"name": "f", "parameters": {}}""",
    "mistral": "[TOOL_CALLS][{{ call | tojson }}]",
    "granite": "Write <|tool_call|> and a list of <tool_call>",
    "deepseek_v3": f"{DEEPSEEK.call}function{SEPARATOR}```json",
    "deepseek_v31": f"{DEEPSEEK.call}{{{{ name }}}}{SEPARATOR}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>",
    "openai": "<|start|>assistant<|channel|>final<|message|>",
}
AUTO = TurnSettings(enable_auto_tool_choice=True)


def test_each_format_is_known_by_its_template() -> None:
    assert SHOWN.keys() == TOOL_PARSERS.keys()
    for name, template in SHOWN.items():
        assert tool_parser_of(template) == name
        assert with_defaults(AUTO, template).tool_call_parser == name
    given = TurnSettings(enable_auto_tool_choice=True, tool_call_parser="mistral")
    assert with_defaults(given, SHOWN["hermes"]) == given


def test_what_a_template_does_not_show_must_be_named() -> None:
    for template in ("{{ messages }}", None):
        with pytest.raises(ConfigError, match="needs --tool-call-parser"):
            with_defaults(AUTO, template)
        assert with_defaults(TurnSettings(), template) == TurnSettings()


def test_harmonys_messages_are_read_without_a_flag() -> None:
    turns = with_defaults(TurnSettings(), SHOWN["openai"])
    assert (turns.reasoning_parser, turns.tool_call_parser) == ("openai_gptoss", None)


MARKS = {"<|start|>": 1018, "<|channel|>": 1019, "<|message|>": 1020, "<|end|>": 1021}
FORM = '{"a": 1}'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY_CHAT)


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "text", "fits"),
    [
        (None, FORM, True),
        (Preamble("<think>", "</think>"), FORM, True),
        (Preamble("<think>", "</think>"), f"<think>Hm {{</think>{FORM}", True),
        (Preamble("<think>", "</think>"), f"\n<think></think>{FORM}", True),
        (Preamble("<think>", "</think>"), f"Hm</think>{FORM}", False),
        (Preamble("<think>", "</think>", begun=True), f"Hm</think>{FORM}", True),
        (Preamble("<think>", "</think>", begun=True), f"<think>Hm</think>{FORM}", True),
        (Preamble("<think>", "</think>", begun=True), FORM, False),
        (Preamble("(", "))", begun=True), f"Hm) )){FORM}", True),
        (Messages(), f"<think></think>final<tool_call>{FORM}", False),
        (Messages(), f"</think>final<tool_call>{FORM}", True),
        (Messages(), f"</think>analysis<tool_call>Hm</tool_call><think>assistant</think>final<tool_call>{FORM}", True),
    ],
)
def test_a_form_comes_after_the_reasoning(tokenizer: Any, before: Any, text: str, fits: bool) -> None:
    """Here harmony's marks are other tokens of the tokenizer."""
    llguidance = pytest.importorskip("llguidance", reason="llguidance is not installed; `make setup` installs it")
    from serving.structured.matcher import grammar_tokenizer

    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    params = StructuredOutputsParams(json=json.dumps(schema), disable_additional_properties=True)
    grammar = grammar_text(params, before, special=MARKS if isinstance(before, Messages) else added)
    matcher = llguidance.LLMatcher(grammar_tokenizer(tokenizer, 1024, [2]), grammar)
    assert not matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == fits
