"""`ubatch bench speculation`: generate with and without guessed tokens, on source text outside the training data.

    without       one token a step
    ngram         guesses the tokens that followed the same last tokens earlier in the text
    eagle_chain   a trained head, one guess a step
    eagle_tree    the same head, the likeliest guesses as a tree

The arms' tokens are compared first: greedy tokens must not depend on the guesses. Then every arm generates the same
text, interleaved A B B A, for one request alone and for several at once; the time per token covers the steps after the
prompts, drafting included. Last, two ranks that share experts overlap their verify steps, and these are counted.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field

from model_runner import SamplingParams
from serving.engine import EngineCore, EngineOptions
from serving.engine.rank.build import make_core, make_runner
from serving.engine.speculation import Algorithm, SpeculationConfig
from serving.llm import LLM
from serving.requests import DraftCounts, RequestInput
from serving.scheduler import SchedulerConfig
from serving.text.tokenizer import load_tokenizer
from serving.workbench.bench.corpus import read_corpus
from serving.workbench.bench.generate import completions
from serving.workbench.bench.options import BlockOptions, Checkpoint, Counts
from serving.workbench.bench.statistics import Interval, bootstrap, interleave_arms, paired, table
from ubatch import ConfigError, DeclineReason, UBatchError
from ubatch.process import num_cores

_EXAMPLES = Path(__file__).resolve().parents[4] / "examples" / "models"
_WITHOUT = "without"
_CACHE_BYTES = 64 << 20


class Options(BlockOptions):
    """What to measure."""

    unwritten: ClassVar[frozenset[str]] = frozenset({"model", "draft"})

    model: Checkpoint = Field(
        _EXAMPLES / "tiny-moe",
        description="folder of a checkpoint with its tokenizer; by default the examples' tiny-moe",
    )
    draft: Checkpoint = Field(
        _EXAMPLES / "tiny-moe-eagle",
        description="folder of an EAGLE-style head for it; by default the examples' tiny-moe-eagle",
    )
    num_draft_tokens: int = Field(3, ge=1, description="drafts of a chain, and steps of the head")
    tree_topk: int = Field(2, ge=2, description="guesses that each step of a tree continues")
    tree_draft_tokens: int = Field(5, ge=1, description="drafts of a tree")
    batches: Counts = Field((1, 8), description="requests at once")
    prompts: int = Field(8, ge=1, description="prompts: pieces of held-out source files")
    input_len: int = Field(64, ge=1, description="their tokens")
    output_len: int = Field(64, ge=2, description="tokens of their continuations")
    threads: int | None = Field(None, ge=1, description="compute threads; by default one per core")
    census: bool = Field(True, description="also run two overlapped ranks, and count their verify steps")


@dataclass(frozen=True)
class Acceptance:
    """How good the guesses were, over all prompts.

    Attributes:
        verify_steps: verify steps of all requests: a step with three requests counts three times.
        mean_length: tokens per verify step of a request; None if nothing was guessed.
        per_position: share of these verify steps in which at least 1, 2, ... guesses were right.
    """

    same: bool
    verify_steps: int
    drafted: int
    mean_length: float | None
    per_position: Sequence[float]


@dataclass(frozen=True)
class SpeculationResult:
    """Figures of `batch` requests at once, per arm.

    Attributes:
        arms_ms: raw block means of the time per generated token.
        tokens_per_s: generated tokens per second of all requests together.
        speedup: time without guesses / the arm's time.
    """

    batch: int
    arms_ms: Mapping[str, Sequence[float]]
    tokens_per_s: Mapping[str, Interval]
    speedup: Mapping[str, Interval]
    acceptance: Mapping[str, Acceptance]

    def print(self) -> None:
        print(f"\nspeculation: {self.batch} request{'s' if self.batch > 1 else ''} at once")
        head = {"": "", "ms/token": ".3f", "tokens/s": ".0f", "speed-up": ".3f", "mean length": ".2f"}
        rows = []
        for name, values in self.arms_ms.items():
            length, right = None, ""
            if (found := self.acceptance.get(name)) is not None:
                length, right = found.mean_length, ", ".join(f"{share:.0%}" for share in found.per_position)
            rows.append((name, bootstrap(values), self.tokens_per_s[name], self.speedup.get(name), length, right))
        print(table(head | {"right at 1, 2, ...": ""}, rows), flush=True)


def run(options: Options) -> int:
    if options.prompts < max(options.batches):
        raise ConfigError(f"--batches has {max(options.batches)}, but --prompts is {options.prompts}. Raise --prompts.")
    threads = num_cores() if options.threads is None else options.threads
    torch.set_num_threads(threads)
    prompts = held_out_prompts(options.model, options.prompts, options.input_len)
    arms = _arms(options)
    print(f"{len(prompts)} prompts of {options.input_len} tokens, {options.output_len} new; {threads} threads")
    results = []
    with ExitStack() as stack:
        cores = {name: stack.enter_context(_core(options, arm)) for name, arm in arms.items()}
        for batch in options.batches:
            results.append(_measure(cores, prompts, batch, options))
            results[-1].print()
    census: Census | None = None
    if options.census:
        census = take_census(options.model, _chain(options), prompts, options.output_len)
        census.print()
    options.write({"results": results, "census": census})
    return 0


def held_out_prompts(model: Path, count: int, length: int) -> list[list[int]]:
    """Pieces of source files that neither model nor head was trained on, the same at every call."""
    tokenizer = load_tokenizer(model)
    stream = [token for text in read_corpus(0).held_out for token in tokenizer.encode(text)]
    between = len(stream) // count
    if between < length:
        raise UBatchError(f"the held-out text has {len(stream)} tokens, too few for {count} prompts of {length}.")
    return [stream[index * between : index * between + length] for index in range(count)]


# -- arms -------------------------------------------------------------------------------------------------------------


def _arms(options: Options) -> dict[str, SpeculationConfig | None]:
    chain = _chain(options)
    return {
        _WITHOUT: None,
        "ngram": SpeculationConfig(Algorithm.NGRAM, options.num_draft_tokens),
        "eagle_chain": chain,
        "eagle_tree": replace(chain, num_draft_tokens=options.tree_draft_tokens, topk=options.tree_topk),
    }


def _chain(options: Options) -> SpeculationConfig:
    steps = options.num_draft_tokens
    return SpeculationConfig(Algorithm.EAGLE, steps, num_steps=steps, draft_model_path=options.draft)


@contextmanager
def _core(options: Options, speculation: SpeculationConfig | None) -> Iterator[EngineCore]:
    """An engine of one rank, without a prefix cache."""
    scheduler = SchedulerConfig(
        max_num_seqs=max(options.batches),
        max_num_batched_tokens=max(2048, max(options.batches) * options.input_len),
        max_model_len=options.input_len + options.output_len + options.tree_draft_tokens * options.num_draft_tokens,
        enable_prefix_caching=False,
    )
    engine = EngineOptions(options.model, scheduler=scheduler, speculation=speculation, kv_cache_memory=_CACHE_BYTES)
    with make_runner(engine) as runner:
        yield make_core(engine, runner)


@dataclass
class _Generated:
    """Output of a batch: its tokens, how many were generated after the prompts' steps, and in how many seconds."""

    tokens: list[list[int]]
    drafts: DraftCounts
    decoded: int = 0
    seconds: float = 0.0


def _generate(core: EngineCore, prompts: Sequence[Sequence[int]], length: int) -> _Generated:
    """Generate all prompts at once, greedily; the clock starts when every prompt has its first token."""
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        core.add(RequestInput(str(index), prompt, params))
    generated = _Generated([[] for _ in prompts], DraftCounts())
    begin = None
    while core.has_work:
        if begin is None and all(generated.tokens):
            begin = time.perf_counter()
        for output in core.step():
            generated.tokens[int(output.request_id)] += output.token_ids
            generated.drafts += output.drafts
            if begin is not None:
                generated.decoded += len(output.token_ids)
    generated.seconds = time.perf_counter() - (begin or 0.0)
    return generated


# -- figures ----------------------------------------------------------------------------------------------------------


def _measure(
    cores: Mapping[str, EngineCore], prompts: Sequence[Sequence[int]], batch: int, options: Options
) -> SpeculationResult:
    """Compare the tokens first, then measure the times."""
    batches = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
    wanted = [_generate(cores[_WITHOUT], own, options.output_len).tokens for own in batches]
    acceptance = {
        name: _accept(name, core, batches, wanted, options) for name, core in cores.items() if name != _WITHOUT
    }

    def ms_per_token(core: EngineCore) -> float:
        done = [_generate(core, own, options.output_len) for own in batches]
        return sum(each.seconds for each in done) * 1e3 / sum(each.decoded for each in done)

    arms = {name: partial(ms_per_token, core) for name, core in cores.items()}
    arms_ms = interleave_arms(arms, options.blocks, label=f"batch {batch}")
    return SpeculationResult(
        batch,
        arms_ms,
        {name: bootstrap([1e3 / value for value in values]) for name, values in arms_ms.items()},
        {name: paired(arms_ms[_WITHOUT], values) for name, values in arms_ms.items() if name != _WITHOUT},
        acceptance,
    )


def _accept(
    name: str,
    core: EngineCore,
    batches: Sequence[Sequence[Sequence[int]]],
    wanted: Sequence[Sequence[Sequence[int]]],
    options: Options,
) -> Acceptance:
    before = core.statistics()
    done = [_generate(core, own, options.output_len) for own in batches]
    if [each.tokens for each in done] != list(wanted):
        raise UBatchError(f"{name}: the greedy tokens are not those without guesses.")
    after, drafts = core.statistics(), sum((each.drafts for each in done), DraftCounts())
    earlier = (*before.accepted_per_position, *[0] * len(after.accepted_per_position))
    right = [count - known for count, known in zip(after.accepted_per_position, earlier, strict=False)]
    shares = [count / max(1, drafts.verified) for count in right]
    return Acceptance(True, drafts.verified, drafts.drafted, drafts.mean_accepted_length, shares)


# -- the overlapped ranks ----------------------------------------------------------------------------------------------


_RANKS = 2
_PROMPTS_PER_RANK = 8
_VERIFY = "target_verify/"


@dataclass(frozen=True)
class Census:
    """Counts of steps over all ranks, by "mode/outcome".

    Attributes:
        threshold: fewest tokens of a verify step that overlaps.
        engaged: verify steps that ran in two lanes.
        above: verify steps in which every rank with tokens reached the threshold.
    """

    threshold: int
    engaged: int
    above: int
    steps: Mapping[str, int]

    def print(self) -> None:
        share = self.engaged / self.above if self.above else 0.0
        print(
            f"\ncensus: {_RANKS} ranks, --enable-dbo; of {self.above} verify steps with {self.threshold} tokens or "
            f"more on every rank {self.engaged} ran in two lanes ({share:.1%})"
        )
        print("  " + ", ".join(f"{kind} {count}" for kind, count in sorted(self.steps.items())), flush=True)


def take_census(
    model: Path, speculation: SpeculationConfig, prompts: Sequence[Sequence[int]], output_len: int
) -> Census:
    """Generate on two expert-parallel ranks, without and with overlap and guesses; the tokens must be the same. The
    prompts are repeated until every rank has enough."""
    threshold = 2 * (1 + speculation.num_draft_tokens)  # a single request cannot be split
    options: dict[str, Any] = {
        "data_parallel_size": _RANKS,
        "enable_expert_parallel": True,
        "max_num_seqs": _PROMPTS_PER_RANK,
        "max_model_len": 2 * (len(prompts[0]) + output_len),
        "kv_cache_memory": "64M",
        "skip_tokenizer_init": True,
    }
    overlap: dict[str, Any] = {
        "enable_dbo": True,
        "dbo_decode_token_threshold": threshold,
        "dbo_prefill_token_threshold": 128,
        "speculative_algorithm": speculation.algorithm.value,
        "speculative_draft_model_path": speculation.draft_model_path,
        "speculative_num_steps": speculation.num_steps,
    }
    many = [prompts[index % len(prompts)] for index in range(_RANKS * _PROMPTS_PER_RANK)]
    with LLM(model, **options) as llm:
        wanted = [each.token_ids for each in completions(llm, many, output_len)]
    with LLM(model, **options, **overlap) as llm:
        tokens = [each.token_ids for each in completions(llm, many, output_len)]
        steps = [dict(each.steps) for each in llm.statistics.values()]
    if tokens != wanted:
        raise UBatchError("two ranks that overlap and guess do not give the greedy tokens of two that do not.")
    engaged, above = census_of(steps)
    return Census(threshold, engaged, above, dict(sum(map(Counter, steps), Counter())))


def census_of(ranks: Sequence[Mapping[str, int]]) -> tuple[int, int]:
    """Verify steps in lanes, and all verify steps above the threshold, of two ranks; from `EngineStatistics.steps`.

    A step that is below the threshold on one rank counts as below it; the other rank has `peer_declined`.
    """
    verify = [
        {step.removeprefix(_VERIFY): count for step, count in steps.items() if step.startswith(_VERIFY)}
        for steps in ranks
    ]
    below = [own.get(DeclineReason.BELOW_DECODE_THRESHOLD, 0) for own in verify]
    above = 0
    for own, its_below, peers_below in zip(verify, below, reversed(below), strict=True):
        above += sum(own.values()) - its_below - min(own.get(DeclineReason.PEER_DECLINED, 0), peers_below)
    return sum(own.get("engaged", 0) for own in verify), above
