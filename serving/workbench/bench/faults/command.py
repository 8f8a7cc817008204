"""The command: its flags, its sections, and its verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

from pydantic import Field

from serving.arguments.fields import Flag
from serving.workbench.bench.faults.answers import make_requests, with_stops
from serving.workbench.bench.faults.kill import run_kills
from serving.workbench.bench.faults.nodes import run_nodes
from serving.workbench.bench.faults.others import run_limit, run_others, run_poison
from serving.workbench.bench.faults.pause import run_cost, run_pause, run_soak
from serving.workbench.bench.faults.referee import FLAGS, Referee
from serving.workbench.bench.faults.setting import Found, Setting, Sizes
from serving.workbench.bench.link.command import signals_end_it
from serving.workbench.bench.options import SERVER, Checkpoint, Dtype, ReportOptions
from serving.workbench.bench.server.load import token_pool
from serving.workbench.bench.server.subject import Subject, subject
from ubatch import ConfigError

SECTIONS: Mapping[str, Callable[[Setting], Found]] = {
    "kill": run_kills,
    "others": run_others,
    "poison": run_poison,
    "limit": run_limit,
    "pause": run_pause,
    "cost": run_cost,
    "soak": run_soak,
    "nodes": run_nodes,
}
_VARIETY = 4
"""Requests that are made for each that runs at a time."""
_QUICK = Sizes(kills=2, configurations=1, pauses=1, blocks=2, soak_s=6.0, every_s=3.0)


class Options(ReportOptions):
    """What to disturb, and how often."""

    unwritten = frozenset({"model"})
    measures = (*SERVER, "serving/workbench/bench/faults")

    model: Annotated[Checkpoint, Flag(positional=True)] = Field(
        description="folder of a Hugging Face checkpoint; of up to 1,024 tokens, so that edges of draws are exact"
    )
    only: tuple[str, ...] = Field((), description=f"sections: {', '.join(SECTIONS)}; all if none")
    kills: int = Field(10, ge=1, description="engines killed in each configuration")
    streams: int = Field(64, ge=8, description="requests that run all the time")
    output_len: int = Field(200, ge=16, description="their tokens")
    pauses: int = Field(5, ge=1, description="kills whose pause is measured, and cold starts")
    blocks: int = Field(40, ge=2, description="A B B A blocks of cost; 160 for figures to quote")
    minutes: float = Field(2.0, gt=0, description="of soak")
    every_s: float = Field(20.0, gt=0, description="seconds between two kills of soak")
    timeout_s: float = Field(5.0, ge=2, description="the servers', where a rank hangs or a link is cut")
    dtype: Dtype = Field("float32", description="in bfloat16 texts may differ; their rate is shown")
    quick: bool = Field(False, description="the least of everything, to try the command")

    @property
    def sizes(self) -> Sizes:
        if self.quick:
            return _QUICK
        return Sizes(self.kills, 5, self.pauses, self.blocks, 60 * self.minutes, self.every_s)


def run(options: Options) -> int:
    """Disturb, print and write; returns 1 if there was a fault.

    Raises:
        ConfigError: no section has that name.
        ServerFailed: a server did not start.
    """
    unknown = set(options.only) - SECTIONS.keys()
    if unknown:
        raise ConfigError(f"--only {' '.join(sorted(unknown))}: no such section. There are: {', '.join(SECTIONS)}.")
    found: dict[str, Found] = {}
    with signals_end_it(), _setting(options) as setting:
        for name in options.only or SECTIONS:
            print(f"\n{name}", flush=True)
            found[name] = SECTIONS[name](setting)
            print("\n".join(f"FAULT: {fault}" for fault in found[name].faults), flush=True)
    faults = [fault for each in found.values() for fault in each.faults]
    options.write({**{name: each.figures for name, each in found.items()}, "faults": faults})
    print(f"{len(faults)} faults" if faults else "every promise was kept")
    return 1 if faults else 0


@contextmanager
def _setting(options: Options) -> Iterator[Setting]:
    """The undisturbed server, which runs all the time, and its answers."""
    flags = (f"--dtype={options.dtype}",)
    with subject(options.model, [*flags, *FLAGS]) as undisturbed:
        referee = Referee(undisturbed.server, options.model)
        yield asyncio.run(_ask(options, undisturbed, referee, flags))


async def _ask(options: Options, undisturbed: Subject, referee: Referee, flags: tuple[str, ...]) -> Setting:
    pool = await token_pool(undisturbed.server)
    streams, tokens = (16, 48) if options.quick else (options.streams, options.output_len)
    first = make_requests(pool, _VARIETY * streams, tokens)
    requests = with_stops(first, await referee.references(first))
    references = await referee.references(requests)
    exact = options.dtype == "float32"
    return Setting(
        options.model, flags, requests, references, referee, options.sizes, streams, options.timeout_s, exact
    )
