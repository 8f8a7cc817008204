"""Messages are written as the checkpoint's template reads them, whatever form clients send."""

import json
from typing import Any

import pytest
from chat_templates import NO_SYSTEM, TEMPLATES, TOOLS
from jinja2.exceptions import TemplateError
from repository import TINY_MOE

from model_runner import RequestError
from serving.text.chat_template import TRIED, ChatTemplate
from serving.text.tokenizer import check_chat_template, load_tokenizer
from ubatch import ConfigError

ARGUMENTS = {"city": "São Paulo", "days": 2}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": TEXT}}
USER = {"role": "user", "content": "How warm is it?"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "weather", "content": "22 degrees"}
MARKS = ("None", "'type'", '"type": "text"', '\\"', "'city'")
"""What comes out of a form that the template does not read."""


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, None, {"bos_token": "<s>", "eos_token": "</s>"})


def written(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    template = template_of(source)
    return template.write(template.normalised(messages, continued=False), **options)


def told(text: str, *words: str) -> bool:
    """Whether the words come out in this order, once each, and no mark of a wrong form."""
    places = [text.find(word) for word in words]
    once = all(text.count(word) == 1 for word in words)
    return once and -1 not in places and places == sorted(places) and not any(mark in text for mark in MARKS)


def test_there_are_enough_forms() -> None:
    assert len(TEMPLATES) >= 30


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_users_words_come_out(name: str) -> None:
    source = TEMPLATES[name]
    assert told(written(source, [USER]), "How warm is it?")
    assert told(written(source, [{"role": "user", "content": parts("How warm", "is it?")}]), "How warm", "is it?")
    assert written(source, [{"role": "user", "content": parts("How warm is it?")}]) == written(source, [USER])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_comes_out(name: str) -> None:
    answer = {"role": "assistant", "content": parts("22", "degrees"), "tool_calls": [], "refusal": None, "audio": None}
    text = written(TEMPLATES[name], [USER, answer, {"role": "user", "content": parts("And tomorrow?")}])
    assert told(text, "How warm is it?", "22", "degrees", "And tomorrow?")


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_instructions_come_out_or_are_refused(name: str, role: str) -> None:
    for content in ("Be short.", parts("Be short.")):
        messages = [{"role": role, "content": content}, USER]
        if name in NO_SYSTEM:
            with pytest.raises((RequestError, TemplateError)):
                written(TEMPLATES[name], messages)
        else:
            assert told(written(TEMPLATES[name], messages), "Be short.", "How warm is it?")


LATER = [
    [{"role": "system", "content": "Be short."}, {"role": "developer", "content": "Be kind."}, USER],
    [{"role": "system", "content": "Be short."}, {"role": "system", "content": parts("Be kind.")}, USER],
    [USER, {"role": "assistant", "content": "Be short."}, {"role": "system", "content": "Be kind."}, USER],
]


@pytest.mark.parametrize("messages", LATER)
@pytest.mark.parametrize("name", TEMPLATES)
def test_later_instructions_come_out_or_are_refused(name: str, messages: list[dict[str, Any]]) -> None:
    """Some templates read only the first message's, some only the last."""
    try:
        text = written(TEMPLATES[name], messages)
    except (RequestError, TemplateError):
        return
    assert "Be short." in text
    assert "Be kind." in text


def test_later_instructions_that_are_left_out() -> None:
    for name in ("first system prompt", "last system prompt"):
        with pytest.raises(RequestError, match=r"'developer' behind other messages.*the first message") as raised:
            written(TEMPLATES[name], LATER[0])
        assert raised.value.param == "messages.1.role"


@pytest.mark.parametrize("name", TOOLS)
def test_a_text_beside_tool_calls_comes_out(name: str) -> None:
    """Some templates write the calls only without a text, some no text beside calls."""
    for content in ("Let me see.", parts("Let me see.")):
        text = written(TEMPLATES[name], [USER, {**CALLING, "content": content}, RESULT])
        assert told(text, "How warm is it?", "Let me see.", "weather", "22 degrees")


@pytest.mark.parametrize("content", [None, "", "absent"])
@pytest.mark.parametrize("name", TOOLS)
def test_tool_calls_come_out(name: str, content: str | None) -> None:
    calling = {key: value for key, value in {**CALLING, "content": content}.items() if value != "absent"}
    text = written(TEMPLATES[name], [USER, calling, RESULT])
    assert told(text, "How warm is it?", "weather", "22 degrees")
    assert text.count("city") == text.count("São Paulo") == 1


@pytest.mark.parametrize("name", TOOLS)
def test_arguments_are_alike_as_an_object(name: str) -> None:
    """Some clients send the object itself."""
    call = {**CALL, "function": {"name": "weather", "arguments": ARGUMENTS}}
    calling = {**CALLING, "tool_calls": [call]}
    assert written(TEMPLATES[name], [USER, calling, RESULT]) == written(TEMPLATES[name], [USER, CALLING, RESULT])


@pytest.mark.parametrize("arguments", ["", None, "{}", {}, "absent"])
@pytest.mark.parametrize("name", TOOLS)
def test_no_arguments_are_an_empty_object(name: str, arguments: Any) -> None:
    function = {"name": "weather"} if arguments == "absent" else {"name": "weather", "arguments": arguments}
    text = written(TEMPLATES[name], [USER, {**CALLING, "tool_calls": [{**CALL, "function": function}]}, RESULT])
    assert told(text, "weather", "22 degrees")


@pytest.mark.parametrize("arguments", ['{"city": ', "[1]", "5", [1], "[" * 100_000])
@pytest.mark.parametrize("name", ["qwen 2.5", "qwen 3 coder", "qwen 3", "deepseek v3"])
def test_arguments_that_are_no_object(name: str, arguments: Any) -> None:
    """A model may write them. Where the template writes text as it is, they stay; else they are refused by place."""
    calling = {**CALLING, "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": arguments}}]}
    if isinstance(arguments, str) and name in ("qwen 3", "deepseek v3"):
        assert arguments in written(TEMPLATES[name], [USER, calling, RESULT])
    elif name != "deepseek v3":
        with pytest.raises(RequestError, match="must be a JSON object") as raised:
            written(TEMPLATES[name], [USER, calling, RESULT])
        assert raised.value.param == "messages.1.tool_calls.0.function.arguments"


@pytest.mark.parametrize("role", ["tool", "user", "assistant", "system"])
@pytest.mark.parametrize("name", TOOLS)
def test_a_message_without_content_is_an_empty_one(name: str, role: str) -> None:
    """A tool may return nothing. Before, templates were asked for the content of a message that had none."""
    around = {"tool": [USER, CALLING], "assistant": [USER]}.get(role, [])
    empty = {**(RESULT if role == "tool" else {}), "role": role, "content": ""}
    null, absent = {**empty, "content": None}, {key: value for key, value in empty.items() if key != "content"}
    after = [] if role == "user" else [USER]
    texts = {written(TEMPLATES[name], [*around, message, *after]) for message in (empty, null, absent)}
    assert len(texts) == 1


def test_calls_that_are_none_stay_as_they_are() -> None:
    """The template says what it thinks of them."""
    for calls in ("x", [5], [{"function": "f"}], [{}]):
        message = {"role": "assistant", "content": "a", "tool_calls": calls}
        [same] = template_of("{{ messages }}").normalised([message], continued=False)
        assert same["tool_calls"] == calls


@pytest.mark.parametrize(
    ("name", "separator", "sent"),
    [
        ("chatml", None, "one\ntwo"),
        ("qwen 2 vl", "", parts("one", "two")),
        ("idefics, parts by line", "\n", parts("one", "two")),
        ("first part alone", None, parts("one\ntwo")),
        ("first part, or a string", None, "one\ntwo"),
    ],
)
def test_parts_are_sent_as_they_are_or_joined(name: str, separator: str | None, sent: Any) -> None:
    template = template_of(TEMPLATES[name])
    form = template.content_form("user")
    assert (form.separator, form.content(parts("one", "two"))) == (separator, sent)
    text = template.write(template.normalised([{"role": "user", "content": parts("one", "two")}], continued=False))
    assert form.text(parts("one", "two")) in text


def test_a_role_of_its_own_is_read_like_the_users() -> None:
    assert told(written(TEMPLATES["glm 4"], [USER, {"role": "observation", "content": parts("22")}]), "warm", "22")
    observed = written(TEMPLATES["llava, parts alone"], [USER, {"role": "observation", "content": "22"}])
    assert told(observed, "OBSERVATION: 22")


def test_made_up_roles_are_not_kept() -> None:
    """Clients could fill the memory with them."""
    template = template_of(TEMPLATES["glm 4"])
    for number in range(50):
        role = {"role": f"role-{number}"}
        template.normalised(
            [{**role, "content": "a"}, {**role, "content": None, "tool_calls": [CALL]}, role], continued=False
        )
    assert {role for role, _ in template.forms._later} <= TRIED
    assert set(template.forms._content) <= TRIED


def test_a_message_to_be_continued_has_a_content() -> None:
    template = template_of(TEMPLATES["chatml"])
    messages = template.normalised([USER, {"role": "assistant", "content": None}], continued=True)
    assert template.write(messages, continue_final_message=True).endswith("<|im_start|>assistant\n")


def test_what_a_template_leaves_out_is_refused() -> None:
    with pytest.raises(RequestError, match=r"leaves out messages of the role 'tool'.*message of the user") as raised:
        written(TEMPLATES["phi 3"], [USER, RESULT])
    assert raised.value.param == "messages.1.role"


# -- the check at the start ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY_MOE)


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_server_is_stopped(tokenizer: Any, name: str) -> None:
    tokenizer.chat_template = TEMPLATES[name]
    template = check_chat_template(tokenizer, TINY_MOE)
    assert template is not None
    assert set(template.forms._content) == TRIED  # no request waits for a trial


@pytest.mark.parametrize(
    "source",
    [
        "You are a model.",
        "{% for m in messages %}{% if m.role == 'human' %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% for p in m.content %}{{ p.words }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.text }}{% endfor %}",
    ],
)
def test_a_template_without_the_users_words_stops_the_server(tokenizer: Any, source: str) -> None:
    tokenizer.chat_template = source
    with pytest.raises(ConfigError, match=r"leaves out what a user says.*Correct it, or remove it"):
        check_chat_template(tokenizer, TINY_MOE)


def test_a_template_may_ask_for_a_system_prompt(tokenizer: Any) -> None:
    first = "{% if messages[0].role != 'system' %}{{ raise_exception('no system prompt') }}{% endif %}"
    tokenizer.chat_template = first + TEMPLATES["llava, parts alone"]
    assert check_chat_template(tokenizer, TINY_MOE) is not None
    assert not ChatTemplate.of(tokenizer).content_form("user").strings  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("named", "name"),
    [
        ({"default": "A{{ messages[0].content }}", "tool_use": "B"}, "default"),
        ({"tool_use": "A{{ messages[0].content }}", "rag": "B"}, "tool_use"),
        ({"rag": "A{{ messages[0].content }}"}, "rag"),
    ],
)
def test_named_templates(tokenizer: Any, named: dict[str, str], name: str) -> None:
    """`default`, or the first where there is none; before, a set without a default stopped the server."""
    tokenizer.chat_template = named
    template = check_chat_template(tokenizer, TINY_MOE)
    assert template is not None
    assert (template.name, template.write([USER])) == (name, "AHow warm is it?")


@pytest.mark.parametrize("nothing", [None, "", {}])
def test_no_template(tokenizer: Any, nothing: Any) -> None:
    tokenizer.chat_template = nothing
    assert check_chat_template(tokenizer, TINY_MOE) is None
