"""The part of `ubatch bench faults` with other faults than a signal that kills: ranks that hang, steps that fail."""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from serving.workbench.bench.faults.faulty import FOLDER, PROGRAM
from serving.workbench.bench.faults.judge import faults_of_answers, faults_of_end, faults_of_restarts
from serving.workbench.bench.faults.load import kill, running_load
from serving.workbench.bench.faults.referee import Tally
from serving.workbench.bench.faults.setting import AGAIN_S, EXPERT_PARALLEL, LANES, UNLIMITED, Found, Setting
from serving.workbench.bench.faults.victims import Subject, by_reason
from serving.workbench.bench.statistics import table

_PROGRESS_S = 1.0
_LOOK_S = 0.02
_NOTICED_LATER_S = 10.0


@dataclass(frozen=True)
class Disturbed:
    """One fault, and what the server made of it.

    Attributes:
        happened: whether it could be done.
        noticed_s: until `/health` answered 503; None if it did not.
        again_s: from then until it answered 200.
        restarts: by reason, of this fault.
    """

    name: str
    happened: bool
    noticed_s: float | None
    again_s: float | None
    restarts: Mapping[str, int]

    def faults(self, timeout_s: float) -> list[str]:
        """Faults on a server with that `--timeout-s`."""
        broken = {
            "could not be done": not self.happened,
            "/health never told it": self.happened and self.noticed_s is None,
            f"the server did not come back within {AGAIN_S:g} s": self.noticed_s is not None and self.again_s is None,
            f"it was noticed after {self.noticed_s or 0:.1f} s": (self.noticed_s or 0) > timeout_s + _NOTICED_LATER_S,
        }
        return [f"others, {self.name}: {what}" for what, is_so in broken.items() if is_so]


def run_others(setting: Setting) -> Found:
    """One server of two ranks that overlap; the faults come one after the other while requests run."""
    flags = (UNLIMITED, f"--timeout-s={setting.timeout_s}", *EXPERT_PARALLEL, *LANES)
    with (
        tempfile.TemporaryDirectory() as folder,
        setting.server(*flags, program=PROGRAM, variables={FOLDER: folder}) as subject,
    ):
        done, tally, restarts = asyncio.run(_disturb(setting, subject, Path(folder)))
        ended = subject.end()
    faults = [fault for each in done for fault in each.faults(setting.timeout_s)]
    found = [
        *faults_of_answers(tally, exact=setting.exact),
        *faults_of_restarts(restarts, 10 * len(done)),
        *faults_of_end(ended),
    ]
    faults += [f"others: {each}" for each in found]
    _print(done, tally)
    figures = {"faults": [asdict(each) for each in done], "answers": tally.as_json(), "ended": asdict(ended)}
    return Found(figures, faults)


async def _disturb(setting: Setting, subject: Subject, folder: Path) -> tuple[list[Disturbed], Tally, dict[str, int]]:
    ways: dict[str, Callable[[], Awaitable[bool]]] = {
        "SIGSTOP": partial(_stop_rank, subject),
        "exception inside a step": partial(_tell, subject, folder / "raise"),
        "out of memory inside a step": partial(_tell, subject, folder / "memory"),
        "exception inside a lane": partial(_tell, subject, folder / "lane"),
    }
    done = []
    async with running_load(subject, setting.requests, setting.streams) as load:
        for name, way in ways.items():
            if await subject.wait_healthy(AGAIN_S) is None:
                break
            await asyncio.sleep(_PROGRESS_S)
            before, begun = await subject.restarts(), time.monotonic()
            health = asyncio.create_task(subject.wait_sick(setting.timeout_s + AGAIN_S))
            happened = await way()
            noticed_s = await health if happened else None
            health.cancel()
            again_s = None if noticed_s is None else await subject.wait_healthy(AGAIN_S)
            restarts = by_reason(await subject.restarts() - before)
            done.append(Disturbed(name, happened, noticed_s, again_s, restarts))
            if subject.alive and time.monotonic() - begun < _PROGRESS_S:
                await asyncio.sleep(_PROGRESS_S)
    tally = await setting.referee.tally(load.cases(setting.references))
    return done, tally, dict(await subject.restarts())


async def _stop_rank(subject: Subject) -> bool:
    engines = list(subject.engines().values())
    return bool(engines) and kill(random.Random(0).choice(engines), signal.SIGSTOP)


async def _tell(subject: Subject, order: Path) -> bool:
    """Leave an order for the engines; whether one of them has taken it."""
    order.touch()
    deadline = time.monotonic() + AGAIN_S / 2
    while order.exists() and subject.alive and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_S)
    taken = not order.exists()
    order.unlink(missing_ok=True)
    return taken


def _print(done: list[Disturbed], tally: Tally) -> None:
    head: dict[str, str] = {"": "", "noticed, s": ".1f", "healthy again, s": ".1f", "restarts": ""}
    rows: list[tuple[Any, ...]] = []
    for each in done:
        reasons = ", ".join(f"{count} {reason}" for reason, count in each.restarts.items() if count)
        rows.append((each.name, each.noticed_s, each.again_s, reasons or "-"))
    print(table(head, rows))
    print("  " + ", ".join(f"{count} {name}" for name, count in tally.counts.items()), flush=True)
