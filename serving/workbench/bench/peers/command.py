"""The options of `ubatch bench peers`, and the order of things: engines and their loads, then servers and theirs.

Results are times, ratios to ours and equal tokens, per engine and dtype.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from serving.arguments.fields import Flag
from serving.workbench.bench.options import SERVER, BlockOptions, Counts, Dtypes, ModelFolder
from serving.workbench.bench.peers.process import Arm, EngineProcess, running_engine
from serving.workbench.bench.server.load import figures_of
from serving.workbench.bench.server.offline import Workload, random_prompts
from serving.workbench.bench.server.process import UBATCH, ServerProcess, running_server, wait_for_rest
from serving.workbench.bench.server.requests import RequestFailed, Server, greedy_tasks, send_and_check
from serving.workbench.bench.statistics import Interval, bootstrap, interleave_arms, paired, print_machine, table
from ubatch import ConfigError, UBatchError
from ubatch.process import num_cores


class Part(StrEnum):
    OFFLINE = "offline"
    """all prompts at once"""
    ONE = "one"
    """one request alone"""
    FIRST = "first"
    """time to first token: one long prompt, one token"""
    SERVED = "served"
    """requests over HTTP, several clients at a time"""


class Options(BlockOptions):
    """What to measure."""

    measures = SERVER

    model: ModelFolder
    vllm: Annotated[str | None, Flag(metavar="PYTHON")] = Field(
        None, description="interpreter of an environment with vLLM for CPUs"
    )
    transformers: Annotated[str | None, Flag(metavar="PYTHON")] = Field(
        None, description="interpreter of an environment with transformers"
    )
    only: tuple[Part, ...] = Field((*Part,), min_length=1, description="the loads to measure")
    dtypes: Dtypes = ("bfloat16", "float32")
    prompts: int = Field(64, ge=1, description="offline: prompts")
    input_len: int = Field(128, ge=1, description="offline, one, served: tokens of a prompt")
    output_len: int = Field(64, ge=1, description="offline, served: new tokens of a prompt")
    one_output_len: int = Field(256, ge=1, description="one: new tokens")
    first_input_len: int = Field(4000, ge=1, description="first: tokens of the prompt")
    clients: Counts = Field((16, 64), description="served: requests at a time")
    requests: int = Field(2, ge=1, description="served: requests of every client, one after the other")
    timeout_s: float = Field(900.0, gt=0, description="an engine may take that long to start, or for a visit")

    def peers(self) -> dict[str, str]:
        """Name of a peer -> its interpreter."""
        given = {"vllm": self.vllm, "transformers": self.transformers}
        return {name: python for name, python in given.items() if python is not None}

    def arms(self) -> list[Arm]:
        """Every engine in every dtype; those that are compared stand side by side."""
        return [
            Arm(name, dtype, python) for dtype in self.dtypes for name, python in ({OURS: None} | self.peers()).items()
        ]

    def offline_loads(self) -> dict[str, Workload]:
        loads = {
            Part.OFFLINE: Workload(self.prompts, self.input_len, self.output_len),
            Part.ONE: Workload(1, self.input_len, self.one_output_len),
            Part.FIRST: Workload(1, self.first_input_len, 1),
        }
        return {str(part): load for part, load in loads.items() if part in self.only}

    def served_loads(self) -> dict[int, Workload]:
        """By clients."""
        counts = self.clients if Part.SERVED in self.only else ()
        return {count: Workload(count * self.requests, self.input_len, self.output_len) for count in counts}


def run(options: Options) -> int:
    """Measure, print and write; returns 1 if an engine failed. What was measured before Ctrl-C is written, too."""
    _check(options)
    print_machine()
    report = _Report()
    try:
        _measure_offline(options, report)
        _measure_served(options, report)
    finally:
        options.write(vars(report))
    return 1 if report.failed or any(result.failed for result in report.loads) else 0


class _Report:
    """What was found so far. `failed` has engines that did not start; if `restless`, an engine computed while others
    were measured, and the figures are too low."""

    def __init__(self) -> None:
        self.versions: dict[str, Mapping[str, str]] = {}
        self.loads: list[LoadResult] = []
        self.failed: dict[str, str] = {}
        self.restless = False

    @contextmanager
    def starting(self, name: str) -> Iterator[None]:
        """An engine that does not start is noted, and left out."""
        try:
            yield
        except UBatchError as error:
            self.failed[name] = str(error)
            print(f"{name} does not start: {error}", file=sys.stderr, flush=True)

    def add(self, result: LoadResult) -> None:
        result.print()
        self.loads.append(result)

    def rest(self, sessions: Collection[int]) -> None:
        """Before every visit: the engines of the visits before it come to rest."""
        if not wait_for_rest(sessions) and not self.restless:
            self.restless = True
            print("idle engines still compute: what is measured meanwhile is too slow.", file=sys.stderr, flush=True)


def _check(options: Options) -> None:
    if sys.platform != "linux":
        raise ConfigError("it sees in /proc when engines are at rest, which only Linux has.")
    if not options.peers():
        raise ConfigError("name a peer's interpreter with --vllm or --transformers.")
    for name, python in options.peers().items():
        if shutil.which(python) is None:
            raise ConfigError(
                f"--{name}: {python} is no program; give an environment's interpreter, as in ENV/bin/python."
            )
    if set(options.only) == {Part.SERVED} and options.vllm is None:
        raise ConfigError("served needs --vllm: of the peers only vLLM is measured as a server.")
    longest = json.loads((options.model / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    for load in [*options.offline_loads().values(), *options.served_loads().values()]:
        if longest is not None and load.input_len + load.output_len > longest:
            raise ConfigError(
                f"{load} needs {load.input_len + load.output_len} positions, but {options.model} has {longest}. "
                "Lower --input-len, --output-len, --one-output-len or --first-input-len, or leave it out with --only."
            )


def _measure_offline(options: Options, report: _Report) -> None:
    loads = options.offline_loads()
    settings = {"model": str(options.model), "threads": num_cores(), "max_model_len": _longest(loads.values())}
    settings["max_num_seqs"] = max((load.prompts for load in loads.values()), default=0)
    engines: dict[Arm, EngineProcess] = {}
    with ExitStack() as stack:
        for arm in options.arms() if loads else []:
            with report.starting(str(arm)):
                engine = stack.enter_context(running_engine(arm, options.timeout_s))
                versions = engine.load(settings | {"dtype": arm.dtype})
                report.versions[arm.engine] = versions
                print(f"{arm}: {', '.join(f'{name} {version}' for name, version in versions.items())}", flush=True)
                engines[arm] = engine
        for name, load in loads.items():
            running = {arm: engine for arm, engine in engines.items() if not engine.ended}
            if not _comparable(running):
                return
            prompts = random_prompts(options.model, load)
            visits = {arm: partial(engine.generate, prompts, load.output_len) for arm, engine in running.items()}
            rest = partial(report.rest, [engine.pid for engine in running.values()])
            report.add(measure_load(name, load, visits, options.blocks, rest))


def _measure_served(options: Options, report: _Report) -> None:
    loads = options.served_loads()
    start = partial(
        running_arm,
        model=options.model,
        max_model_len=_longest(loads.values()),
        max_num_seqs=max(loads, default=0),
        timeout_s=options.timeout_s,
    )
    servers: dict[Arm, ServerProcess] = {}
    with ExitStack() as stack:
        for arm in options.arms() if options.vllm is not None and loads else []:
            if arm.engine != "transformers":
                with report.starting(f"{arm}, served"):
                    servers[arm] = stack.enter_context(start(arm))
        for clients, load in loads.items():
            running = {arm: server for arm, server in servers.items() if server.process.poll() is None}
            if not _comparable(running):
                return
            prompts = random_prompts(options.model, load)
            visits = {
                arm: served_visit(server, options.model, prompts, load.output_len, clients, options.timeout_s)
                for arm, server in running.items()
            }
            rest = partial(report.rest, [server.process.pid for server in running.values()])
            report.add(measure_load(f"served, {clients} clients", load, visits, options.blocks, rest))


def _longest(loads: Iterable[Workload]) -> int:
    return max((load.input_len + load.output_len for load in loads), default=0)


def _comparable(arms: Iterable[Arm]) -> bool:
    """Whether ours and a peer are left."""
    return {OURS} < {arm.engine for arm in arms}


_VLLM = (
    "import importlib.metadata, sys, vllm; version = importlib.metadata.version; "
    "importlib.metadata.version = lambda name: vllm.__version__ if name == 'vllm' else version(name); "
    "from vllm.entrypoints.cli.main import main; sys.exit(main())"
)
"""The `vllm` command, which asks for the version of the package `vllm`; the package for CPUs is called otherwise."""


@contextmanager
def running_arm(
    arm: Arm, model: Path, *, max_model_len: int, max_num_seqs: int, timeout_s: float
) -> Iterator[ServerProcess]:
    """The engine's server, without prefix cache, as every visit sends the same prompts. Raises ServerFailed."""
    flags = ["--host", "127.0.0.1", "--dtype", arm.dtype, "--no-enable-prefix-caching"]
    flags += ["--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs)]
    program: Sequence[str] = UBATCH
    if arm.engine == "vllm":
        program = (*arm.interpreter(), "-c", _VLLM)
        flags.append("--disable-uvicorn-access-log")  # ours has none unless asked for
    environment = arm.variables()
    with running_server(model, flags, environment=environment, program=program, start_s=timeout_s) as server:
        yield server


def served_visit(
    process: ServerProcess,
    model: Path,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    clients: int,
    timeout_s: float,
) -> Visit:
    """A visit that sends all prompts, `clients` at a time, as streams; its time ends with the last answer."""
    server = Server(process.base_url, str(model), timeout_s=timeout_s)
    tasks = greedy_tasks(prompts, output_len)

    def visit() -> tuple[float, list[str]]:
        try:
            outcomes = asyncio.run(send_and_check(server, tasks, max_concurrency=clients))
        except RequestFailed as error:
            process.stop()  # what it still computes would slow the others down
            raise RequestFailed(f"{error}\n{process.output()}") from None
        return figures_of(outcomes).duration_s, [each.text for each in outcomes]

    return visit


# -- results of a load -------------------------------------------------------------------------------------------------


OURS = "ubatch"

Visit: TypeAlias = Callable[[], tuple[float, Sequence[Sequence[Any]]]]
"""Runs a load once; returns the seconds, and the tokens or the text of every request. Raises UBatchError."""


@dataclass(frozen=True)
class Same:
    """Equality with ours in the same dtype, in the last visit: requests whose tokens are all equal, and the share of
    tokens before the first difference, after which the rest follows from other tokens. Of served requests, texts."""

    requests: int
    of: int
    before_difference: float


@dataclass(frozen=True)
class Best:
    """Our fastest dtype against a peer's: the arms' names, and the peer's time / ours."""

    ours: str
    theirs: str
    ratio: Interval


@dataclass(frozen=True)
class LoadResult:
    """Figures of a load, by arm (`vllm bfloat16`). Arms that failed have none, but a reason.

    Attributes:
        arms_ms: block means.
        tokens_per_s: new tokens per second.
        ratio: the arm's time / ours in the same dtype; above 1 ours is faster.
        same: against ours in the same dtype.
        best: by peer; the fastest dtype of each has the smallest median of these very times.
        failed: why an arm has no figures.
    """

    name: str
    workload: Workload
    arms_ms: Mapping[str, Sequence[float]]
    tokens_per_s: Mapping[str, Interval]
    ratio: Mapping[str, Interval]
    same: Mapping[str, Same]
    best: Mapping[str, Best]
    failed: Mapping[str, str]

    def print(self) -> None:
        print(f"\n{self.name}: {self.workload}")
        head = {"": "", "ms": ".0f", "new tokens/s": ".1f", "time / ubatch's": ".2f"}
        head |= {"same requests": "", "until they differ": ".0%"}
        rows = []
        for name, values in self.arms_ms.items():
            same = self.same.get(name)
            equal = (None, None) if same is None else (f"{same.requests} of {same.of}", same.before_difference)
            rows.append((name, bootstrap(values), self.tokens_per_s[name], self.ratio.get(name), *equal))
        print(table(head, rows))
        for best in self.best.values():
            print(f"  best type of each: time of {best.theirs} / {best.ours}   {best.ratio:.3f}")
        for name, why in self.failed.items():
            print(f"  {name} has no figures: {why.splitlines()[0]}")
        sys.stdout.flush()


class _Visits:
    """An arm's visits. After one that failed there are no more: the others go on."""

    def __init__(self, name: str, visit: Visit, before: Callable[[], object]) -> None:
        self._name, self._visit, self._before = name, visit, before
        self.outputs: Sequence[Sequence[Any]] = ()
        self.failed: str | None = None

    def __call__(self) -> float:
        """Milliseconds of a visit; NaN if one has failed."""
        if self.failed is not None:
            return math.nan
        self._before()
        try:
            seconds, self.outputs = self._visit()
        except UBatchError as error:
            self.failed = str(error)
            print(f"{self._name} failed: {error}", file=sys.stderr, flush=True)
            return math.nan
        return seconds * 1e3


def measure_load(
    name: str, workload: Workload, visits: Mapping[Arm, Visit], blocks: int, before: Callable[[], object]
) -> LoadResult:
    """Interleave the arms' visits, with a call of `before` before each, and compute the figures."""
    arms = {arm: _Visits(str(arm), visit, before) for arm, visit in visits.items()}
    measured = interleave_arms({str(arm): each for arm, each in arms.items()}, blocks, label=name)
    ms = {arm: measured[str(arm)] for arm, each in arms.items() if each.failed is None}
    ratio, same = {}, {}
    for arm in ms:
        ours = Arm(OURS, arm.dtype, None)
        if arm != ours and ours in ms:
            ratio[str(arm)] = paired(ms[arm], ms[ours])
            same[str(arm)] = same_tokens(arms[ours].outputs, arms[arm].outputs)
    new_tokens = workload.prompts * workload.output_len
    return LoadResult(
        name=name,
        workload=workload,
        arms_ms={str(arm): values for arm, values in ms.items()},
        tokens_per_s={str(arm): bootstrap([1e3 * new_tokens / each for each in values]) for arm, values in ms.items()},
        ratio=ratio,
        same=same,
        best=_best(ms),
        failed={str(arm): each.failed for arm, each in arms.items() if each.failed is not None},
    )


def same_tokens(ours: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]) -> Same:
    pairs = list(zip(ours, theirs, strict=True))
    equal = sum(len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))) for a, b in pairs)
    before_difference = equal / max(1, sum(max(len(a), len(b)) for a, b in pairs))
    return Same(sum(list(a) == list(b) for a, b in pairs), len(pairs), before_difference)


def _best(ms: Mapping[Arm, Sequence[float]]) -> dict[str, Best]:
    fastest: dict[str, Arm] = {}
    for arm in sorted(ms, key=lambda each: median(ms[each])):
        fastest.setdefault(arm.engine, arm)
    ours = fastest.pop(OURS, None)
    if ours is None:
        return {}
    return {peer: Best(str(ours), str(arm), paired(ms[arm], ms[ours])) for peer, arm in fastest.items()}
