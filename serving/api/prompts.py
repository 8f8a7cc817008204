"""Turns a client's prompt (text, token ids or a conversation) into token ids."""

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Environment

from model_runner import RequestError
from serving.api.schema.errors import ApiError
from serving.api.schema.request_models import ChatMessage, ConversationOptions, GenerationRequest
from serving.api.schema.unsupported_fields import log_unused
from serving.api.service import Service
from serving.text.chat_template import ChatTemplate
from serving.text.tokenizer import Vocabulary

SHOWN_REASON = 1000  # characters shown of a template's error
COUNTED_CHARACTERS = 1_000_000  # a text up to this length is tokenized even if it may not fit: to cut or count it
REASONING = ("reasoning", "reasoning_content")
"""A message's reasoning: the name that vLLM has for it now, and the older one."""


def encode(service: Service, text: str, *, add_special_tokens: bool) -> list[int]:
    """A text's token ids."""
    return service.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def decode(service: Service, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The exact text of token ids: spaces before punctuation are kept (`clean_up_tokenization_spaces` is off)."""
    return service.tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def check_characters(service: Service, text: str, param: str, *, cut: bool) -> None:
    """Refuse a text before it is tokenized if it is longer than a context full of the vocabulary's longest token.

    Args:
        cut: it is tokenized to be cut or counted: up to `COUNTED_CHARACTERS` characters always pass.
    """
    context = service.engine.info.max_model_len
    limit = max(COUNTED_CHARACTERS if cut else 0, context * Vocabulary.of(service.tokenizer).longest)
    if len(text) > limit:
        message = f"This model's context is at most {context} tokens, and the prompt has {len(text)} characters. "
        raise ApiError(400, f"{message}Send at most {limit}.", param=param, code="context_length_exceeded")


def prompts_of(
    service: Service,
    prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    body: GenerationRequest,
    wanted: int,
) -> list[tuple[str | None, list[int]]]:
    """(text, token ids) of each prompt; the text is None if token ids were sent or the prompt was truncated.

    Args:
        wanted: tokens of the output that truncation to the context leaves room for.

    Raises:
        ApiError: 400, a token id that the model does not know, or a prompt of no tokens or too many characters.
    """
    prompts: list[tuple[str | None, list[int]]] = []
    for one in prompts_in(prompt):
        if isinstance(one, str):
            check_characters(service, one, "prompt", cut=body.truncate_prompt_tokens is not None)
            whole = encode(service, one, add_special_tokens=body.add_special_tokens is not False)
            cut = truncated(service, whole, body, wanted)
            prompts.append((one if cut is whole else None, cut))
        else:
            service.check_token_ids(one, "prompt")
            prompts.append((None, truncated(service, one, body, wanted)))
    if not all(ids for _, ids in prompts):
        raise ApiError(400, "A prompt has no tokens; nothing can be generated after it.", param="prompt")
    return prompts


def truncated(service: Service, token_ids: list[int], body: GenerationRequest, wanted: int) -> list[int]:
    """A prompt truncated to `truncate_prompt_tokens`; -1 leaves room for `wanted` tokens of output in the context."""
    most = body.truncate_prompt_tokens
    if most is None:
        return token_ids
    if most == -1:
        most = max(1, service.engine.info.max_model_len - max(1, wanted))
    if len(token_ids) <= most:
        return token_ids
    return token_ids[:most] if body.truncation_side == "right" else token_ids[-most:]


def prompts_in(prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> Sequence[Any]:
    """The prompts as a list; a single prompt becomes a list of one."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def check_length(service: Service, num_tokens: int, asked: Mapping[str, int | None], param: str) -> int:
    """Tokens of the context that are left for the output.

    Args:
        num_tokens: tokens of the prompt.
        asked: fields that limit the output, and their values; the largest counts.
        param: the field with the prompt.

    Raises:
        ApiError: 400, they do not fit; it names the field that takes more.
    """
    limit = service.engine.info.max_model_len
    left = limit - num_tokens
    problem = None
    most, name = max(((count, name) for name, count in asked.items() if count is not None), default=(0, ""))
    if most >= limit:
        problem = f"{most} of the output alone were asked for. Ask for at most {limit - 1}, whatever the prompt."
    elif left < 1:
        problem = f"the prompt has {num_tokens}, which leaves none for the output. Shorten the prompt."
    elif most > left:
        problem = f"{num_tokens} of the prompt and {most} of the output were asked for. Reduce either."
    if problem is not None:
        param = name if most > num_tokens or most >= limit else param
        message = f"This model's context is at most {limit} tokens, but {problem}"
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    return left


def check_conversation(options: ConversationOptions) -> None:
    """Refuse `continue_final_message` together with `add_generation_prompt`."""
    if options.continue_final_message and options.begins_turn:
        message = "continue_final_message and add_generation_prompt cannot both be true: the prompt has one end."
        raise ApiError(400, message, param="continue_final_message")


def chat_template(service: Service, *, tools: bool = False) -> ChatTemplate:
    """The checkpoint's chat template, for conversations with or without tools.

    Raises:
        ApiError: 400, there is none.
    """
    template = ChatTemplate.of(service.tokenizer, tools=tools)
    if template is None:
        message = "This model has no chat template; use /v1/completions, or add one to its tokenizer_config.json."
        raise ApiError(400, message, param="messages")
    return template


def conversation_text(service: Service, messages: Sequence[ChatMessage], options: ConversationOptions) -> str:
    """The conversation as text, by the checkpoint's chat template. Fields that the template does not use are logged.

    Raises:
        RequestError: the messages cannot be brought into the form that the template reads.
        ApiError: 400, there is no template, or it refuses the messages.
    """
    may_call = getattr(options, "tool_choice", None) != "none"
    shown = options.tools if may_call or not service.turns.exclude_tools_when_tool_choice_none else None
    tools = [each.model_dump(exclude_unset=True) for each in shown or ()]
    template = chat_template(service, tools=bool(tools))
    if tools and "tools" not in _names_in(template.source):
        if may_call:
            message = "This model's chat template shows no tools to the model; describe them in a message instead."
            raise ApiError(400, message, param="tools")
        log_unused("tools")
    given = options.chat_template_kwargs or {}
    if reserved := given and sorted(set(given) & _reserved(service)):
        message = f"chat_template_kwargs may only have what the template itself asks for, not {', '.join(reserved)}."
        raise ApiError(400, message, param="chat_template_kwargs")
    effort = options.reasoning_effort
    reasoning = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    continued = bool(options.continue_final_message)
    try:
        _log_unused(template, messages, options, set(reasoning))
        return template.write(
            template.normalised([_message(template, each) for each in messages], continued=continued),
            tools=tools or None,
            add_generation_prompt=options.begins_turn,
            continue_final_message=continued,
            **{**service.template_kwargs, **reasoning, **given},
        )
    except RequestError:
        raise
    except Exception as error:  # the template passed its check at the start: these messages or options are at fault
        reason = "they are nested too deeply" if isinstance(error, RecursionError) else str(error)[:SHOWN_REASON]
        raise ApiError(400, f"The chat template refuses the messages: {reason}", param="messages") from error


def _message(template: ChatTemplate, given: ChatMessage) -> dict[str, Any]:
    """A message as the template gets it: reasoning has each of the names that clients and templates have for it."""
    message = given.model_dump(exclude_unset=True)
    reasoning = next((message[name] for name in REASONING if message.get(name)), None)
    if reasoning is None:
        return message
    names = [*REASONING]
    if "thinking" in _names_in(template.source) and not message.get("content"):  # gpt-oss, which takes either
        names.append("thinking")
    return {**message, **dict.fromkeys(names, reasoning)}


def _reserved(service: Service) -> set[str]:
    """Names that a template has from the server, not from a request."""
    from transformers.utils.chat_template_utils import render_jinja_template  # transformers takes two seconds

    writers = (service.tokenizer.apply_chat_template, render_jinja_template)
    return {"messages", "self"}.union(*(inspect.signature(each).parameters for each in writers))


def _log_unused(
    template: ChatTemplate, messages: Sequence[ChatMessage], options: ConversationOptions, reasoning: set[str]
) -> None:
    used = _names_in(template.source)
    if reasoning and not reasoning & used:
        log_unused("reasoning_effort")
    for name in (options.chat_template_kwargs or {}).keys() - used:
        log_unused(f"chat_template_kwargs.{name}")
    if used & {*REASONING, "thinking"}:
        used = used | {*REASONING}
    for name in {name for message in messages for name in message.model_extra or ()} - used:
        log_unused(f"messages.{name}")


@lru_cache(maxsize=8)
def _names_in(template: str) -> frozenset[str]:
    """Names and quoted strings in a template's code, without its text. Lexed only: parsing needs every extension."""
    tokens = [(kind, text) for _, kind, text in Environment().lex(template)]
    keys = {text[1:-1] for kind, text in tokens if kind == "string"}
    return frozenset(keys | {text for kind, text in tokens if kind == "name"})
