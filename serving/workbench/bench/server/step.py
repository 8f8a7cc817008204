"""`ubatch bench step`: where the time of a decode step and of a prefill goes, with torch's kernels and with those in C.

`LLM` runs in a process, on all cores: a step that prefills the prompts of all requests, then steps in which each
request decodes one token. Processes differ in their kernels:

    torch    kernels in C are switched off (`UBATCH_C_KERNELS=0`), and `auto` chooses among torch's ways
    native   as everybody has it

One arm runs at a time, A B B A. Each has every dtype, and each of these twice: with clocks at the boundaries of kinds
of work, which gives the table, and without, which gives the time that users get. Their quotient is what the clocks
cost. Both repeat recorded decode steps where users do.

A visit is one call of `LLM.generate`; of its decode steps the one with the median time counts, as a whole. A share is
the mean over the blocks, and its milliseconds are that share of the median step: they add up to it.

Nothing is sampled: while steps are timed, the functions of `_BOUNDARIES` are replaced by ones that look at the clock
when they begin and end. A moment counts for the function that began last and has not ended, so kinds do not overlap,
and add up to the step; what is in none is `OTHER`. Within a kind that is no container (see `_CONTAINERS`), inner
boundaries do not count: the gate's product is the router's.

A decode step may repeat recorded kernel calls (`model_runner.decoder.repeated`), without the functions around them. If
it is recorded while steps are timed, its calls carry their clock, and count for the kind that recorded them; the Python
that repeats them is `OTHER`. So a model should be recorded either timed or not: use an engine for each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial, wraps
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from model_runner import PendingStep, step_runner
from model_runner.decoder import decoder, latent_attention, layers, rope, scatter, sparse_mlp
from moe import FusedMoEModularKernel
from serving.arguments.fields import Flag
from serving.engine.rank.core import EngineCore
from serving.llm import LLM
from serving.options.flags.fields import parse_bytes
from serving.scheduler import Scheduler
from serving.workbench.bench.generate import completions
from serving.workbench.bench.options import Dtypes
from serving.workbench.bench.server.offline import Workload, random_prompts
from serving.workbench.bench.statistics import Interval, bootstrap, interleave_arms, paired, print_machine, table
from serving.workbench.bench.step_setting import ModelOptions, model_folder
from ubatch import ConfigError, UBatchError
from ubatch.kernels import OFF_VARIABLE, Recording, why_not_c


class Kind(StrEnum):
    """A kind of work; its value is the name in tables."""

    ATTENTION = "attention"
    PROJECTIONS = "projections"
    EXPERTS = "experts"
    ROUTER = "gate, router"
    SMALL = "embedding, norms, rope"
    LOGITS = "logits"
    SAMPLING = "sampling"
    BATCH = "batch, vote, plan"
    SCHEDULING = "scheduling"
    OTHER = "other"
    """Python between the others, and small operators of torch"""


_CONTAINERS = (Kind.OTHER, Kind.ATTENTION, Kind.EXPERTS)
_BOUNDARIES: tuple[tuple[Kind, Any, tuple[str, ...]], ...] = (
    (Kind.ATTENTION, layers.Attention, ("forward",)),
    (Kind.ATTENTION, latent_attention.LatentAttention, ("forward",)),
    (Kind.PROJECTIONS, layers.Projection, ("forward",)),
    (Kind.EXPERTS, FusedMoEModularKernel, ("forward",)),
    (Kind.ROUTER, layers.Projection, ("scores",)),  # logits' is within theirs
    (Kind.ROUTER, sparse_mlp, ("route",)),
    (Kind.SMALL, layers.Projection, ("rows",)),
    (Kind.SMALL, rope.RotaryEmbedding, ("forward",)),
    (Kind.SMALL, rope.RotaryTable, ("forward",)),
    (Kind.SMALL, scatter, ("add_norm",)),
    (Kind.SMALL, layers, ("normalise_and_rotate", "silu_mul")),
    (Kind.SMALL, latent_attention, ("rms_norm",)),
    (Kind.LOGITS, decoder.DecoderLM, ("compute_logits",)),
    (Kind.SAMPLING, PendingStep, ("sample", "result")),
    (Kind.BATCH, step_runner, ("build_input_batch", "plan_step")),
    (Kind.BATCH, step_runner.StepRunner, ("agree",)),
    (Kind.SCHEDULING, Scheduler, ("schedule", "advance", "process")),
)


class Stopwatch:
    """Times the steps of the engines in this process that run in the caller's thread."""

    def __init__(self) -> None:
        self._steps: list[Mapping[Kind, float]] = []
        self._seconds = dict.fromkeys(Kind, 0.0)
        self._kinds = [Kind.OTHER]
        self._since = 0.0

    @contextmanager
    def steps(self, *, split: bool) -> Iterator[list[Mapping[Kind, float]]]:
        """Time what `LLM.generate` runs in the `with` block: a list that has the seconds of every step afterwards.

        Args:
            split: by kind of work; else all is `OTHER`, and nothing but the begin of a step is looked at.
        """
        self._steps, found = [], list[Mapping[Kind, float]]()
        with ExitStack() as stack:
            for name in ("step", "drain"):  # the loop over steps ends with a drain
                stack.enter_context(_replaced(EngineCore, name, self._beginning))
            if split:
                for kind, owner, names in _BOUNDARIES:
                    for name in names:
                        stack.enter_context(_replaced(owner, name, partial(self.timed, kind)))
                stack.enter_context(_replaced(Recording, "note", self._noting))
            yield found
        found += self._steps[1:]  # the first is what was before the steps

    def timed(self, kind: Kind, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time counts for `kind`."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._kinds[-1] not in _CONTAINERS:
                return function(*args, **kwargs)
            self._charge()
            self._kinds.append(kind)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                self._kinds.pop()

        return run

    def _charge(self) -> None:
        now = time.perf_counter()
        self._seconds[self._kinds[-1]] += now - self._since
        self._since = now

    def _beginning(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def run(*args: Any) -> Any:
            self._charge()
            self._steps.append(self._seconds)
            self._seconds = dict.fromkeys(Kind, 0.0)
            return step(*args)

        return run

    def _noting(self, note: Callable[..., None]) -> Callable[..., None]:
        """The kernel's call is recorded with a clock of its own."""

        def run(recording: Recording, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            kind = self._kinds[-1]

            def call(*args: Any) -> None:
                self._charge()
                function(*args)
                now = time.perf_counter()
                self._seconds[kind] += now - self._since
                self._since = now

            note(recording, call, arguments)

        return run


@contextmanager
def _replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """The attribute of a class or module, changed within the block."""
    before = vars(owner)[name]
    setattr(owner, name, change(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


# -- the command -------------------------------------------------------------------------------------------------------


_PAGE = 16  # tokens of a page of the cache; a step has at least as many
_STEPS = ("decode", "prefill")
_CLOCKED = ", clocked"

Seconds = Mapping[Kind, float]
"""Of one step, by kind of work."""


class Options(ModelOptions):
    """What to measure."""

    requests: int = Field(64, ge=1, description="prompts of the prefill, tokens of a decode step")
    prompt: int = Field(128, ge=1, description="tokens of a prompt")
    steps: int = Field(16, ge=4, description="decode steps of a visit; the first few record kernel calls")
    kv_cache_memory: Annotated[int | str, AfterValidator(parse_bytes), Flag(metavar="BYTES")] = Field(
        "256M", description="of an engine's cache, which must have room for all requests, like 512M"
    )
    dtypes: Dtypes = ("float32", "bfloat16")
    kernels: tuple[Literal["torch", "native"], ...] = Field(
        ("torch", "native"), min_length=1, description="torch's, and those in C"
    )


@dataclass(frozen=True)
class StepResult:
    """One kind of step with some kernels in some dtype.

    Attributes:
        step_ms: without clocks: what users get.
        over_torch: time with torch's kernels / this; None if these were not measured.
        clocked_ms: with clocks.
        clocks: clocked / not clocked.
        share: of each kind of work in the step with clocks.
        parts_ms: the share of the median of `clocked_ms`.
    """

    step_ms: Interval
    over_torch: Interval | None
    clocked_ms: Interval
    clocks: Interval
    share: Mapping[str, float]
    parts_ms: Mapping[str, float]


def _figures(name: str, visit: _Visit, dtype: str, clocked: bool) -> dict[str, float]:
    """Figures of a visit of one engine: milliseconds of each step, and shares of each kind of work."""
    found = {}
    for step, seconds in visit(dtype, clocked).items():
        whole = sum(seconds.values())
        found[f"{step} {name}"] = whole * 1e3
        found |= {f"{step} {name} {kind}": seconds[kind] / whole for kind in Kind}
    return found


def run(options: Options) -> int:
    print_machine()
    with model_folder(options) as model, ExitStack() as stack:
        visits = {kernels: stack.enter_context(_process(kernels, model, options)) for kernels in options.kernels}
        running = {kernels: visit for kernels, visit in visits.items() if visit is not None}
        if not running:
            raise ConfigError("without kernels in C there is nothing to measure: leave --kernels out.")
        arms = {
            f"{kernels} {dtype}{clock}": partial(_figures, f"{kernels} {dtype}{clock}", visit, dtype, bool(clock))
            for dtype in options.dtypes
            for kernels, visit in running.items()
            for clock in ("", _CLOCKED)
        }
        measured = interleave_arms(arms, options.blocks, label="steps")
    names = [name for name in arms if not name.endswith(_CLOCKED)]
    results = {step: {name: _result(step, name, measured) for name in names} for step in _STEPS}
    for step, found in results.items():
        _print(step, found, options)
    raw = {step: {name: measured[f"{step} {name}"] for name in arms} for step in _STEPS}
    options.write({"arms_ms": raw, "results": results})
    return 0


def _result(step: str, name: str, measured: Mapping[str, Sequence[float]]) -> StepResult:
    plain, clocked = (measured[f"{step} {name}{clock}"] for clock in ("", _CLOCKED))
    torchs = measured.get(f"{step} torch {name.split()[1]}")
    share = {str(kind): mean(measured[f"{step} {name}{_CLOCKED} {kind}"]) for kind in Kind}
    whole = bootstrap(clocked)
    return StepResult(
        step_ms=bootstrap(plain),
        over_torch=None if torchs is None else paired(torchs, plain),
        clocked_ms=whole,
        clocks=paired(clocked, plain),
        share=share,
        parts_ms={kind: each * whole.median for kind, each in share.items()},
    )


def _print(step: str, found: Mapping[str, StepResult], options: Options) -> None:
    what = f"a prefill of {options.requests * options.prompt} tokens, {options.requests} prompts"
    if step == "decode":
        what = f"a decode step of {options.requests} requests, {options.steps} after {options.prompt} tokens"
    print(f"\n{what}: ms and share by kind of work")
    cells: dict[str, Callable[[StepResult], object]] = {
        **{kind: partial(_part, kind) for kind in Kind},
        "together": lambda each: f"{each.clocked_ms.median:.2f} 100%",
        "without clocks": lambda each: each.step_ms,
        "with clocks / without": lambda each: f"{each.clocks:.3f}",
        "torch's time / this": lambda each: each.over_torch,
    }
    rows = [(what, *map(cell, found.values())) for what, cell in cells.items()]
    print(table({"": "", **dict.fromkeys(found, ".2f")}, rows), flush=True)


def _part(kind: Kind, result: StepResult) -> str:
    return f"{result.parts_ms[kind]:.2f} {result.share[kind]:>4.0%}"


# -- the processes ----------------------------------------------------------------------------------------------------

_Visit = Callable[[str, bool], Mapping[str, Seconds]]


@contextmanager
def _process(kernels: str, model: Path, options: Options) -> Iterator[_Visit | None]:
    """A process with these kernels, which makes visits in a dtype, clocked or not; None if it cannot have them."""
    with ProcessPoolExecutor(1, get_context("spawn"), _begin, (kernels, model, options)) as pool:

        def ask(task: Callable[..., Any], *args: Any) -> Any:
            try:
                return pool.submit(task, *args).result()
            except BrokenProcessPool as error:
                raise UBatchError(f"the process with {kernels} kernels ended: {error}") from error

        missing = ask(why_not_c) if kernels == "native" else None
        if missing is not None:
            print(f"native is left out: {missing}")
        yield None if missing is not None else partial(ask, _visit)


_of_process: dict[str, Any] = {}
"""What `_begin` was told."""


def _begin(kernels: str, model: Path, options: Options) -> None:
    if kernels == "torch":
        os.environ[OFF_VARIABLE] = "0"
    _of_process.update(model=model, options=options, stopwatch=Stopwatch())


@cache
def _engine(dtype: str, clocked: bool) -> LLM:
    """One for each, because recorded steps have clocks or none."""
    options: Options = _of_process["options"]
    return LLM(
        _of_process["model"],
        dtype=dtype,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        max_num_seqs=options.requests,
        max_num_batched_tokens=max(_PAGE, options.requests * options.prompt),
        block_size=_PAGE,
        kv_cache_memory=options.kv_cache_memory,
    )


def _visit(dtype: str, clocked: bool) -> dict[str, Seconds]:
    """Generate once; the prefill's times, and those of the decode step with the median time."""
    options: Options = _of_process["options"]
    stopwatch: Stopwatch = _of_process["stopwatch"]
    llm = _engine(dtype, clocked)
    prompts = random_prompts(_of_process["model"], Workload(options.requests, options.prompt, options.steps + 1))
    with stopwatch.steps(split=clocked) as steps:
        completions(llm, prompts, options.steps + 1)
    prefill, *decodes = steps
    if len(decodes) != options.steps:
        raise ConfigError(
            f"{len(decodes)} decode steps ran, not {options.steps}: the KV cache has no room for all requests at once. "
            "Raise --kv-cache-memory, or lower --requests."
        )
    decodes.sort(key=lambda each: sum(each.values()))
    return {"prefill": prefill, "decode": decodes[len(decodes) // 2]}
