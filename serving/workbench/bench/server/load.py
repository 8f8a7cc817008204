"""The load generator's requests: lengths, prompts, arrival times, and which are dropped midway; and a load's figures:
throughput, and percentiles of the latencies."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from pydantic import Field, PlainSerializer

from serving.arguments.fields import Group
from serving.workbench.bench.server.requests import Endpoint, Outcome, RequestFailed, Server, Status, Task, ask_json
from serving.workbench.bench.statistics import table
from ubatch import ConfigError
from ubatch.errors import cut

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason"
)


class Dataset(StrEnum):
    RANDOM = "random"
    """tokens that the server's `/tokenize` knows, in random order: prompts have exactly the length asked for"""
    WORDS = "words"
    """random English words, about one token each: for servers without `/tokenize`"""


def _for_json(value: float) -> float | str:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else str(value)


# Each field says so itself: of the configs of several bases pydantic keeps the last.
OrInfinite = Annotated[float, PlainSerializer(_for_json, when_used="json"), Field(gt=0, allow_inf_nan=True)]
"""A positive number, or inf."""


class Load(Group):
    """The number, sizes and arrival times of requests."""

    num_prompts: int = Field(default=100, ge=1, description="requests")
    request_rate: OrInfinite = Field(
        default=math.inf, description="requests per second, Poisson; inf sends all at once"
    )
    dataset: Dataset = Field(
        default=Dataset.RANDOM, description="random: token ids known to /tokenize; words: English words"
    )
    input_len: int = Field(default=128, ge=1, description="mean tokens of a prompt")
    output_len: int = Field(default=64, ge=1, description="mean tokens of an answer")
    range_ratio: float = Field(default=0.0, ge=0, lt=1, description="lengths vary by this share, up and down")
    cancel_ratio: float = Field(default=0.0, ge=0, le=1, description="share of the requests dropped midway")
    seed: int = Field(default=0, description="of lengths, prompts, arrivals and drops")

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and answer."""
        return self._range(self.input_len)[1] + self._range(self.output_len)[1]

    def lengths(self, rng: random.Random) -> tuple[int, int]:
        """Draw the tokens of a prompt and of its answer."""
        return rng.randint(*self._range(self.input_len)), rng.randint(*self._range(self.output_len))

    def _range(self, mean: int) -> tuple[int, int]:
        spread = int(mean * self.range_ratio)
        return max(1, mean - spread), mean + spread


@dataclass(frozen=True)
class ServedModel:
    """A model of `/v1/models`: its name, and the most tokens of a request if the server gives that number."""

    name: str
    max_model_len: int | None


async def served_model(server: Server, name: str | None) -> ServedModel:
    """The model called `name`, or the first one.

    Raises:
        ConfigError: the server does not have that model.
    """
    listing = await _ask(server, "GET", "/v1/models")
    models = {str(each["id"]): each.get("max_model_len") for each in listing["data"]}
    chosen = name if name is not None else next(iter(models), None)
    if chosen not in models or chosen is None:
        raise ConfigError(f"{server.base_url} does not serve {name!r}, but {', '.join(models) or 'nothing'}.")
    return ServedModel(chosen, models[chosen])


async def token_pool(server: Server) -> list[int]:
    """Token ids that are plain text for the served model, by its `/tokenize`."""
    body = {"model": server.model, "prompt": _TEXT, "add_special_tokens": False}
    try:
        answer = await _ask(server, "POST", "/tokenize", body)
    except RequestFailed as error:
        raise RequestFailed(f"{error} Random token prompts need it; use --dataset words.") from error
    return sorted(set(answer["tokens"]))


async def read_steps(server: Server, mode: str | None = None) -> Counter[str]:
    """Steps so far over all ranks, of one mode or of all, by outcome: from the server's `/metrics`."""
    steps: Counter[str] = Counter()
    for sample in await read_metrics(server):
        if sample.name == "ubatch:steps_total" and sample.labels["mode"] == (mode or sample.labels["mode"]):
            steps[sample.labels["outcome"]] += int(sample.value)
    return steps


async def read_metrics(server: Server) -> list[Sample]:
    """All samples of the server's `/metrics`."""
    async with server.client() as client:
        text = (await client.get("/metrics")).raise_for_status().text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


async def _detokenize(server: Server, tokens: Sequence[int]) -> str:
    answer = await _ask(server, "POST", "/detokenize", {"model": server.model, "tokens": list(tokens)})
    return str(answer["prompt"])


async def _ask(server: Server, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    async with server.client() as client:
        try:
            return await ask_json(client, method, path, body)
        except httpx.HTTPError as error:
            raise RequestFailed(f"cannot reach {cut(server.base_url)}: {type(error).__name__} {error}") from error


async def make_tasks(server: Server, load: Load, **fields: Any) -> list[Task]:
    """Draw the requests, with more `fields` in their bodies. The same load and tokenizer give the same tasks."""
    rng = random.Random(load.seed)
    pool = await token_pool(server) if load.dataset is Dataset.RANDOM else []
    cancelled = set(rng.sample(range(load.num_prompts), round(load.cancel_ratio * load.num_prompts)))
    start_s = 0.0
    tasks = []
    for index in range(load.num_prompts):
        prompt_len, output_len = load.lengths(rng)
        prompt: Sequence[int] | str
        if load.dataset is Dataset.WORDS:
            prompt = " ".join(rng.choices(_TEXT.split(), k=prompt_len))
        else:
            prompt = rng.choices(pool, k=prompt_len)
            if server.endpoint is Endpoint.CHAT:
                prompt = await _detokenize(server, prompt)
        midway = rng.randint(1, max(1, output_len - 1))
        tasks.append(Task(index, prompt, output_len, start_s, midway if index in cancelled else None, fields))
        start_s += rng.expovariate(load.request_rate) if load.request_rate != math.inf else 0.0
    return tasks


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Distribution of a latency, in milliseconds."""

    mean: float
    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread | None:
        """The distribution of these values; None if there are none."""
        values = np.fromiter(seconds, dtype=float) * 1e3
        if not len(values):
            return None
        median, p90, p99 = np.percentile(values, [50, 90, 99])
        return cls(float(values.mean()), float(median), float(p90), float(p99))


@dataclass(frozen=True)
class Figures:
    """A load's result.

    Attributes:
        first_error: error of the failed request that was sent first.
        duration_s: from the load's start to the end of its last request.
        requests_per_s: completed requests per second.
        output_tokens_per_s: output tokens of completed and cancelled requests per second.
        total_tokens_per_s: the same with their prompts' tokens.
        uncounted: completed requests for which the server gave no token counts; their events are counted instead.
        ttft, itl, tpot, e2e: time to first token; between two events with text; per output token after the first; of a
            whole request. All are of completed requests; None if there are none.
    """

    ok: int
    failed: int
    cancelled: int
    first_error: str | None
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    uncounted: int
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None

    def print(self) -> None:
        print(f"requests   {self.ok} ok, {self.failed} failed, {self.cancelled} cancelled in {self.duration_s:.2f} s")
        if self.first_error is not None:
            print(f"  first error: {self.first_error}")
        print(f"  requests/s        {self.requests_per_s:10.2f}")
        print(f"  output tokens/s   {self.output_tokens_per_s:10.1f}")
        print(f"  total tokens/s    {self.total_tokens_per_s:10.1f}")
        if self.uncounted:
            print(f"  {self.uncounted} answers without `usage`: their events are counted as tokens, their prompts not")
        latencies = {
            "time to first token": self.ttft,
            "inter-token latency": self.itl,
            "time per output token": self.tpot,
            "end to end": self.e2e,
        }
        names = ("mean", "median", "p90", "p99")
        rows = [(what, *(getattr(spread, name, None) for name in names)) for what, spread in latencies.items()]
        print(table({"ms": "", **dict.fromkeys(names, ".2f")}, rows))


def figures_of(outcomes: Sequence[Outcome]) -> Figures:
    ok, failed, cancelled = ([each for each in outcomes if each.status is status] for status in Status)
    duration = max((each.sent_s + each.latency_s for each in outcomes), default=0.0)
    served = ok + cancelled
    output = sum(each.output_tokens for each in served)
    total = output + sum(each.prompt_tokens for each in served)

    def per_second(count: int) -> float:
        return count / duration if duration else 0.0

    first = min(failed, key=lambda each: each.sent_s, default=None)
    return Figures(
        ok=len(ok),
        failed=len(failed),
        cancelled=len(cancelled),
        first_error=first.error if first is not None else None,
        duration_s=duration,
        requests_per_s=per_second(len(ok)),
        output_tokens_per_s=per_second(output),
        total_tokens_per_s=per_second(total),
        uncounted=sum(not each.counted for each in ok),
        ttft=Spread.of(each.ttft_s for each in ok if each.ttft_s is not None),
        itl=Spread.of(gap for each in ok for gap in each.gaps_s),
        tpot=Spread.of(each.tpot_s for each in ok if each.tpot_s is not None),
        e2e=Spread.of(each.latency_s for each in ok),
    )
