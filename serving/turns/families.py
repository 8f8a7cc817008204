"""Which formats a model writes, as its chat template shows them to it."""

from __future__ import annotations

from dataclasses import replace

from serving.turns.formats import deepseek, harmony, kimi_k2, mistral
from serving.turns.parsers import HARMONY, HARMONY_REASONING, TOOL_PARSERS, TurnSettings
from ubatch import ConfigError

_SHOWN = (
    (("```json", deepseek.SEPARATOR), "deepseek_v3"),
    ((deepseek.SEPARATOR,), "deepseek_v31"),
    ((kimi_k2.SECTION.call,), "kimi_k2"),
    ((harmony.CHANNEL,), HARMONY),
    ((mistral.BEGIN,), "mistral"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<|start_header_id|>", '"parameters": '), "llama3_json"),
)
"""What a chat template has that shows calls to the model -> their format. The first row counts of which it has all."""


def tool_parser_of(template: str) -> str | None:
    """The format of calls that a chat template shows; None if it shows none that is known."""
    return next((name for words, name in _SHOWN if all(word in template for word in words)), None)


def with_defaults(settings: TurnSettings, template: str | None) -> TurnSettings:
    """The settings, completed by what the model's chat template shows; None for a model without one.

    Raises:
        ConfigError: the model may call tools, and nothing says how it writes calls.
    """
    shown = None if template is None else tool_parser_of(template)
    if shown == HARMONY and settings.reasoning_parser is None:  # its messages are no text to be shown as it is
        settings = replace(settings, reasoning_parser=HARMONY_REASONING)
    if not settings.enable_auto_tool_choice or settings.tool_call_parser is not None:
        return settings
    if shown is None:
        raise ConfigError(
            "--enable-auto-tool-choice needs --tool-call-parser: the model's chat template does not show how it writes "
            f"calls. Known are {', '.join(TOOL_PARSERS)}."
        )
    return replace(settings, tool_call_parser=shown)
