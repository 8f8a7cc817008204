"""`ubatch bench serve`: put a load on an OpenAI-compatible server, and measure latency and throughput for its clients.

Requests arrive at a rate (Poisson) or all at once, stream or not, and may be dropped midway. The server must have
`/v1/models` and `/v1/completions` or `/v1/chat/completions`; random prompts need `/tokenize`, as vLLM and ubatch have.
"""

import asyncio
from dataclasses import asdict, replace
from typing import Annotated, ClassVar

from pydantic import Field

from serving.arguments.fields import Flag
from serving.options.flags.fields import ApiKey
from serving.progress import progress
from serving.workbench.bench.options import SERVER, ReportOptions
from serving.workbench.bench.server.load import Load, OrInfinite, figures_of, make_tasks, served_model
from serving.workbench.bench.server.requests import Endpoint, Outcome, Server, send_all
from ubatch import ConfigError


class Options(Load, ReportOptions):
    """The server, the load, and the form of the requests."""

    unwritten: ClassVar[frozenset[str]] = frozenset({"api_key"})
    measures = SERVER

    url: Annotated[str, Flag(alias="--base-url")] = Field(
        "http://127.0.0.1:8000", description="the server, with or without /v1"
    )
    model: str | None = Field(None, description="served name; the first of /v1/models if not given")
    endpoint: Endpoint = Field(Endpoint.COMPLETIONS, description="which API")
    api_key: Annotated[ApiKey, Flag(secret=True)] = Field(None, description="sent as a bearer token")
    max_concurrency: int | None = Field(None, ge=1, description="most requests at once")
    stream: bool = Field(True, description="stream the answers")
    ignore_eos: bool = Field(False, description="generate all tokens, past an end token")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    timeout_s: OrInfinite = Field(
        600.0, description="a request fails after this time without a byte; inf waits for ever"
    )


def run(options: Options) -> int:
    """Send the load, print and write; returns 1 if a request failed."""
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
    url = options.url.rstrip("/").removesuffix("/v1")
    asked = Server(url, "", options.endpoint, options.stream, options.api_key, options.timeout_s)
    model = await served_model(asked, options.model)
    if model.max_model_len is not None and options.longest > model.max_model_len:
        raise ConfigError(
            f"requests have up to {options.longest} tokens (--input-len, --output-len, --range-ratio), but "
            f"{model.name} takes {model.max_model_len}."
        )
    server = replace(asked, model=model.name)
    fields = {"temperature": options.temperature} | ({"ignore_eos": True} if options.ignore_eos else {})
    tasks = await make_tasks(server, options, **fields)
    with progress(total=len(tasks), unit="request") as bar:
        outcomes = await send_all(
            server, tasks, max_concurrency=options.max_concurrency, on_done=lambda _: bar.update()
        )
    return model.name, outcomes
