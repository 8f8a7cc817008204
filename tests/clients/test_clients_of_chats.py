"""Other people's clients, as they come, against `ubatch serve`: tools and structured answers of chats.

The model is small: it calls the tool `weather` by itself, and what must have a form has it by the grammar. So values
are short ones.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import agents
import instructor
import openai
import pytest
from instructor.core.exceptions import InstructorError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from serve_processes import running
from weather import MOST, PARAMETERS, QUESTION, Agents, Forecast

NAME = "examples/models/tiny-chat"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": PARAMETERS,
        "strict": True,
    },
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Where a server listens, for all of these tests."""
    words = ("--port", "0", "--enable-auto-tool-choice", "--max-num-seqs", "8")
    with running(NAME, *words, "--kv-cache-memory", "64M") as server:
        yield f"{server.url}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def asked(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": MESSAGES, "max_tokens": MOST, "seed": 1, **more}


class TestOpenAI:
    def test_parse(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.parse(**asked(response_format=Forecast))
        assert isinstance(answer.choices[0].message.parsed, Forecast)

    def test_stream_of_a_form(self, client: openai.OpenAI) -> None:
        with client.chat.completions.stream(**asked(response_format=Forecast)) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        assert isinstance(final.choices[0].message.parsed, Forecast)
        assert "content.done" in kinds

    def test_a_tool_is_called_and_its_result_is_read(self, client: openai.OpenAI) -> None:
        first = client.chat.completions.create(**asked(tools=[WEATHER], temperature=0)).choices[0]
        assert first.finish_reason == "tool_calls"
        (call,) = first.message.tool_calls or []
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
        messages = [*MESSAGES, first.message, result]
        second = client.chat.completions.create(**asked(tools=[WEATHER], messages=messages, temperature=0)).choices[0]
        assert second.message.content

    def test_stream_of_calls(self, client: openai.OpenAI) -> None:
        for choice in ("auto", "required", {"type": "function", "function": {"name": "weather"}}):
            with client.chat.completions.stream(
                **asked(tools=[WEATHER], tool_choice=choice, temperature=0, parallel_tool_calls=False)
            ) as stream:
                events = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
                final = stream.get_final_completion().choices[0].message
            (call,) = final.tool_calls or []
            assert call.function.name == "weather"
            assert [event.arguments for event in events] == [call.function.arguments]
            assert json.loads(call.function.arguments) == call.function.parsed_arguments
            assert set(json.loads(call.function.arguments)) == {"city"}

    def test_parse_of_a_pydantic_tool(self, client: openai.OpenAI) -> None:
        tools = [openai.pydantic_function_tool(Forecast)]
        answer = client.chat.completions.parse(**asked(tools=tools, tool_choice="required", parallel_tool_calls=False))
        (call,) = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Forecast)


@langchain_tool
def weather(city: str) -> str:
    """The weather of a city"""
    return f"sunny in {city}"


class TestLangChain:
    @pytest.fixture
    def chat(self, url: str) -> ChatOpenAI:
        return ChatOpenAI(base_url=url, api_key="none", model=NAME, max_tokens=MOST, seed=1, temperature=0)

    @pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
    def test_with_structured_output(self, chat: ChatOpenAI, method: Any) -> None:
        made = chat.with_structured_output(Forecast, method=method, include_raw=True).invoke(QUESTION)
        if method == "json_mode":  # any JSON: the client says whether it is a forecast
            assert json.loads(made["raw"].content) is not None
        else:
            assert isinstance(made["parsed"], Forecast), made

    def test_bind_tools(self, chat: ChatOpenAI) -> None:
        bound = chat.bind_tools([weather])
        first = bound.invoke(QUESTION)
        (call,) = first.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
        result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
        assert bound.invoke([HumanMessage(QUESTION), first, result]).content

    @pytest.mark.parametrize("choice", ["any", "weather", "auto"])
    def test_streamed(self, chat: ChatOpenAI, choice: str) -> None:
        whole: Any = None
        for chunk in chat.bind_tools([weather], tool_choice=choice, strict=True).stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        assert {call["name"] for call in whole.tool_calls} == {"weather"}
        assert not whole.invalid_tool_calls


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA])
def test_instructor(client: openai.OpenAI, mode: Any) -> None:
    patched = instructor.from_openai(client, mode=mode)
    if mode is instructor.Mode.JSON:  # any JSON object; the client asks again, and then says that it is none
        with pytest.raises(InstructorError, match=r"validation error|max_tokens"):
            patched.chat.completions.create(response_model=Forecast, max_retries=1, **asked(max_tokens=60))
        return
    assert isinstance(patched.chat.completions.create(response_model=Forecast, max_retries=1, **asked()), Forecast)


class TestPydanticAI:
    @pytest.fixture
    def model(self, url: str) -> OpenAIChatModel:
        return OpenAIChatModel(NAME, provider=OpenAIProvider(base_url=url, api_key="none"))

    @pytest.mark.parametrize("kind", [ToolOutput, NativeOutput])
    def test_an_output_type(self, model: OpenAIChatModel, kind: Any) -> None:
        agent = Agent(model, output_type=kind(Forecast), model_settings={"max_tokens": MOST, "seed": 1})
        assert isinstance(agent.run_sync(QUESTION).output, Forecast)

    def test_a_tool(self, model: OpenAIChatModel) -> None:
        called: list[str] = []
        agent = Agent(model, model_settings={"max_tokens": MOST, "temperature": 0.0})

        @agent.tool_plain
        def weather(city: str) -> str:
            """The weather of a city"""
            called.append(city)
            return "sunny, 21 degrees"

        assert agent.run_sync(QUESTION).output
        assert called == ["Paris"]

    def test_streamed(self, model: OpenAIChatModel) -> None:
        async def run() -> Any:
            agent = Agent(model, output_type=Forecast, model_settings={"max_tokens": MOST, "seed": 1})
            async with agent.run_stream(QUESTION) as result:
                return await result.get_output()

        assert isinstance(asyncio.run(run()), Forecast)


class TestAgents(Agents):
    """With the model class for chats; the default one is another test's."""

    def model(self, client: openai.AsyncOpenAI) -> agents.Model:
        return agents.OpenAIChatCompletionsModel(NAME, client)
