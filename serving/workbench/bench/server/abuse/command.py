"""The command: its flags, its phases, its table and its verdict; and the checkpoint with a token that is poison."""

import asyncio
import json
import shlex
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field
from safetensors.torch import load_file, save_file

from serving.arguments.fields import Flag
from serving.progress import progress
from serving.workbench.bench.options import SERVER, Checkpoint, ReportOptions, ServeFlags
from serving.workbench.bench.server.abuse import checks
from serving.workbench.bench.server.abuse.attacks import ATTACKS, Answers, Attack, Target
from serving.workbench.bench.server.abuse.checks import Seen, Watch, Window, ask_references
from serving.workbench.bench.server.load import read_steps, served_model, token_pool
from serving.workbench.bench.server.process import Subject, resident_bytes, subject
from serving.workbench.bench.statistics import table
from ubatch import ConfigError

_ANSWER_TOKENS = 200
_MAX_CONNECTIONS = 1500
_BEGIN, _ALONE, _BETWEEN, _END = "start", "streams alone", "between", "end"
FLAGS = (
    "--data-parallel-size=2",
    "--enable-expert-parallel",
    "--enable-dbo",
    "--dbo-decode-token-threshold=16",
    "--max-prefill-tokens-per-mixed-step=auto",
    f"--max-connections={_MAX_CONNECTIONS}",
    "--max-engine-restarts=0",  # an attack that ends an engine must be seen
)


class Options(ReportOptions):
    """What to attack, and for how long."""

    unwritten = frozenset({"model"})
    measures = SERVER

    model: Annotated[Checkpoint, Flag(positional=True)] = Field(description="folder of a checkpoint in safetensors")
    only: tuple[str, ...] = Field((), description="attacks whose names contain one of these; all if none")
    streams: int = Field(50, ge=1, description="streams during the attacks")
    alone_s: float = Field(10.0, gt=0, description="seconds of the streams alone, before and after")
    arrivals_s: float = Field(20.0, gt=0, description="seconds during which prompts of 900 tokens arrive")
    rounds: int = Field(5, ge=0, description="loads of which a third is dropped midway")
    round_streams: int = Field(1000, ge=3, description="streams of such a load")
    hang: bool = Field(True, description="stop a rank at the end")
    timeout_s: float = Field(15.0, ge=5, description="the server's: after it, a rank counts as hung")
    serve_flags: ServeFlags = Field("", description="more flags of the server, besides " + " ".join(FLAGS))


def run(options: Options) -> int:
    """Attack, print and write; returns 1 if there was a fault.

    Raises:
        ConfigError: no attack has that name, or the checkpoint cannot be poisoned.
        ServerFailed: the server did not start.
    """
    from serving.api.http.connections import raise_file_limit

    attacks = [each for each in ATTACKS if not options.only or any(part in each.name for part in options.only)]
    if not attacks:
        names = "; ".join(each.name for each in ATTACKS)
        raise ConfigError(f"--only {' '.join(options.only)} names no attack. There are: {names}.")
    raise_file_limit()  # a thousand streams need as many sockets in this process, too
    with tempfile.TemporaryDirectory(prefix="ubatch-abuse-") as folder:
        poisoned = poisoned_copy(options.model, Path(folder))
        flags = [*FLAGS, f"--timeout-s={options.timeout_s}", *shlex.split(options.serve_flags)]
        print(f"ubatch serve {options.model} {' '.join(flags)}")
        with subject(Path(folder), flags) as attacked:
            return asyncio.run(_Abuse(options, attacked, poisoned).run(attacks))


class _Abuse:
    """One run of the command on a server, whose token `poisoned` has nan as its embedding."""

    def __init__(self, options: Options, attacked: Subject, poisoned: int) -> None:
        self._options, self._attacked, self._poisoned = options, attacked, poisoned
        self._faults: list[str] = []

    async def run(self, attacks: Sequence[Attack]) -> int:
        """Run all phases; prints each when it ends."""
        options, server = self._options, self._attacked.server
        model = await served_model(server, None)
        pool = [token for token in await token_pool(server) if token != self._poisoned]
        target = Target(server, pool, self._poisoned, model.max_model_len or 1024, _MAX_CONNECTIONS, options.arrivals_s)
        rows = await self._attack(target, attacks)
        peak, overlapped = resident_bytes(self._attacked.pid, peak=True), (await read_steps(server))["engaged"]
        print(f"the API process took at most {peak / 1e6:.0f} MB; {overlapped} steps overlapped")
        self._faults += checks.faults_of_memory(peak, overlapped)
        done = await self._rounds()
        hung = await self._hang() if options.hang else None
        figures = {"windows": rows, "gap_p99_ratio": checks.stretch(rows), "peak_resident_bytes": peak, "rounds": done}
        options.write(figures | {"hang": hung, "faults": self._faults})
        print("\n".join(f"FAULT: {fault}" for fault in self._faults) or "every promise was kept")
        return 1 if self._faults else 0

    async def _attack(self, target: Target, attacks: Sequence[Attack]) -> list[checks.Row]:
        """Run the streams alone, then during each attack, then alone again."""
        options = self._options
        answer_tokens = min(_ANSWER_TOKENS, target.max_model_len - 16)
        asked = [(target.prompt(16, seed), answer_tokens) for seed in range(options.streams)]
        references = await ask_references(target.server, asked)
        by_window: dict[int, tuple[Attack, Answers]] = {}
        async with Watch(target.server, references) as watch:
            await asyncio.sleep(3.0)
            await watch.during(_ALONE, options.alone_s)
            for attack in progress(attacks, unit="attack"):
                answers: Answers = []
                window = await watch.during(attack.name, self._run(attack, target, answers))
                by_window[id(window)] = attack, answers
                await watch.during(_BETWEEN, 1.0)
            await watch.during(f"{_ALONE}, afterwards", options.alone_s)
            watch.window(_END)
        if (held := await checks.rest(target.server)) is not None:
            self._faults.append(f"after the attacks the engines hold {held}")
        rows = [_row(watch.seen(window), window, *by_window.get(id(window), (None, []))) for window in watch.windows]
        _print_rows([row for row in rows if row.name not in (_BEGIN, _BETWEEN, _END)])
        self._faults += checks.faults_of_windows(rows)
        return rows

    async def _run(self, attack: Attack, target: Target, answers: Answers) -> None:
        try:
            answers += await attack.run(target)
        except OSError as error:  # an error of the attack's own connection counts as an answer
            answers.append(type(error).__name__)

    async def _rounds(self) -> list[checks.Round]:
        options = self._options
        done = await checks.rounds(self._attacked, options.rounds, options.round_streams)
        for number, each in enumerate(done, 1):
            memory = " ".join(f"{resident / 1e6:.0f}" for resident in each.resident)
            print(
                f"round {number}: {each.ok} whole, {each.cancelled} dropped, {each.failed} failed, {each.wrong} wrong; "
                f"memory of API and engines {memory} MB"
            )
        self._faults += checks.faults_of_rounds(done, options.round_streams)
        return done

    async def _hang(self) -> checks.Hang:
        seen = await checks.hang(self._attacked, self._options.timeout_s)
        times = ["-" if each is None else f"{each:.1f} s" for each in (seen.unhealthy_s, seen.ended_s)]
        print(
            f"rank {seen.rank} stopped: /health 503 after {times[0]}, ended after {times[1]} with status "
            f"{seen.exit_status}"
        )
        self._faults += checks.faults_of_hang(seen, self._options.timeout_s)
        return seen


def _row(seen: Seen, window: Window, attack: Attack | None, answers: Answers) -> checks.Row:
    counted = Counter(answer for answer in answers if isinstance(answer, str))
    unexpected: list[str] = []
    if attack is not None:
        unexpected = sorted(counted.keys() - attack.answers)
        unexpected += [f"no {answer}" for answer in sorted(attack.needs - counted.keys())]
    return checks.Row(
        name=window.name,
        seconds=window.ended - window.begun,
        answers=dict(counted),
        waits_s=[answer for answer in answers if isinstance(answer, float)],
        unexpected=unexpected,
        health_s=max(window.health_s, default=0.0),
        unhealthy=window.unhealthy,
        seen=seen,
    )


def _answers(row: checks.Row) -> str:
    answers = [f"{answer} x {count}" if count > 1 else answer for answer, count in row.answers.items()]
    return ", ".join([*answers, *(f"a short request waited {wait:.2f} s" for wait in row.waits_s)])


def _print_rows(rows: Sequence[checks.Row]) -> None:
    head = {"": "", "s": ".1f", "health, ms": ".0f", "gap p50, ms": ".1f", "p99, ms": ".1f", "tok/s": ".0f"}
    cells = []
    for row in rows:
        seen = row.seen
        gaps = [None if seconds is None else seconds * 1e3 for seconds in (seen.gap_median_s, seen.gap_p99_s)]
        cells.append((row.name, row.seconds, row.health_s * 1e3, *gaps, seen.tokens_per_s))
    for line, answers in zip(table(head, cells).splitlines(), ("answers", *map(_answers, rows)), strict=True):
        print(f"{line}  {answers}")
    ratio = checks.stretch(rows)
    if ratio is not None:
        print(f"p99 of the streams' inter-token latency while long prompts arrive: {ratio:.2f} of that alone")


# -- the poison --------------------------------------------------------------------------------------------------------


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def poisoned_copy(model: Path, folder: Path) -> int:
    """Fill an empty folder with links to the checkpoint's files and a changed embedding; returns the poisoned token's
    id.

    A tied output head is untied, so that it keeps its weights.

    Raises:
        ConfigError: the model is no checkpoint in safetensors, or its embedding has another name.
    """
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model} is not the folder of a checkpoint: {error}.") from error
    index = model / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    name = places.get(_EMBEDDING, "model.safetensors")
    tensors = load_file(model / name) if (model / name).is_file() else {}
    if _EMBEDDING not in tensors:
        raise ConfigError(f"{model} has no {_EMBEDDING} in safetensors; give the folder of another checkpoint.")
    if config.get("tie_word_embeddings"):
        tensors[_HEAD] = tensors[_EMBEDDING].clone()
        places |= {_HEAD: name} if places else {}
    token = len(tensors[_EMBEDDING]) - 1
    tensors[_EMBEDDING][token] = float("nan")
    save_file(tensors, folder / name, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    if places:
        (folder / index.name).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for file in model.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file.resolve())
    return token
