"""Request fields of OpenAI, vLLM and SGLang that are not supported: one table for all bodies.

A field that would change the answer is refused by name, unless its value is neutral. A field that would not change the
answer, and any unknown field, is ignored and logged once.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import PydanticCustomError

from serving.api.schema.errors import UNSUPPORTED
from serving.api.schema.lax_scalars import read_scalar
from serving.logs import log_event
from ubatch.errors import cut, shown

_logger = logging.getLogger(__name__)

MAX_NAMED = 256  # most different unknown fields that a process logs
MAX_NAME_CHARACTERS = 64
_NOT_SUPPORTED = "{param} is not supported: {why}; it is {value}"


@dataclass(frozen=True)
class Refused:
    """A field that would change the answer.

    Attributes:
        why: why it is refused, or what to do instead.
        neutral: values that do not change the answer, besides null.
        unless: (another field, its value): if the body has it, this field is ignored whatever its value.
        described: the field is listed in /openapi.json.
    """

    why: str
    neutral: tuple[Any, ...] = ()
    unless: tuple[str, Any] | None = None
    described: bool = True

    def asks(self, value: Any) -> bool:
        """Whether a JSON value is other than neutral."""
        if isinstance(value, dict):
            value = {name: item for name, item in value.items() if item is not None}
        return value is not None and not any(_same(_read_as(neutral, value), neutral) for neutral in self.neutral)


# Neutral values, by the kind of field.
_FLAG: tuple[Any, ...] = (False,)
_TEXT: tuple[Any, ...] = ("",)
_LIST: tuple[Any, ...] = ([],)
_OBJECT: tuple[Any, ...] = ({},)

_FORM = "use structured_outputs: {{'{}': ...}}"
_BEAMS = "there is no beam search; sample several outputs with n"
_PROCESSORS = "requests cannot contain code; use logit_bias"
_TEXT_ONLY = "only text is read and written"
_NOT_TOLD = "the server does not return this"
_ELSEWHERE = "keys and values are not taken from other servers"
_FUNCTIONS = "it is an older form; use tools and tool_choice, or set function_call to 'none'"
_CHAT_ONLY = "only a chat has it; use /v1/chat/completions"
_KWARGS = "pass it in chat_template_kwargs"

_OTHER_MEDIA = dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), Refused(_TEXT_ONLY, _OBJECT))
# Fields of OpenAI and vLLM, which are listed in /openapi.json; then SGLang's and older ones, which are not listed.
_GENERATION: Mapping[str, Refused] = {
    "use_beam_search": Refused(_BEAMS, _FLAG),
    "length_penalty": Refused(_BEAMS, (1.0,)),
    "vllm_xargs": Refused("there are no extensions that could read it", _OBJECT),
    "repetition_detection": Refused("repetitions do not end the output; use frequency_penalty, or max_tokens"),
    "watermarking": Refused("the output has no watermark", _FLAG),
    "logprob_token_ids": Refused("log-probabilities are of the most likely tokens, not of chosen ones", _LIST),
    "logprobs_mode": Refused(
        "log-probabilities are the model's own, before temperature and penalties", ("raw_logprobs",)
    ),
    "spaces_between_special_tokens": Refused("the tokenizer alone decides about spaces", (True,)),
    "suffix": Refused("the model only continues text", _TEXT),
    "prompt_embeds": Refused("send text or token ids as prompt", _LIST),
    "cache_salt": Refused("all requests share the prefix cache; serve with --no-enable-prefix-caching instead"),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), Refused(_ELSEWHERE, _OBJECT)),
    "thinking_token_budget": Refused("thinking has no limit of its own; use max_tokens", (-1,)),
    "routed_experts_prompt_start": Refused(_NOT_TOLD, (0,)),
    "return_prompt_text": Refused("/detokenize gives the text of token ids", _FLAG),
    **_OTHER_MEDIA,
}
_OTHER_GENERATION: Mapping[str, Refused] = {
    "guided_json": Refused(_FORM.format("json")),
    **dict.fromkeys(("guided_regex", "regex"), Refused(_FORM.format("regex"), _TEXT)),
    "guided_choice": Refused(_FORM.format("choice"), _LIST),
    **dict.fromkeys(("guided_grammar", "ebnf"), Refused(_FORM.format("grammar"), _TEXT)),
    "guided_json_object": Refused(_FORM.format("json_object"), _FLAG),
    "guided_whitespace_pattern": Refused(_FORM.format("whitespace_pattern"), _TEXT),
    "guided_decoding_backend": Refused("llguidance alone enforces output formats", _TEXT),
    "json_schema": Refused(_FORM.format("json"), _TEXT),
    "structural_tag": Refused(_FORM.format("structural_tag"), _TEXT),
    "custom_logit_processor": Refused(_PROCESSORS, _TEXT),
    "custom_params": Refused(_PROCESSORS, _OBJECT),
    "logits_processors": Refused(_PROCESSORS, _LIST),
    "stop_regex": Refused("only plain strings end the output; use stop", _LIST),
    "no_stop_trim": Refused("use include_stop_str_in_output", _FLAG),
    "min_new_tokens": Refused("use min_tokens", (0,)),
    "max_new_tokens": Refused("use max_tokens"),
    "early_stopping": Refused(_BEAMS, _FLAG),
    "input_embeds": Refused("send text or token ids as prompt", _LIST),
    "input_ids": Refused("send token ids as prompt, to /v1/completions", _LIST),
    "lora_path": Refused("there are no LoRA adapters; model names what is served", _TEXT),
    "session_params": Refused("there are no sessions; send the whole prompt", _OBJECT),
    **dict.fromkeys(("return_hidden_states", "return_routed_experts", "return_meta_info"), Refused(_NOT_TOLD, _FLAG)),
    "routed_experts_start_len": Refused(_NOT_TOLD, (0,)),
    "return_cached_tokens_details": Refused("usage.prompt_tokens_details has the number of cached tokens", _FLAG),
    "return_prompt_token_ids": Refused("use return_token_ids", _FLAG),
    "images_config": Refused(_TEXT_ONLY, _OBJECT),
    **dict.fromkeys(("max_dynamic_patch", "min_dynamic_patch"), Refused(_TEXT_ONLY)),
    "use_audio_in_video": Refused(_TEXT_ONLY, _FLAG),
}
_CONVERSATION: Mapping[str, Refused] = {
    "chat_template": Refused(
        "requests cannot contain a template; serve a checkpoint that has it, or use chat_template_kwargs", _TEXT
    ),
    "documents": Refused("put the documents into a message", _LIST),
    "functions": Refused(_FUNCTIONS, _LIST, unless=("function_call", "none")),
}
_OTHER_CONVERSATION: Mapping[str, Refused] = {
    **dict.fromkeys(("enable_thinking", "thinking"), Refused(_KWARGS)),
    "reasoning": Refused("use reasoning_effort", _OBJECT),
    "task": Refused("put what the model should do into a message", _TEXT),
}

_CALLS: Mapping[str, Refused] = {"function_call": Refused(_FUNCTIONS, ("none", "auto"))}
_OF_CHATS = {**_CONVERSATION, **_OTHER_CONVERSATION, **_CALLS}
_NO_CHAT: Mapping[str, Refused] = {
    "messages": Refused("use /v1/chat/completions, which answers conversations", _LIST, described=False),
    **{name: replace(rule, why=_CHAT_ONLY, described=False) for name, rule in _OF_CHATS.items() if name != "task"},
    "chat_template_kwargs": Refused(_CHAT_ONLY, _OBJECT, described=False),
    "tools": Refused(_CHAT_ONLY, _LIST, unless=("tool_choice", "none"), described=False),
    "tool_choice": Refused(_CHAT_ONLY, ("none", "auto"), described=False),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), Refused(_CHAT_ONLY, _FLAG, described=False)),
    "reasoning_effort": Refused(_CHAT_ONLY, described=False),
}

COMPLETIONS: Mapping[str, Refused] = {
    **_NO_CHAT,
    **_GENERATION,
    **_OTHER_GENERATION,
    "max_completion_tokens": Refused("use max_tokens"),
    "top_logprobs": Refused("use logprobs, which is a number here", (0,)),
}
CHAT: Mapping[str, Refused] = {
    **_GENERATION,
    **_OTHER_GENERATION,
    **_CONVERSATION,
    **_OTHER_CONVERSATION,
    **_CALLS,
    "stream_reasoning": Refused("a stream has reasoning as it comes", (True,), described=False),
    "verbosity": Refused("ask for a short or a long answer in a message", ("medium",)),
    "modalities": Refused(_TEXT_ONLY, ([], ["text"])),
    "audio": Refused(_TEXT_ONLY),
    "web_search_options": Refused("there is no web search"),
    "moderation": Refused("nothing is moderated"),
    "prompt": Refused("send it as a message, or use /v1/completions", ("", []), described=False),
}
TOKENIZE: Mapping[str, Refused] = {
    **_CONVERSATION,
    **_OTHER_CONVERSATION,
    **_OTHER_MEDIA,
    "truncate_prompt_tokens": Refused("all tokens are returned"),
}

UNUSED: Mapping[str, str] = {
    **dict.fromkeys(("user", "safety_identifier"), "identifies the user"),
    **dict.fromkeys(("metadata", "extra_key"), "the client's own notes"),
    "store": "nothing is stored",
    "service_tier": "there is only one tier",
    **dict.fromkeys(("request_id", "rid"), "send X-Request-Id"),
    "session_id": "which conversation it is",
    "custom_labels": "labels of metrics",
    **dict.fromkeys(("prediction", "ngram_corpus_id"), "speed only"),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), "speed only"),
    "stream_interval": "how a stream is cut into events",
    **dict.fromkeys(("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"), "where it runs"),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), "where it runs"),
    **dict.fromkeys(("return_token_offsets", "return_mm_kwargs"), "only for other end points"),
}
"""Known fields that change no answer, and their purpose or the reason why they are ignored."""

_named: set[str] = set()
_known_named: set[str] = set()  # bounded by the tables above


def check_fields(data: Mapping[Any, Any], known: Collection[str], refused: Mapping[str, Refused], place: str) -> None:
    """Check the fields of a JSON object that its model does not have: refuse or log them.

    Args:
        place: path of the object in the body, for the log: empty, or a field's name with a dot after it.

    Raises:
        PydanticCustomError: a field is not supported.
    """
    for name, value in data.items():
        rule = refused.get(name)
        if name in known or (rule is not None and not rule.asks(value)):
            continue
        if rule is not None and (rule.unless is None or not _same(data.get(rule.unless[0]), rule.unless[1])):
            about = {"param": name, "why": rule.why, "value": shown(value)}
            raise PydanticCustomError(UNSUPPORTED, _NOT_SUPPORTED, about)
        log_unused(f"{place}{name}")


def check_closed(data: Mapping[Any, Any], known: Collection[str], place: str) -> None:
    """Refuse fields of a JSON object that are not known, unless they are null: of these any may change the answer.

    Raises:
        PydanticCustomError: a field is not known.
    """
    for name, value in data.items():
        if name not in known and value is not None:
            why = f"the fields are {', '.join(sorted(known))}"
            about = {"param": f"{place}{cut(str(name), MAX_NAME_CHARACTERS)}", "why": why, "value": shown(value)}
            raise PydanticCustomError(UNSUPPORTED, _NOT_SUPPORTED, about)


def log_unused(name: str) -> None:
    """Log that a field is ignored, once per process."""
    name = name if len(name) <= MAX_NAME_CHARACTERS else name[:MAX_NAME_CHARACTERS] + "..."
    known = name in UNUSED or name in COMPLETIONS or name in CHAT
    before = _known_named if known else _named
    if name in before or (not known and len(before) >= MAX_NAMED):
        return
    before.add(name)
    log_event(_logger, "field of a request is not used", level=logging.WARNING, field=name)
    if not known and len(_named) == MAX_NAMED:
        log_event(_logger, "no more such fields are named", level=logging.WARNING, named=MAX_NAMED)


def describe_fields(schema: dict[str, Any], refused: Mapping[str, Refused]) -> None:
    """Add the common refused fields to a body's JSON schema, in place. Tools fail on schemas with too many fields."""
    properties = schema["properties"]
    for name, rule in refused.items():
        if not rule.described or name in _OTHER_GENERATION or name in _OTHER_CONVERSATION:
            continue
        enum = [None, *rule.neutral]
        said: dict[str, Any] = {"description": f"not supported: {rule.why}"}
        if rule.unless is None:
            said["enum"] = enum
        else:
            other, value = rule.unless
            off = {"required": [other], "properties": {other: {"const": value}}}
            schema.setdefault("allOf", []).append({"anyOf": [{"properties": {name: {"enum": enum}}}, off]})
        properties[name] = said


def _read_as(neutral: Any, value: Any) -> Any:
    """A string as the number or boolean that it says, if the neutral value is one."""
    return read_scalar(type(neutral), value) if isinstance(value, str) else value


def _same(value: Any, neutral: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
