"""Other people's clients that speak `/v1/responses`, as they come, against `ubatch serve`.

As in the tests of chats, the model is small: it calls the tool `weather` by itself, and what must have a form has it by
the grammar.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import agents
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from serve_processes import running
from weather import MOST, PARAMETERS, QUESTION, Agents, Forecast

# Some clients leave connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

NAME = "tiny-chat"  # openai-agents takes what stands before a slash for a provider


WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": PARAMETERS,
    "strict": True,
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Where a server listens, for all of these tests."""
    words = ("--port", "0", "--enable-auto-tool-choice", "--max-num-seqs", "8", "--served-model-name", NAME)
    with running("examples/models/tiny-chat", *words, "--kv-cache-memory", "64M") as server:
        yield f"{server.url}/v1"


class TestOpenAI:
    @pytest.fixture
    def client(self, url: str) -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
            yield made

    def test_a_tool_and_its_result(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": NAME, "tools": [WEATHER], "temperature": 0, "max_output_tokens": MOST}
        first = client.responses.create(input=QUESTION, **asked)
        (call,) = [item for item in first.output if item.type == "function_call"]
        assert json.loads(call.arguments) == {"city": "Paris"}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
        second = client.responses.create(
            input=[{"role": "user", "content": QUESTION}, *first.output, result],  # type: ignore[list-item]
            **asked,
        )
        assert second.output_text

    @pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "weather"}])
    def test_a_stream_of_calls(self, client: openai.OpenAI, choice: Any) -> None:
        with client.responses.stream(
            model=NAME,
            input=QUESTION,
            tools=[WEATHER],
            tool_choice=choice,
            temperature=0,
            parallel_tool_calls=False,
            max_output_tokens=MOST,
        ) as stream:
            done = [event for event in stream if event.type == "response.function_call_arguments.done"]
            (call,) = [item for item in stream.get_final_response().output if item.type == "function_call"]
        assert [event.arguments for event in done] == [call.arguments]
        assert {*json.loads(call.arguments)} == {"city"}

    def test_parse(self, client: openai.OpenAI) -> None:
        parsed = client.responses.parse(model=NAME, input=QUESTION, text_format=Forecast, max_output_tokens=MOST)
        assert isinstance(parsed.output_parsed, Forecast)
        with client.responses.stream(
            model=NAME, input=QUESTION, text_format=Forecast, max_output_tokens=MOST
        ) as stream:
            assert isinstance(stream.get_final_response().output_parsed, Forecast)


class TestAgents(Agents):
    """With its default model."""

    def model(self, client: openai.AsyncOpenAI) -> str:
        agents.set_default_openai_client(client, use_for_tracing=False)
        return NAME


@langchain_tool
def weather(city: str) -> str:
    """The weather of a city"""
    return f"sunny in {city}"


class TestLangChain:
    @pytest.fixture
    def chat(self, url: str) -> ChatOpenAI:
        return ChatOpenAI(
            base_url=url, api_key="none", model=NAME, max_tokens=MOST, temperature=0, use_responses_api=True
        )

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_with_structured_output(self, chat: ChatOpenAI, method: Any) -> None:
        assert isinstance(chat.with_structured_output(Forecast, method=method).invoke(QUESTION), Forecast)

    def test_bind_tools(self, chat: ChatOpenAI) -> None:
        bound = chat.bind_tools([weather])
        first = bound.invoke(QUESTION)
        (call,) = first.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
        result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
        assert bound.invoke([HumanMessage(QUESTION), first, result]).content

    def test_streamed(self, chat: ChatOpenAI) -> None:
        whole: Any = None
        for chunk in chat.bind_tools([weather]).stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        (call,) = whole.tool_calls
        assert call["args"] == {"city": "Paris"}


class TestPydanticAI:
    @pytest.fixture
    def model(self, url: str) -> OpenAIResponsesModel:
        return OpenAIResponsesModel(NAME, provider=OpenAIProvider(base_url=url, api_key="none"))

    @pytest.mark.parametrize("kind", [ToolOutput, NativeOutput])
    def test_an_output_type(self, model: OpenAIResponsesModel, kind: Any) -> None:
        agent = Agent(model, output_type=kind(Forecast), model_settings={"max_tokens": MOST})
        assert isinstance(asyncio.run(agent.run(QUESTION)).output, Forecast)

    def test_a_tool(self, model: OpenAIResponsesModel) -> None:
        called: list[str] = []
        agent = Agent(model, model_settings={"max_tokens": MOST, "temperature": 0.0})

        @agent.tool_plain
        def weather(city: str) -> str:
            """The weather of a city"""
            called.append(city)
            return "sunny, 21 degrees"

        assert asyncio.run(agent.run(QUESTION)).output
        assert called == ["Paris"]
