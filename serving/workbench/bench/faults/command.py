"""The command: its sections, and its verdict."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from serving.workbench.bench.faults.answers import make_requests, with_stops
from serving.workbench.bench.faults.nodes import run_nodes
from serving.workbench.bench.faults.pause import run_cost, run_pause, run_soak
from serving.workbench.bench.faults.ranks import run_kills, run_limit, run_others, run_poison
from serving.workbench.bench.faults.referee import FLAGS, Referee
from serving.workbench.bench.faults.shared import SECTIONS, Found, Options, Setting
from serving.workbench.bench.link.command import signals_end_it
from serving.workbench.bench.server.load import token_pool
from serving.workbench.bench.server.process import subject
from ubatch import ConfigError

_RUNS = dict(
    zip(SECTIONS, (run_kills, run_others, run_poison, run_limit, run_pause, run_cost, run_soak, run_nodes), strict=True)
)
_VARIETY = 4
"""Requests that are made for each that runs at a time."""
_QUICK = {"kills": 2, "pauses": 1, "blocks": 2, "minutes": 0.1, "every_s": 3.0, "streams": 16, "output_len": 48}


def run(options: Options) -> int:
    """Disturb, print and write; returns 1 if there was a fault.

    Raises:
        ConfigError: no section has that name.
        ServerFailed: a server did not start.
    """
    unknown = set(options.only).difference(SECTIONS)
    if unknown:
        raise ConfigError(f"--only {' '.join(sorted(unknown))}: no such section. There are: {', '.join(SECTIONS)}.")
    found: dict[str, Found] = {}
    with signals_end_it(), _setting(options.model_copy(update=_QUICK) if options.quick else options) as setting:
        for name in options.only or SECTIONS:
            print(f"\n{name}", flush=True)
            found[name] = _RUNS[name](setting)
            print("\n".join(f"FAULT: {fault}" for fault in found[name].faults), flush=True)
    faults = [fault for each in found.values() for fault in each.faults]
    options.write({**{name: each.figures for name, each in found.items()}, "faults": faults})
    print(f"{len(faults)} faults" if faults else "every promise was kept")
    return 1 if faults else 0


@contextmanager
def _setting(options: Options) -> Iterator[Setting]:
    """The undisturbed server, which runs all the time, and its answers."""
    with subject(options.model, [*options.flags, *FLAGS]) as undisturbed:
        yield asyncio.run(_ask(options, Referee(undisturbed.server, options.model)))


async def _ask(options: Options, referee: Referee) -> Setting:
    first = make_requests(await token_pool(referee.server), _VARIETY * options.streams, options.output_len)
    requests = with_stops(first, await referee.references(first))
    return Setting(options, requests, await referee.references(requests), referee)
