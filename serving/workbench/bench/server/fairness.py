"""`ubatch bench fairness`: how much arriving prompts delay decoding requests, and what limiting prompts costs.

Every arm is a server of its own, with and without DBO: `off` has no limit, `auto` and the numbers are values of
`--max-prefill-tokens-per-mixed-step`. All servers run, but only one has requests at a time, interleaved A B B A; every
arm of a sweep gets the same requests. A visit runs the same streams twice:

    alone    streams decode without other requests
    mixed    long prompts arrive meanwhile, each with an answer of two tokens: a few at a time, the next when one ends

    p99          99th percentile of the time between two tokens of a stream; mixed: only while prompts are served
    stretch      p99 mixed / p99 alone, of the same server and round
    throughput   tokens per second of the mixed part, prompts' and answers', against `off` with the same DBO

A mixed step below `--dbo-prefill-token-threshold` does not overlap, so a limit below it costs more with DBO.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any

from pydantic import Field

from serving.arguments.fields import Flag
from serving.workbench.bench.options import SERVER, ModelFolder, Ranks, ReportOptions
from serving.workbench.bench.server.load import Load, Spread, figures_of, make_tasks, read_steps, served_model
from serving.workbench.bench.server.process import ServerProcess, running_server
from serving.workbench.bench.server.requests import GREEDY, Server, Task, send_and_check
from serving.workbench.bench.statistics import bootstrap, interleave_arms, paired, table
from ubatch import UBatchError

_BEFORE_S = 0.3  # the streams decode before the first prompt arrives
_PROMPT_OUTPUT = 2


class Options(ReportOptions):
    """What to serve, and the load."""

    measures = SERVER

    model: ModelFolder
    ranks: Ranks = 2
    emulated_link: Annotated[tuple[float, float], Flag(metavar="US MB/S")] = Field(
        (20.0, 50.0), description="latency and bandwidth between them"
    )
    limits: tuple[str, ...] = Field(
        ("auto",), min_length=1, description="--max-prefill-tokens-per-mixed-step of the arms, in addition to off"
    )
    flags: tuple[str, ...] = Field((), description="more flags of every server, as one word each: --flag=value")
    rounds: int = Field(3, ge=2, description="A B B A rounds; each runs every arm twice")
    streams: int = Field(8, ge=1, description="requests that decode")
    output_len: int = Field(200, ge=8, description="their tokens")
    prompts: int = Field(12, ge=1, description="long prompts meanwhile")
    input_len: int = Field(900, ge=1, description="their tokens")
    in_flight: int = Field(2, ge=1, description="long prompts at a time")


@dataclass(frozen=True)
class Round:
    """One visit of an arm: times between two tokens of a stream in each part, and the throughput of the mixed part."""

    alone: Spread
    mixed: Spread
    tokens_per_s: float

    def as_json(self) -> dict[str, float]:
        parts = {"alone": self.alone, "mixed": self.mixed}
        times = {f"{name}_{part}_ms": getattr(own, name) for part, own in parts.items() for name in ("median", "p99")}
        return {**times, "tokens_per_s": self.tokens_per_s}


@dataclass
class _Arm:
    """A server and its visits; of the arms' n-th visits each gets the same requests."""

    limit: str
    dbo: bool
    server: ServerProcess
    options: Options
    rounds: list[Round] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.limit}, dbo" if self.dbo else self.limit

    def __call__(self) -> float:
        """Visit the server; returns the milliseconds of the p99 with prompts."""
        self.rounds.append(asyncio.run(_visit(self.server.base_url, self.options, seed=len(self.rounds))))
        return self.rounds[-1].mixed.p99

    def overlapped(self) -> float:
        """Share of the mixed steps so far that overlapped."""
        steps = asyncio.run(read_steps(Server(self.server.base_url), "mixed"))
        engaged = sum(count for outcome, count in steps.items() if outcome.startswith("engaged"))
        return engaged / steps.total() if steps else 0.0


def run(options: Options) -> int:
    with ExitStack() as stack:
        arms = []
        for dbo, limit in product((False, True), ("off", *options.limits)):
            server = stack.enter_context(running_server(options.model, _flags(options, limit, dbo=dbo)))
            arms.append(_Arm(limit, dbo, server, options))
        interleave_arms({arm.name: arm for arm in arms}, options.rounds, label="rounds")
        for arm in arms:
            del arm.rounds[0]  # a warm-up
        rows = {arm.name: _row(arm, next(each for each in arms if each.dbo == arm.dbo)) for arm in arms}
    _print(options, rows)
    options.write({"arms": [rows[arm.name] | {"rounds": arm.rounds} for arm in arms]})
    return 0


def _flags(options: Options, limit: str, *, dbo: bool) -> list[str]:
    link = map(str, options.emulated_link)
    flags = ["--data-parallel-size", str(options.ranks), "--enable-expert-parallel", "--emulated-link", *link]
    flags += ["--max-prefill-tokens-per-mixed-step", limit, *(["--enable-dbo"] if dbo else []), *options.flags]
    return flags


async def _visit(base_url: str, options: Options, seed: int) -> Round:
    asked = Server(base_url)
    server = replace(asked, model=(await served_model(asked, None)).name)
    decodes = Load(num_prompts=options.streams, input_len=32, output_len=options.output_len, seed=2 * seed)
    prompts = Load(
        num_prompts=options.prompts, input_len=options.input_len, output_len=_PROMPT_OUTPUT, seed=2 * seed + 1
    )
    streams, coming = [await make_tasks(server, load, **GREEDY) for load in (decodes, prompts)]
    alone = await send_and_check(server, _shuffled(streams, seed))
    later = [replace(task, start_s=_BEFORE_S) for task in coming]
    decoded, served = await asyncio.gather(
        send_and_check(server, streams), send_and_check(server, later, max_concurrency=options.in_flight)
    )
    begin, end = min(each.sent_s for each in served), max(each.sent_s + each.latency_s for each in served)
    undisturbed = Spread.of(gap for each in alone for gap in each.gaps_s)
    mixed = Spread.of(gap for each in decoded for gap in each.gaps_between(begin, end))
    if undisturbed is None or mixed is None:
        raise UBatchError("no stream decoded while prompts were served; raise --output-len.")
    return Round(undisturbed, mixed, figures_of([*decoded, *served]).total_tokens_per_s)


def _shuffled(tasks: Sequence[Task], seed: int) -> list[Task]:
    """The same lengths with other tokens, so that the second part finds nothing in the prefix cache."""
    rng = random.Random(seed)
    prompts: list[list[int]] = [[token for token in task.prompt if isinstance(token, int)] for task in tasks]
    return [replace(task, prompt=rng.sample(each, len(each))) for task, each in zip(tasks, prompts, strict=True)]


def _row(arm: _Arm, off: _Arm) -> dict[str, Any]:
    return {
        "limit": arm.limit,
        "dbo": arm.dbo,
        "p99_alone_ms": bootstrap([each.alone.p99 for each in arm.rounds]),
        "p99_mixed_ms": bootstrap([each.mixed.p99 for each in arm.rounds]),
        "stretch": paired([each.mixed.p99 for each in arm.rounds], [each.alone.p99 for each in arm.rounds]),
        "tokens_per_s": bootstrap([each.tokens_per_s for each in arm.rounds]),
        "throughput": paired([e.tokens_per_s for e in arm.rounds], [e.tokens_per_s for e in off.rounds]),
        "overlapped": arm.overlapped(),
    }


def _print(options: Options, rows: Mapping[str, Mapping[str, Any]]) -> None:
    print(
        f"{options.streams} streams on {options.ranks} ranks, {options.prompts} prompts of {options.input_len} tokens "
        f"meanwhile, {options.in_flight} at a time; {2 * options.rounds} visits of every arm"
    )
    head = {"limit": "", "p99 alone, ms": ".0f", "p99 mixed, ms": ".0f", "stretch": ".2f", "throughput": ".2f"}
    figures = ("p99_alone_ms", "p99_mixed_ms", "stretch", "throughput", "overlapped")
    print(table(head | {"overlapped": ".0%"}, ((name, *map(row.get, figures)) for name, row in rows.items())))
