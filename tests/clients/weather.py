"""What the tests of clients ask: about the weather, by a tool or in a form."""

import asyncio
from typing import Any, Literal

import agents
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

QUESTION = "What is the weather in Paris?"
MOST = 300  # tokens
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


class Forecast(BaseModel):
    """A forecast of the weather."""

    model_config = ConfigDict(extra="forbid")

    sky: Literal["sunny", "cloudy", "rainy"]
    degrees: int = Field(ge=-40, le=60)
    windy: bool


class Agents:
    """The tests of openai-agents, for a model."""

    def model(self, client: openai.AsyncOpenAI) -> agents.Model | str:
        """The model, or the name of one that the default class makes."""
        raise NotImplementedError

    async def run(self, url: str, streamed: bool, **more: Any) -> Any:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            settings = agents.ModelSettings(temperature=0, max_tokens=MOST)
            agent = agents.Agent(name="Guide", model=self.model(client), model_settings=settings, **more)
            if not streamed:
                return (await agents.Runner.run(agent, QUESTION)).final_output
            result = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in result.stream_events():
                pass
            return result.final_output

    @pytest.mark.parametrize("streamed", [False, True])
    def test_a_tool(self, url: str, streamed: bool) -> None:
        called: list[str] = []

        def weather(city: str) -> str:
            """The weather of a city"""
            called.append(city)
            return "sunny, 21 degrees"

        assert asyncio.run(self.run(url, streamed, tools=[agents.function_tool(weather)]))
        assert called == ["Paris"]

    @pytest.mark.parametrize("streamed", [False, True])
    def test_an_output_type(self, url: str, streamed: bool) -> None:
        assert isinstance(asyncio.run(self.run(url, streamed, output_type=Forecast)), Forecast)
