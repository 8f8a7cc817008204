"""openai-agents with its default model, which speaks `/v1/responses`: tools, structured answers, reasoning, streams."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import agents
import openai
import pytest
from api_clients import MODEL, app_with, serving, tokenizer
from fake_engine import EOS, FakeEngine
from pydantic import BaseModel

from serving.requests import RequestInput
from serving.turns.parsers import TurnSettings

# Some clients leave connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
Result = TypeVar("Result")

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
THOUGHT = "<think>\nThe tool knows.\n</think>\n\n"
CALL = THOUGHT + '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


def said(request: RequestInput) -> list[int]:
    """A call, then what the tool returned; JSON where that is asked for."""
    prompt = tokenizer().decode(request.token_ids)
    text = CALL
    if request.params.grammar is not None:
        text = '{"city": "Bonn", "rains": true}'
    elif "<tool>" in prompt:
        text = f"It is {prompt.rpartition('<tool>')[2].partition('<')[0]}."
    return [*tokenizer().encode(text), EOS]


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(reply=said)


@pytest.fixture(scope="module")
def address(engine: FakeEngine) -> Iterator[str]:
    app = app_with(TEMPLATE, engine)
    app.state.service.turns = TurnSettings(True, "hermes", "qwen3")
    with serving(app) as address:
        yield address


class Weather(BaseModel):
    city: str
    rains: bool


def run(address: str, work: Callable[[Any], Awaitable[Result]], **more: Any) -> Result:
    """What becomes of `work` with an agent that has a tool, or an `output_type`."""

    def weather(city: str) -> str:
        """The weather of a city."""
        return f"rainy in {city}"

    async def with_client() -> Result:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            agents.set_default_openai_client(client, use_for_tracing=False)
            tools = [] if "output_type" in more else [agents.function_tool(weather)]
            return await work(
                agents.Agent(name="Guide", instructions="Ask the tool.", model=MODEL, tools=tools, **more)
            )

    return asyncio.run(with_client())


QUESTION = "What is the weather in Bonn?"


def prompts(engine: FakeEngine) -> list[str]:
    """What the model was asked since the last time."""
    texts = [tokenizer().decode(request.token_ids) for request in engine.requests]
    engine.requests.clear()
    return texts


def test_a_tool_is_called_and_its_result_is_read(engine: FakeEngine, address: str) -> None:
    result = run(address, lambda guide: agents.Runner.run(guide, QUESTION))
    assert result.final_output == "It is rainy in Bonn."
    first, second = prompts(engine)
    assert '"description": "The weather of a city."' in first
    assert f"<system>Ask the tool.<user>{QUESTION}<assistant>" in first
    assert '[weather {"city": "Bonn"}]<tool>rainy in Bonn<assistant>' in second
    assert "<think>" in second, "the second turn has the reasoning of the first"
    usage = result.context_wrapper.usage
    assert usage.output_tokens_details.reasoning_tokens > 0
    assert usage.requests == 2


def test_the_conversation_goes_on(engine: FakeEngine, address: str) -> None:
    """All items of a run are sent again with the next one."""

    async def twice(guide: Any) -> str:
        first = await agents.Runner.run(guide, QUESTION)
        second = await agents.Runner.run(guide, [*first.to_input_list(), {"role": "user", "content": "Sure?"}])
        return str(second.final_output)

    assert "rainy" in run(address, twice)
    assert "It is rainy in Bonn.<user>Sure?<assistant>" in prompts(engine)[-1]


async def streamed(guide: Any) -> tuple[str, list[str]]:
    """The last output, and the types of all events."""
    result = agents.Runner.run_streamed(guide, QUESTION)
    seen = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    return str(result.final_output), seen


def test_streamed(engine: FakeEngine, address: str) -> None:
    output, seen = run(address, streamed)
    assert output == "It is rainy in Bonn."
    assert seen.count("response.completed") == 2
    assert {"response.function_call_arguments.delta", "response.reasoning_text.delta"} <= {*seen}
    prompts(engine)


def test_a_structured_answer(engine: FakeEngine, address: str) -> None:
    result = run(address, lambda guide: agents.Runner.run(guide, QUESTION), output_type=Weather)
    assert result.final_output == Weather(city="Bonn", rains=True)
    assert engine.requests[0].params.grammar is not None
    prompts(engine)


def test_a_run_that_is_cut_says_so(address: str) -> None:
    with pytest.raises(agents.AgentsException, match=r"max_output_tokens"):
        run(address, streamed, model_settings=agents.ModelSettings(max_tokens=3))
