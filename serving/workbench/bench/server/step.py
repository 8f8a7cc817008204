"""`ubatch bench step`: where the time of a decode step and of a prefill goes, with torch's kernels and with those in C.

`LLM` runs in a process, on all cores: a step that prefills the prompts of all requests, then steps in which each
request decodes one token. Processes differ in their kernels:

    torch    kernels in C are switched off (`UBATCH_C_KERNELS=0`), and `auto` chooses among torch's ways
    native   as everybody has it

One arm runs at a time, A B B A. Each has every dtype, and each of these twice: with clocks at the boundaries of
`serving.workbench.bench.server.step_times`, which gives the table, and without, which gives the time that users get.
Their quotient is what the clocks cost. Both repeat recorded decode steps where users do.

A visit is one call of `LLM.generate`; of its decode steps the one with the median time counts, as a whole. A share is
the mean over the blocks, and its milliseconds are that share of the median step: they add up to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from serving.arguments.fields import Flag
from serving.llm import LLM
from serving.options.flags.fields import parse_bytes
from serving.workbench.bench.generate import completions
from serving.workbench.bench.server.offline import Workload, random_prompts
from serving.workbench.bench.server.step_times import Kind, Stopwatch
from serving.workbench.bench.statistics import Interval, bootstrap, columns, environment, interleave_arms, paired
from serving.workbench.bench.step_setting import ModelOptions, block_means, model_folder
from ubatch import ConfigError, UBatchError
from ubatch.kernels.c_jit import OFF_VARIABLE, why_not_c

_PAGE = 16  # tokens of a page of the cache; a step has at least as many
_STEPS = ("decode", "prefill")

Seconds = Mapping[Kind, float]
"""Of one step, by kind of work."""


class Options(ModelOptions):
    """What to measure."""

    requests: Annotated[int, Field(ge=1, description="prompts of the prefill, tokens of a decode step")] = 64
    prompt: Annotated[int, Field(ge=1, description="tokens of a prompt")] = 128
    steps: Annotated[int, Field(ge=4, description="decode steps of a visit; the first few record kernel calls")] = 16
    kv_cache_memory: Annotated[
        int | str,
        AfterValidator(parse_bytes),
        Flag(metavar="BYTES"),
        Field(description="of an engine's cache, which must have room for all requests, like 512M"),
    ] = "256M"
    dtypes: Annotated[tuple[Literal["float32", "bfloat16"], ...], Field(min_length=1, description="of the model")] = (
        "float32",
        "bfloat16",
    )
    kernels: Annotated[
        tuple[Literal["torch", "native"], ...], Field(min_length=1, description="torch's, and those in C")
    ] = ("torch", "native")


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


class _Arm:
    """Visits of one engine; remembers the times of their steps."""

    def __init__(self, visit: Callable[[], Mapping[str, Seconds]]) -> None:
        self._visit = visit
        self.steps: dict[str, list[Seconds]] = {name: [] for name in _STEPS}

    def __call__(self) -> float:
        for name, seconds in self._visit().items():
            self.steps[name].append(seconds)
        return sum(self.steps["decode"][-1].values()) * 1e3

    def ms(self, name: str, blocks: int) -> list[float]:
        """Block means of a step."""
        return block_means([sum(each.values()) * 1e3 for each in self.steps[name]], blocks)

    def shares(self, name: str, blocks: int) -> dict[Kind, float]:
        """Of each kind of work."""
        kept = self.steps[name][-2 * blocks :]
        return {kind: mean(each[kind] / sum(each.values()) for each in kept) for kind in Kind}


def run(options: Options) -> int:
    here = environment()
    print(f"{here['processor']}, {here['cores']} cores; {' '.join(here['processor_flags'])}")
    with model_folder(options) as model, ExitStack() as stack:
        visits = {kernels: stack.enter_context(_process(kernels, model, options)) for kernels in options.kernels}
        arms = {
            (f"{kernels} {dtype}", clocked): _Arm(partial(visit, dtype, clocked))
            for dtype in options.dtypes
            for kernels, visit in visits.items()
            if visit is not None
            for clocked in (False, True)
        }
        if not arms:
            raise ConfigError("without kernels in C there is nothing to measure: leave --kernels out.")
        names = {f"{name}, clocked" if clocked else name: arm for (name, clocked), arm in arms.items()}
        interleave_arms(names, options.blocks, label="steps")
    results = {name: _results(name, arms, options) for name in _STEPS}
    for name, found in results.items():
        _print(name, found, options)
    raw = {step: {name: arm.ms(step, options.blocks) for name, arm in names.items()} for step in _STEPS}
    options.write({"arms_ms": raw, "results": results})
    return 0


def _results(step: str, arms: Mapping[tuple[str, bool], _Arm], options: Options) -> dict[str, StepResult]:
    """By kernels and dtype."""
    found = {}
    for name in dict.fromkeys(name for name, _ in arms):
        plain, clocked = (arms[name, each].ms(step, options.blocks) for each in (False, True))
        torchs = arms.get((f"torch {name.split()[1]}", False))
        share, whole = arms[name, True].shares(step, options.blocks), bootstrap(clocked)
        found[name] = StepResult(
            step_ms=bootstrap(plain),
            over_torch=None if torchs is None else paired(torchs.ms(step, options.blocks), plain),
            clocked_ms=whole,
            clocks=paired(clocked, plain),
            share={str(kind): each for kind, each in share.items()},
            parts_ms={str(kind): each * whole.median for kind, each in share.items()},
        )
    return found


def _print(step: str, found: Mapping[str, StepResult], options: Options) -> None:
    what = f"a prefill of {options.requests * options.prompt} tokens, {options.requests} prompts"
    if step == "decode":
        what = f"a decode step of {options.requests} requests, {options.steps} after {options.prompt} tokens"
    print(f"\n{what}: ms and share by kind of work")
    rows = [["", *found]]
    for kind in Kind:
        parts = [f"{each.parts_ms[kind]:.2f} {each.share[kind]:>4.0%}" for each in found.values()]
        rows.append([str(kind), *parts])
    rows.append(["together", *(f"{each.clocked_ms.median:.2f} 100%" for each in found.values())])
    rows.append(["without clocks", *(f"{each.step_ms:.2f}" for each in found.values())])
    rows.append(["with clocks / without", *(f"{each.clocks:.3f}" for each in found.values())])
    rows.append(
        ["torch's time / this", *(f"{each.over_torch:.2f}" if each.over_torch else "-" for each in found.values())]
    )
    print(columns(rows), flush=True)


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
