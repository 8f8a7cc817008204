"""What requests may hold that is not done here: one table, for all bodies.

Fields are OpenAI's, vLLM's and SGLang's. One that would change the answer is refused by name, unless its value asks for
nothing. One that would not, and any that nobody knows, is taken, and named once in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError

from serving.api.errors import UNSUPPORTED, shown
from serving.logs import log_event

__all__ = ["CHAT", "COMPLETIONS", "TOKENIZE", "UNUSED", "Refused", "check_fields", "describe_fields", "log_unused"]

_logger = logging.getLogger(__name__)

MAX_NAMED = 256  # field names that a process remembers, and so logs
MAX_NAME_CHARACTERS = 64


@dataclass(frozen=True)
class Refused:
    """A field that would change the answer.

    Attributes:
        why: it is refused, and what to do instead.
        neutral: values that ask for nothing, besides null.
        unless: another field and its value, with which any value of this one asks for nothing.
    """

    why: str
    neutral: tuple[Any, ...] = (False, "", [], {})
    unless: tuple[str, Any] | None = None

    def asks(self, value: Any) -> bool:
        """Whether a value, from JSON, asks for anything."""
        if isinstance(value, dict):
            value = {name: item for name, item in value.items() if item is not None}
        return value is not None and not any(_same(value, neutral) for neutral in self.neutral)


_FORM = Refused("the output cannot be held to a form; ask for the form in the prompt, and check the answer")
_BEAMS = "there is no beam search; sample several outputs with n"
_PROCESSORS = Refused("requests cannot bring code; use logit_bias")
_TEXT_ONLY = Refused("only text is read and written")
_NOT_TOLD = Refused("the server does not tell this")
_ELSEWHERE = Refused("keys and values are not taken from other servers")
_TOOLS = "tools cannot be called; leave them out, or set tool_choice to 'none'"
_KWARGS = Refused("hand it to the chat template, in chat_template_kwargs")

_GENERATION: Mapping[str, Refused] = {
    "response_format": Refused(f"{_FORM.why}; only {{'type': 'text'}} is", ({"type": "text"},)),
    "structured_outputs": _FORM,
    "structural_tag": _FORM,
    "guided_json": _FORM,
    "guided_json_object": _FORM,
    "guided_regex": _FORM,
    "guided_choice": _FORM,
    "guided_grammar": _FORM,
    "guided_decoding_backend": _FORM,
    "guided_whitespace_pattern": _FORM,
    "json_schema": _FORM,
    "regex": _FORM,
    "ebnf": _FORM,
    "use_beam_search": Refused(_BEAMS),
    "length_penalty": Refused(_BEAMS, (1.0,)),
    "early_stopping": Refused(_BEAMS),
    "logits_processors": _PROCESSORS,
    "custom_logit_processor": _PROCESSORS,
    "custom_params": _PROCESSORS,
    "vllm_xargs": Refused("there are no extensions that could read it"),
    "stop_regex": Refused("only plain strings end the output; use stop"),
    "no_stop_trim": Refused("use include_stop_str_in_output"),
    "min_new_tokens": Refused("use min_tokens", (0,)),
    "max_new_tokens": Refused("use max_tokens", ()),
    "repetition_detection": Refused("repetitions do not end the output; use frequency_penalty, or max_tokens"),
    "watermarking": Refused("the output has no watermark"),
    "logprob_token_ids": Refused("log-probabilities are told of the likeliest tokens, not of chosen ones"),
    "logprobs_mode": Refused(
        "log-probabilities are the model's own, before temperature and penalties", ("raw_logprobs",)
    ),
    "spaces_between_special_tokens": Refused("the tokenizer alone decides about spaces", (True,)),
    "suffix": Refused("the model only continues text"),
    "prompt_embeds": Refused("send text or token ids as prompt"),
    "input_embeds": Refused("send text or token ids as prompt"),
    "input_ids": Refused("send token ids as prompt, to /v1/completions"),
    "lora_path": Refused("there are no LoRA adapters; model names what is served"),
    "session_params": Refused("there are no sessions; send the whole prompt"),
    "cache_salt": Refused("all requests share the prefix cache; serve with --no-enable-prefix-caching instead"),
    "kv_transfer_params": _ELSEWHERE,
    "ec_transfer_params": _ELSEWHERE,
    "thinking_token_budget": Refused("thinking is not told apart from the answer; use max_tokens", (-1,)),
    "return_hidden_states": _NOT_TOLD,
    "return_routed_experts": _NOT_TOLD,
    "routed_experts_prompt_start": Refused(_NOT_TOLD.why, (0,)),
    "routed_experts_start_len": Refused(_NOT_TOLD.why, (0,)),
    "return_cached_tokens_details": Refused("usage.prompt_tokens_details has the number of cached tokens"),
    "return_prompt_text": Refused("/detokenize gives the text of token ids"),
    "return_prompt_token_ids": Refused("use return_token_ids"),
    "return_meta_info": _NOT_TOLD,
}
_CONVERSATION: Mapping[str, Refused] = {
    "chat_template": Refused(
        "requests cannot bring a template; serve a checkpoint that has it, or use chat_template_kwargs"
    ),
    "documents": Refused("put the documents into a message"),
    "tools": Refused(_TOOLS, unless=("tool_choice", "none")),
    "functions": Refused(_TOOLS),
    "enable_thinking": _KWARGS,
    "thinking": _KWARGS,
    "reasoning": Refused("use reasoning_effort"),
    "task": Refused("put what the model should do into a message"),
    "mm_processor_kwargs": _TEXT_ONLY,
    "media_io_kwargs": _TEXT_ONLY,
    "images_config": _TEXT_ONLY,
    "max_dynamic_patch": _TEXT_ONLY,
    "min_dynamic_patch": _TEXT_ONLY,
    "use_audio_in_video": _TEXT_ONLY,
}

COMPLETIONS: Mapping[str, Refused] = {
    **_GENERATION,
    "max_completion_tokens": Refused("use max_tokens", ()),
    "top_logprobs": Refused("use logprobs, which is a number here", (0,)),
}
CHAT: Mapping[str, Refused] = {
    **_GENERATION,
    **_CONVERSATION,
    "tool_choice": Refused(_TOOLS, ("none", "auto")),
    "function_call": Refused(_TOOLS, ("none", "auto")),
    "include_reasoning": Refused("reasoning is not told apart from the answer", (True,)),
    "verbosity": Refused("ask for a short or a long answer in a message", ("medium",)),
    "modalities": Refused(_TEXT_ONLY.why, ([], ["text"])),
    "audio": _TEXT_ONLY,
    "web_search_options": Refused("nothing is looked up in the web", ()),
    "moderation": Refused("nothing is moderated", ()),
}
TOKENIZE: Mapping[str, Refused] = {
    **_CONVERSATION,
    "truncate_prompt_tokens": Refused("all tokens are told", ()),
}

UNUSED: Mapping[str, str] = {
    "user": "who asks",
    "safety_identifier": "who asks",
    "metadata": "the client's own notes",
    "store": "nothing is kept",
    "service_tier": "there is one",
    "request_id": "send X-Request-Id",
    "rid": "send X-Request-Id",
    "session_id": "which conversation it is",
    "extra_key": "the client's own notes",
    "custom_labels": "labels of metrics",
    "prediction": "speed only",
    "ngram_corpus_id": "speed only",
    "prompt_cache_key": "speed only",
    "prompt_cache_options": "speed only",
    "prompt_cache_retention": "speed only",
    "stream_interval": "how a stream is cut into events",
    "data_parallel_rank": "where it runs",
    "routed_dp_rank": "where it runs",
    "disagg_prefill_dp_rank": "where it runs",
    "bootstrap_host": "where it runs",
    "bootstrap_port": "where it runs",
    "bootstrap_room": "where it runs",
    "parallel_tool_calls": "there are no tool calls",
    "separate_reasoning": "reasoning is not told apart from the answer",
    "stream_reasoning": "reasoning is not told apart from the answer",
    "return_token_offsets": "only of other end points",
    "return_mm_kwargs": "only of other end points",
}
"""Known fields that change no answer, and what they are about."""

_named: set[str] = set()


def check_fields(data: Mapping[Any, Any], known: Collection[str], refused: Mapping[str, Refused], place: str) -> None:
    """Look at the fields of an object that its model does not have.

    Args:
        data: the object, from JSON.
        known: fields that the model has.
        refused: those that would change the answer.
        place: of the object in the body, for the log: empty, or a field's name with a dot behind it.

    Raises:
        PydanticCustomError: a field asks for what is not done.
    """
    for name, value in data.items():
        if name in known:
            continue
        rule = refused.get(name)
        if rule is None or not rule.asks(value):
            if rule is None:
                log_unused(f"{place}{name}")
            continue
        if rule.unless is None or not _same(data.get(rule.unless[0]), rule.unless[1]):
            about = {"param": name, "why": rule.why, "value": shown(value)}
            raise PydanticCustomError(UNSUPPORTED, "{param} is not supported: {why}; it is {value}", about)
        log_unused(f"{place}{name}")


def log_unused(name: str) -> None:
    """Log, once per process, that a field is not used."""
    name = name if len(name) <= MAX_NAME_CHARACTERS else name[:MAX_NAME_CHARACTERS] + "..."
    if name in _named or len(_named) >= MAX_NAMED:
        return
    _named.add(name)
    log_event(_logger, "field of a request is not used", level=logging.WARNING, field=name)
    if len(_named) == MAX_NAMED:
        log_event(_logger, "no more such fields are named", level=logging.WARNING, named=MAX_NAMED)


def describe_fields(schema: dict[str, Any], refused: Mapping[str, Refused]) -> None:
    """Say it in the JSON schema of a body, which is changed."""
    properties = schema["properties"]
    for name, rule in refused.items():
        enum = [None, *rule.neutral]
        said: dict[str, Any] = {"description": f"not supported: {rule.why}"}
        if rule.unless is None:
            said["enum"] = enum
        else:
            other, value = rule.unless
            off = {"required": [other], "properties": {other: {"const": value}}}
            schema.setdefault("allOf", []).append({"anyOf": [{"properties": {name: {"enum": enum}}}, off]})
        properties[name] = said
    for name, about in UNUSED.items():
        properties.setdefault(name, {"description": f"not used: {about}"})


def _same(value: Any, neutral: Any) -> bool:
    """Equality as JSON has it, where true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
