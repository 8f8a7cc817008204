"""The command: its flags, its phases, its table, and what it promises."""

from __future__ import annotations

import asyncio
import resource
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field
from tqdm import tqdm

from serving.bench.abuse.attacks import ATTACKS, Answers, Attack, Target
from serving.bench.abuse.poison import poisoned_copy
from serving.bench.abuse.rounds import Hang, Round, hang, overlapped_steps, rest, rounds
from serving.bench.abuse.watch import Seen, Watch, Window, ask_references, resident_bytes
from serving.bench.options import ReportOptions
from serving.bench.serve_load import served_model, token_pool
from serving.bench.serve_process import ServerProcess, running_server
from serving.bench.serve_requests import Server
from ubatch import ConfigError

__all__ = ["Options", "run"]

_ANSWER_TOKENS = 200
_MAX_CONNECTIONS = 1500
_GIGABYTE = 10**9
_SLOWEST_HEALTH_S = 1.0
_GAP_RATIO = 3.0
_MEMORY_GROWTH = 1.05
"""From the second round on: the first fills caches and the allocator's own."""
FLAGS = (
    "--data-parallel-size=2",
    "--enable-expert-parallel",
    "--enable-dbo",
    "--dbo-decode-token-threshold=16",
    "--max-prefill-tokens-per-mixed-step=auto",
    f"--max-connections={_MAX_CONNECTIONS}",
)


class Options(ReportOptions):
    """What is attacked, and how long."""

    unwritten = frozenset({"model"})

    model: Annotated[tyro.conf.Positional[Path], Field(description="folder of a checkpoint in safetensors")]
    only: Annotated[tuple[str, ...], Field(description="attacks whose names contain one of these; all if none")] = ()
    streams: Annotated[int, Field(ge=1, description="that run beside the attacks")] = 50
    alone_s: Annotated[float, Field(gt=0, description="seconds of the streams alone, before and after")] = 10.0
    arrivals_s: Annotated[float, Field(gt=0, description="seconds during which prompts of 900 tokens arrive")] = 20.0
    rounds: Annotated[int, Field(ge=0, description="loads of which a third is dropped midway")] = 5
    round_streams: Annotated[int, Field(ge=3, description="streams of such a load")] = 1000
    hang: Annotated[bool, Field(description="stop a rank at the end")] = True
    timeout_s: Annotated[float, Field(ge=5, description="of the server: after which a rank counts as hung")] = 15.0
    serve_flags: Annotated[
        tuple[str, ...],
        tyro.conf.arg(metavar="FLAG=VALUE ..."),
        Field(description="of the server, besides " + " ".join(FLAGS)),
    ] = ()


@dataclass(frozen=True)
class _Row:
    """One stretch of time in the report."""

    name: str
    answers: dict[str, int]
    unexpected: list[str]
    health_s: float
    unhealthy: list[str]
    seen: Seen


def run(options: Options) -> int:
    """Attack, print, write; 1 if a promise was not kept.

    Raises:
        ConfigError: no attack has that name, or the checkpoint cannot be poisoned.
        ServerFailed: the server did not start.
    """
    attacks = [each for each in ATTACKS if not options.only or any(part in each.name for part in options.only)]
    if not attacks:
        names = "; ".join(each.name for each in ATTACKS)
        raise ConfigError(f"--only {' '.join(options.only)} names no attack. There are: {names}.")
    _open_files()
    with tempfile.TemporaryDirectory(prefix="ubatch-abuse-") as folder:
        poisoned = poisoned_copy(options.model, Path(folder))
        flags = [*FLAGS, f"--timeout-s={options.timeout_s}", *options.serve_flags]
        print(f"ubatch serve {options.model} {' '.join(flags)}")
        with running_server(Path(folder), flags) as process:
            return asyncio.run(_Abuse(options, process, poisoned).run(attacks))


def _open_files() -> None:
    """A thousand streams are as many sockets, here too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65535 if hard == resource.RLIM_INFINITY else min(hard, 65535)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Abuse:
    """One run.

    Args:
        options: of the command.
        process: the server.
        poisoned: the token that it cannot compute.
    """

    def __init__(self, options: Options, process: ServerProcess, poisoned: int) -> None:
        self._options, self._process, self._poisoned = options, process, poisoned
        self._faults: list[str] = []

    async def run(self, attacks: Sequence[Attack]) -> int:
        """All phases; prints each as it ends."""
        options, process = self._options, self._process
        asked = Server(process.base_url)
        model = await served_model(asked, None)
        server = Server(process.base_url, model.name)
        pool = [token for token in await token_pool(server) if token != self._poisoned]
        target = Target(server, pool, self._poisoned, model.max_model_len or 1024, _MAX_CONNECTIONS, options.arrivals_s)
        rows = await self._attack(target, attacks)
        peak = resident_bytes(process.process.pid, peak=True)
        print(f"the API process took at most {peak / 1e6:.0f} MB; {await overlapped_steps(server)} steps overlapped")
        self._expect(peak < _GIGABYTE, f"the API process took {peak / 1e9:.2f} GB")
        self._expect(await overlapped_steps(server) > 0, "no step overlapped")
        done = await self._rounds(server)
        hung = await self._hang(server) if options.hang else None
        options.write(
            {
                "windows": [asdict(row) for row in rows],
                "gap_p99_ratio": _stretch(rows),
                "peak_resident_bytes": peak,
                "rounds": [asdict(each) for each in done],
                "hang": asdict(hung) if hung is not None else None,
                "faults": self._faults,
            }
        )
        print("\n".join(f"FAULT: {fault}" for fault in self._faults) or "every promise was kept")
        return 1 if self._faults else 0

    def _expect(self, kept: bool, otherwise: str) -> None:
        if not kept:
            self._faults.append(otherwise)

    async def _attack(self, target: Target, attacks: Sequence[Attack]) -> list[_Row]:
        """The streams alone, each attack beside them, and the streams alone again."""
        options = self._options
        prompts = [target.prompt(16, seed) for seed in range(options.streams)]
        answer_tokens = min(_ANSWER_TOKENS, target.max_model_len - 16)
        references = await ask_references(target.server, prompts, answer_tokens)
        answered: list[tuple[Attack | None, Window, Answers]] = []
        async with Watch(target.server, references, answer_tokens) as watch:
            await asyncio.sleep(3.0)
            answered.append((None, await watch.during("streams alone", options.alone_s), []))
            for attack in tqdm(attacks, unit="attack", disable=None, leave=False):
                answers: Answers = []
                answered.append((attack, await watch.during(attack.name, self._run(attack, target, answers)), answers))
                watch.window("between")
                await asyncio.sleep(1.0)
            answered.append((None, await watch.during("streams alone, afterwards", options.alone_s), []))
        self._expect((held := await rest(target.server)) is None, f"after the attacks the engines hold {held}")
        rows = [_row(watch, attack, window, answers) for attack, window, answers in answered]
        self._report(rows, [row for row in map(watch.seen, watch.windows) if row.wrong or row.failed])
        return rows

    async def _run(self, attack: Attack, target: Target, answers: Answers) -> None:
        try:
            answers += await attack.run(target)
        except OSError as error:  # the attack's own connection: an answer like any other
            answers.append(type(error).__name__)

    def _report(self, rows: Sequence[_Row], troubled: Sequence[Seen]) -> None:
        """The table, and what of it breaks a promise."""
        head = f"{'':46} {'health':>7} {'gap p50':>8} {'p99':>7} {'tok/s':>6}  answers"
        print(f"{head}\n{'':46} {'max ms':>7} {'ms':>8} {'ms':>7}")
        for row in rows:
            seen = row.seen
            gaps = [_ms(gap) for gap in (seen.gap_median_s, seen.gap_p99_s)]
            answers = ", ".join(f"{answer} x {count}" if count > 1 else answer for answer, count in row.answers.items())
            print(
                f"{row.name:46} {row.health_s * 1e3:7.0f} {gaps[0]:>8} {gaps[1]:>7} {seen.tokens_per_s:6.0f}  {answers}"
            )
            self._expect(not row.unexpected, f"{row.name}: answered {', '.join(row.unexpected)}")
            self._expect(not row.unhealthy, f"{row.name}: /health gave {', '.join(row.unhealthy[:5])}")
            self._expect(row.health_s < _SLOWEST_HEALTH_S, f"{row.name}: /health took {row.health_s:.2f} s")
        for seen in troubled:
            self._expect(not seen.wrong, f"{seen.wrong} streams got a wrong token")
            self._expect(not seen.failed, f"{len(seen.failed)} streams failed: {', '.join(seen.failed[:1])}")
        ratio = _stretch(rows)
        if ratio is not None:
            print(f"p99 of the streams' inter-token latency while long prompts arrive: {ratio:.2f} of that alone")
            self._expect(ratio < _GAP_RATIO, f"inter-token p99 rose {ratio:.2f} times while long prompts arrived")

    async def _rounds(self, server: Server) -> list[Round]:
        options = self._options
        done = await rounds(server, self._process, options.rounds, options.round_streams)
        for number, each in enumerate(done, 1):
            memory = " ".join(f"{resident / 1e6:.0f}" for resident in each.resident)
            print(
                f"round {number}: {each.ok} whole, {each.cancelled} dropped, {each.failed} failed, {each.wrong} wrong; "
                f"memory of API and engines {memory} MB"
            )
            self._expect(each.ok + each.cancelled == options.round_streams, f"round {number}: {each.first_error}")
            self._expect(not each.wrong, f"round {number}: {each.wrong} texts differ from the first round's")
            self._expect(each.held is None, f"round {number}: the engines hold {each.held}")
        for name, (early, late) in enumerate(zip(done[1].resident, done[-1].resident, strict=True) if done[2:] else ()):
            whose = f"engine {name - 1}" if name else "the API process"
            self._expect(late < early * _MEMORY_GROWTH, f"{whose} grew from {early / 1e6:.0f} to {late / 1e6:.0f} MB")
        return done

    async def _hang(self, server: Server) -> Hang:
        options = self._options
        seen = await hang(server, self._process, 1, options.timeout_s)
        print(f"rank 1 stopped: /health not 200 after {_s(seen.unhealthy_s)}, ended after {_s(seen.ended_s)}"
              f" with status {seen.exit_status}")  # fmt: skip
        limit = options.timeout_s + 5  # until it is noticed, and until the last errors have been read
        self._expect(seen.unhealthy_s is not None and seen.unhealthy_s < limit, "/health did not notice a hung rank")
        self._expect(seen.named, "a stream's error did not name the hung rank")
        self._expect(bool(seen.exit_status), "the server did not end with a failure after a rank hung")
        return seen


def _row(watch: Watch, attack: Attack | None, window: Window, answers: Answers) -> _Row:
    counted = Counter(answers)
    statuses = [answer for answer in counted if not answer.startswith("short")]
    unexpected = [answer for answer in statuses if attack is None or answer not in attack.answers]
    seen = watch.seen(window)
    return _Row(window.name, dict(counted), unexpected, max(window.health_s, default=0.0), window.unhealthy, seen)


def _stretch(rows: Sequence[_Row]) -> float | None:
    """The streams' inter-token p99 while long prompts arrive, over that alone; None where they did not arrive."""
    alone, arriving = rows[0].seen, next((row.seen for row in rows if "arrive" in row.name), None)
    if arriving is None or arriving.gap_p99_s is None or alone.gap_p99_s is None:
        return None
    return arriving.gap_p99_s / alone.gap_p99_s


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"
