"""The parts of `ubatch bench faults` in which engines fail too often: by a request that kills them, and by chance."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serving.workbench.bench.faults.answers import Answer, Asked, ask_all
from serving.workbench.bench.faults.compare import Verdict
from serving.workbench.bench.faults.faulty import FOLDER, PROGRAM
from serving.workbench.bench.faults.judge import faults_of_answers, faults_of_end
from serving.workbench.bench.faults.load import NotHealthy, kill_engines, running_load
from serving.workbench.bench.faults.referee import Tally
from serving.workbench.bench.faults.setting import EXPERT_PARALLEL, Found, Setting
from serving.workbench.bench.faults.victims import Ended, Subject
from serving.workbench.bench.statistics import table
from ubatch import UBatchError

_CODE = "poisonous_request"
_DEFAULT_RESTARTS = 3
_BETWEEN_S = (0.3, 1.0)
_AGAIN_S = 60.0
_FEW = 8
_WAYS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "raises, one rank": ("raise", ()),
    "raises, DP 2": ("raise", EXPERT_PARALLEL),
    "segfaults, DP 2": ("segfault", EXPERT_PARALLEL),
}


@dataclass(frozen=True)
class Poisoned:
    """What came of a request that kills engines, and of the others beside it."""

    name: str
    seconds: float
    status: int | None
    code: str | None
    error: str | None
    others: Tally
    restarts: Mapping[str, int]
    ended: Ended

    def as_json(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in ("others", "ended")}
        return {**own, "others": self.others.as_json(), "ended": asdict(self.ended)}

    def faults(self, *, exact: bool) -> list[str]:
        broken = {
            "the poisonous request was answered": self.error is None,
            f"it ended with {self.error}, code {self.code}": self.error is not None and self.code != _CODE,
            f"it ended with HTTP status {self.status}": self.error is not None and self.status != 500,
        }
        found = [what for what, is_so in broken.items() if is_so]
        found += faults_of_answers(self.others, exact=exact) + faults_of_end(self.ended)
        return [f"poison, {self.name}: {each}" for each in found]


def run_poison(setting: Setting) -> Found:
    """A request that ends an engine in every step that has it, among others; with the default limits of restarts."""
    done, faults = [], []
    for name, (how, flags) in _WAYS.items():
        stream = how == "segfault"
        with tempfile.TemporaryDirectory() as folder:
            token = _unused_token(setting)
            (Path(folder) / "poison").write_text(f"{token} {how}")
            with setting.server(*flags, program=PROGRAM, variables={FOLDER: folder}) as subject:
                parts = asyncio.run(_ask_with(setting, subject, token, stream=stream))
                poisoned = Poisoned(name, ended=subject.end(), **parts)
        done.append(poisoned)
        faults += poisoned.faults(exact=setting.exact)
    _print(done)
    return Found([each.as_json() for each in done], faults)


async def _ask_with(setting: Setting, subject: Subject, token: int, *, stream: bool) -> dict[str, Any]:
    """Send all requests, one of them poisoned, at once."""
    requests = list(setting.requests[: setting.streams])
    place = len(requests) // 2
    poisonous = Asked("poisonous", (*requests[place].prompt, token), stream, {"max_tokens": 20, "temperature": 0})
    requests[place] = poisonous
    begun = time.monotonic()
    answers = await asyncio.wait_for(ask_all(subject.server, requests), 10 * _AGAIN_S)
    seconds = time.monotonic() - begun
    cases = list(zip(requests, setting.references[: setting.streams], answers, strict=True))
    del cases[place]
    told = answers[place]
    restarts = dict(await subject.restarts())
    return {
        **{"seconds": seconds, "status": told.status, "code": told.code, "error": told.error, "restarts": restarts},
        "others": await setting.referee.tally(cases),
    }


def _unused_token(setting: Setting) -> int:
    """A token that no request has, and that none is answered with."""
    used = {token for asked in setting.requests for token in asked.prompt}
    used |= {token for answer in setting.references for choice in answer.choices for token in choice.tokens}
    unused = set(range(1, setting.referee.vocab_size)) - used
    if not unused:
        raise UBatchError("every token of the vocabulary is in a request; give fewer --streams.")
    return max(unused)


def _print(done: list[Poisoned]) -> None:
    head = {"a request that": "", "s": ".0f", "restarts": "", "it ended with": "", "others": "", "equal": ""}
    rows = []
    for each in done:
        restarts = ", ".join(f"{count} {name}" for name, count in each.restarts.items() if count) or "-"
        equal = str(each.others.counts[Verdict.EQUAL])
        rows.append(
            (each.name, each.seconds, restarts, each.code or str(each.error)[:60], str(each.others.requests), equal)
        )
    print(table(head, rows), flush=True)


# -- the limit


def run_limit(setting: Setting) -> Found:
    """Kill engines of a server with the default limits until it ends."""
    with setting.server() as subject:
        kills, answers = asyncio.run(_kill_until_it_ends(setting, subject))
        ended, last = subject.end(), subject.log().splitlines()[-1:]
    # A request that was sent after the end was refused by nobody.
    failed = [each.error for each in answers if each.error is not None and each.status is not None]
    unnamed = [error for error in failed if "rank 0" not in error]
    broken = {
        f"the server ended after {kills} kills": kills != _DEFAULT_RESTARTS + 1,
        f"its last line does not name the rank: {last}": not any("rank 0" in line for line in last),
        f"a request ended without the rank's name: {unnamed[:1]}": unnamed,
    }
    found = [what for what, is_so in broken.items() if is_so] + faults_of_end(ended, status=1)
    print(f"  ended after {kills} kills with status {ended.status}: {' '.join(last)}", flush=True)
    return Found({"kills": kills, "ended": asdict(ended), "said": last}, [f"limit: {each}" for each in found])


async def _kill_until_it_ends(setting: Setting, subject: Subject) -> tuple[int, list[Answer]]:
    async with running_load(subject, setting.requests, _FEW) as load:
        with suppress(NotHealthy):
            most = 2 * _DEFAULT_RESTARTS + 2
            rng = random.Random(0)
            await kill_engines(subject, load, most, rng, between_s=_BETWEEN_S, again_s=_AGAIN_S, twice=False)
    return load.kills, [answer for _, answer in load.answers]
