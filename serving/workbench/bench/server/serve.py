"""`ubatch bench serve`: put a load on an OpenAI-compatible server, and measure latency and throughput for its clients.

Requests arrive at a rate (Poisson) or all at once, stream or not, and may be dropped midway. The server must have
`/v1/models` and `/v1/completions` or `/v1/chat/completions`; random prompts need `/tokenize`, as vLLM and ubatch have.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, PlainSerializer

from serving.progress import progress
from serving.workbench.bench.options import ReportOptions
from serving.workbench.bench.server.figures import figures_of
from serving.workbench.bench.server.load import Dataset, Load, make_tasks, served_model
from serving.workbench.bench.server.requests import Endpoint, Outcome, Server, send_all
from ubatch import ConfigError

__all__ = ["Options", "run"]


class Options(ReportOptions):
    """The server, the load, and the form of the requests."""

    model_config = ConfigDict(allow_inf_nan=True)
    unwritten: ClassVar[frozenset[str]] = frozenset({"api_key"})

    base_url: Annotated[str, Field(description="the server, with or without /v1")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, Field(description="served name; the first of /v1/models if not given")] = None
    endpoint: Annotated[Endpoint, Field(description="which API")] = Endpoint.COMPLETIONS
    api_key: Annotated[str | None, Field(description="sent as a bearer token")] = None
    num_prompts: Annotated[int, Field(ge=1, description="requests")] = 100
    request_rate: Annotated[
        float,
        PlainSerializer(str, when_used="json"),  # JSON knows no infinity
        Field(gt=0, description="requests per second, Poisson; inf sends all at once"),
    ] = float("inf")
    max_concurrency: Annotated[int | None, Field(ge=1, description="most requests at once")] = None
    dataset: Annotated[
        Dataset,
        Field(description="random: token ids known to /tokenize; words: English words"),
    ] = Dataset.RANDOM
    input_len: Annotated[int, Field(ge=1, description="mean tokens of a prompt")] = 128
    output_len: Annotated[int, Field(ge=1, description="mean tokens of an answer")] = 64
    range_ratio: Annotated[float, Field(ge=0, lt=1, description="lengths vary by this share, up and down")] = 0.0
    stream: Annotated[bool, Field(description="stream the answers")] = True
    ignore_eos: Annotated[bool, Field(description="generate all tokens, past an end token")] = False
    temperature: Annotated[float, Field(ge=0, description="0 is greedy")] = 0.0
    cancel_ratio: Annotated[float, Field(ge=0, le=1, description="share of the requests dropped midway")] = 0.0
    seed: Annotated[int, Field(description="of lengths, prompts, arrivals and drops")] = 0
    timeout_s: Annotated[float, Field(gt=0, description="a request fails after this time without a byte")] = 600.0


def run(options: Options) -> int:
    """Send the load, print and write; returns 1 if a request failed.

    Raises:
        ConfigError: options that contradict each other, or the server's model.
        RequestFailed: the server cannot be reached.
    """
    if options.cancel_ratio and not options.stream:
        raise ConfigError("--cancel-ratio drops streams midway; it needs --stream.")
    model, outcomes = asyncio.run(_measure(options))
    figures = figures_of(outcomes)
    how = "streamed" if options.stream else "not streamed"
    print(f"{options.num_prompts} requests to {model} ({options.endpoint}, {how})")
    figures.print()
    requests = [{key: value for key, value in asdict(each).items() if key != "text"} for each in outcomes]
    options.write({"figures": figures, "requests": requests})
    return 1 if figures.failed else 0


async def _measure(options: Options) -> tuple[str, list[Outcome]]:
    url = options.base_url.rstrip("/").removesuffix("/v1")
    asked = Server(url, "", options.endpoint, options.stream, options.api_key, options.timeout_s)
    model = await served_model(asked, options.model)
    load = Load(
        num_prompts=options.num_prompts,
        request_rate=options.request_rate,
        input_len=options.input_len,
        output_len=options.output_len,
        range_ratio=options.range_ratio,
        cancel_ratio=options.cancel_ratio,
        dataset=options.dataset,
        seed=options.seed,
        fields={"temperature": options.temperature} | ({"ignore_eos": True} if options.ignore_eos else {}),
    )
    if model.max_model_len is not None and load.longest > model.max_model_len:
        raise ConfigError(
            f"requests have up to {load.longest} tokens (--input-len, --output-len, --range-ratio), but {model.name} "
            f"takes {model.max_model_len}."
        )
    server = Server(url, model.name, options.endpoint, options.stream, options.api_key, options.timeout_s)
    tasks = await make_tasks(server, load)
    with progress(total=len(tasks), unit="request") as bar:
        outcomes = await send_all(
            server, tasks, max_concurrency=options.max_concurrency, on_done=lambda _: bar.update()
        )
    return model.name, outcomes
