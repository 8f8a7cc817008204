"""The first gate: compare the simulator's predictions with published measurements, and the planner with another one.

two-batch overlap   only the shapes of the runs are taken from the publication. `constants.yaml` says at its head which
                    constants were fitted, and which were put in after these gates had been seen to miss.
balanced experts    only the shapes of the runs are published, not the skew of their experts: `constants.yaml` says what
                    is assumed of it, and which gain that was fitted to. From there on nothing is fitted: this project's
                    planner places the experts, and a step lasts as long as its busiest rank in every layer.
held out            the planner's placements against the published algorithm's, on loads that neither has seen. Both
                    plan for one window of loads and are judged by the next one, window after window, in the predicted
                    time of a prefill step. A window has parts, each with requests of other topics, and every topic
                    makes other experts popular. The planner sees the parts, and keeps apart what is busy together; the
                    published algorithm sees their sum.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from moe import ExpertPlacement
from moe.balance import PARTS, Floats, mean_balancedness, plan_placement
from serving.workbench.planning.constants import (
    Mode,
    ModelShape,
    PublishedBalance,
    PublishedGains,
    Workload,
    load_constants,
    read_model,
)
from serving.workbench.planning.costs import LayerCosts
from serving.workbench.planning.plan import plain_step, predict_step
from ubatch import SCHEDULES, Schedule
from ubatch.schedules import SERIAL

NAME_WIDTH = 56
"""Of a printed gate's name."""


@dataclass(frozen=True)
class Gate:
    """A prediction against what was published or measured.

    Attributes:
        name: the figure that is compared.
        predicted: a gain (0.25 is 25% more throughput), or a number of `unit`.
        observed: the published or measured value, as text.
        distance: error of the prediction, as a share; 0 inside a published range.
        limit: largest distance that passes.
        cause: why a miss is expected; empty if none is.
    """

    name: str
    predicted: float
    observed: str
    distance: float
    limit: float
    unit: str = "gain"
    cause: str = ""

    @property
    def passed(self) -> bool:
        return self.distance <= self.limit

    @property
    def failed(self) -> bool:
        """Whether it missed, and no miss was expected."""
        return not self.passed and not self.cause

    def __str__(self) -> str:
        value = f"{self.predicted:+.1%}" if self.unit == "gain" else f"{self.predicted:.0f} {self.unit}"
        verdict = "passed" if self.passed else f"MISSED ({self.cause})" if self.cause else "FAILED"
        return f"{self.name:{NAME_WIDTH}} {value:>12} {self.observed:>24} {self.distance * 100:8.1f}  {verdict}"


def published_gates() -> list[Gate]:
    """All comparisons with SGLang's two-batch overlap of DeepSeek-V3 on H100."""
    published = load_constants().gates
    return [*_prefill_gates(published), *_decode_gates(published), _verify_gate(published)]


def _prefill_gates(published: PublishedGains) -> Iterator[Gate]:
    run = published.prefill
    low, high = run.gain
    for context in run.contexts:
        gain = _gain(Mode.PREFILL, run.tokens, context, run.ep)
        distance = max(0.0, low - gain, gain - high)
        name = f"prefill, EP {run.ep}, {run.tokens} tokens, prompts of {context}"
        yield Gate(name, gain, f"{low:+.0%} to {high:+.0%}", distance, published.points)


def _decode_gates(published: PublishedGains) -> Iterator[Gate]:
    run = published.decode

    def gain(tokens: int) -> float:
        return _gain(Mode.DECODE, tokens, run.context, run.ep)

    for tokens, expected in run.gains.items():
        found = gain(tokens)
        name = f"decode, EP {run.ep}, {tokens} tokens"
        yield Gate(name, found, f"{expected:+.1%}", abs(found - expected), published.points)
    low, high = run.crossover
    distance = max(0.0, gain(low), -gain(high))
    found = crossover({tokens: gain(tokens) for tokens in range(low // 4, 4 * high, 8)})
    where = f"between {low} and {high} tokens"
    yield Gate(f"decode, EP {run.ep}, crossover", found, where, distance, published.points, "tokens")


def _verify_gate(published: PublishedGains) -> Gate:
    run = published.verify
    gain = _gain(Mode.VERIFY, run.tokens, run.context, run.ep, run.tokens_per_sequence)
    name = f"verify, EP {run.ep}, {run.tokens} tokens"
    return Gate(name, gain, f"{run.gain:+.0%}", abs(gain - run.gain), published.points, cause=run.miss)


def crossover(gains: Mapping[int, float]) -> float:
    """Tokens from which the gain is positive, interpolated linearly; the largest number if no gain is positive."""
    points = sorted(gains.items())
    for (before, loss), (after, gain) in pairwise(points):
        if loss < 0 <= gain:
            return before + (after - before) * -loss / (gain - loss)
    return float(points[0][0] if points[0][1] >= 0 else points[-1][0])


def _gain(mode: Mode, tokens: int, context: int, ep: int, tokens_per_sequence: int = 1) -> float:
    """Throughput of SGLang's schedule over its plain forward."""
    redundant = load_constants().gates.redundant_experts
    step = read_model("deepseek-v3"), Workload(mode, tokens, context, ep, tokens_per_sequence, redundant)
    schedule = SCHEDULES["two_batch_prefill" if mode is Mode.PREFILL else "two_batch_decode"]
    return _seconds(*step) / _seconds(*step, schedule=schedule) - 1


def _seconds(model: ModelShape, load: Workload, hardware: str = "h100-ib", schedule: Schedule = SERIAL) -> float:
    costs = LayerCosts(model, load_constants().machine(hardware), load)
    return (plain_step(costs) if schedule == SERIAL else predict_step(costs, schedule)).seconds


# -- balanced experts -------------------------------------------------------------------------------------------------

_LIMIT = 0.05


def balancing_gates() -> list[Gate]:
    """All comparisons."""
    return [gate for run in load_constants().balancing for gate in _gates(run)]


def _gates(run: PublishedBalance) -> Iterator[Gate]:
    sizes: dict[str, Any] = dict(run.model)
    model = replace(read_model("deepseek-v3"), **sizes)
    shape = model.moe_layers, model.experts
    loads = zipf_loads(*shape, np.linspace(*run.zipf, model.moe_layers)) if run.zipf is not None else np.ones(shape)

    def seconds(skews: tuple[float, ...], redundant: int) -> float:
        load = Workload(Mode(run.mode), run.tokens, run.context, run.ep, redundant_experts=redundant, skews=skews)
        return _seconds(model, load, run.hardware, SCHEDULES[run.step])

    if run.balancedness is None:
        without = layer_skews(ExpertPlacement.default(*shape, run.ep, run.redundant_experts), loads)
    else:
        without = (1 / run.balancedness,) * model.moe_layers
    before = seconds(without, run.redundant_experts)
    assumed = f"{1 / fmean(without):.2f}"
    for what, expected in run.gains.items():
        redundant, skews = run.redundant_experts, (1.0,) * model.moe_layers
        if what != "perfect":
            redundant = 0 if what == "rearranged" else int(what.removesuffix(" redundant"))
            skews = layer_skews(plan_placement(loads, ExpertPlacement.default(*shape, run.ep, redundant)), loads)
        gain = before / seconds(skews, redundant) - 1
        distance = abs((1 + gain) / (1 + expected) - 1)
        fitted = ", fitted" if what == run.fitted_to else ""
        yield Gate(f"{run.name}, {what} (from {assumed}{fitted})", gain, f"{expected:+.1%}", distance, _LIMIT)


def zipf_loads(layers: int, experts: int, exponent: npt.ArrayLike, seed: int = 0) -> Floats:
    """`[L, E]`: each expert's share of its layer's tokens: the n-th most popular one's is proportional to
    `n ** -exponent`. Which experts are popular is random, and differs by layer.

    Args:
        exponent: of all layers, or `[L]`.
    """
    exponents = np.broadcast_to(np.asarray(exponent, dtype=np.float64), layers)
    shares = np.arange(1, experts + 1) ** -exponents[:, None]
    return np.random.default_rng(seed).permuted(shares / shares.sum(axis=1, keepdims=True), axis=1)


def layer_skews(placement: ExpertPlacement, loads: Floats) -> tuple[float, ...]:
    """For every MoE layer, the busiest rank's load over the mean.

    Args:
        placement: of the experts.
        loads: `[L, E]`, or `[steps, L, E]`; each step waits for the rank that is the busiest in it, so this is the mean
            over the steps, weighted by their tokens. A layer without tokens is balanced.
    """
    steps = loads.reshape(-1, *loads.shape[-2:])
    return tuple((1 / mean_balancedness(placement, steps)).tolist())


# -- held out ---------------------------------------------------------------------------------------------------------

RANKS = (16, 32, 64)
_EXPONENTS = (0.5, 1.0)
_MODEL, _TOKENS = "qwen3-30b-a3b", 8192
_LAYERS, _EXPERTS, _REDUNDANT = 6, 128, 64
_WINDOWS, _TOKENS_IN_PART = 3, 20_000
_TOPICS, _TOPIC_SPREAD = 8, 0.5
_WORSE = 0.005
"""By how much a predicted step may be slower before that counts."""


def held_out_gates() -> Iterator[Gate]:
    """With 64 redundant experts, and by rearranging alone."""
    for exponent in _EXPONENTS:
        windows = loads_of_topics(exponent)
        for ranks in RANKS:
            for redundant in (_REDUNDANT, 0):
                gain = held_out_gain(windows, ranks, redundant)
                how = f"{redundant} redundant" if redundant else "rearranged"
                name = f"planner over published, EP {ranks}, Zipf {exponent:g}, {how}"
                yield Gate(name, gain, "not below 0", max(0.0, -gain), _WORSE)


def loads_of_topics(exponent: float) -> Floats:
    """`[windows, PARTS, L, E]`: tokens per expert; popularity follows Zipf's law, but for the topics of each part."""
    random = np.random.default_rng(0)
    base = np.log(zipf_loads(_LAYERS, _EXPERTS, exponent))
    topics = random.normal(0.0, _TOPIC_SPREAD, (_TOPICS, *base.shape))
    mixes = random.dirichlet(np.full(_TOPICS, 0.5), (_WINDOWS, PARTS))
    popularity = np.exp(base + np.einsum("wpt,tle->wple", mixes, topics))
    shares = popularity / popularity.sum(axis=-1, keepdims=True)
    return np.asarray(random.multinomial(_TOKENS_IN_PART, shares), dtype=np.float64)


def held_out_gain(windows: Floats, ranks: int, redundant: int) -> float:
    """What the planner gains over the published algorithm, in predicted throughput of prefill steps.

    Args:
        windows: `[windows, parts, L, E]`; all but the last are planned for, and all but the first judge.
        ranks: they divide the experts with the redundant ones.
    """
    layers, experts = windows.shape[2:]
    model = replace(read_model(_MODEL), experts=experts)

    def seconds(placement: ExpertPlacement, loads: Floats) -> float:
        """Of a prefill step in which nothing overlaps; layers repeat."""
        skews = tuple(islice(cycle(layer_skews(placement, loads)), model.moe_layers))
        return _seconds(model, Workload(Mode.PREFILL, _TOKENS, 4096, ranks, redundant_experts=redundant, skews=skews))

    planned = ExpertPlacement.default(layers, experts, ranks, redundant)
    own_s, published_s = [], []
    for seen, unseen in pairwise(windows):
        planned = plan_placement(seen, planned)
        published = published_placement(seen.sum(axis=0), experts + redundant, ranks)
        own_s.append(seconds(planned, unseen))
        published_s.append(seconds(published, unseen))
    return fmean(published_s) / fmean(own_s) - 1


def published_placement(loads: Floats, slots: int, ranks: int) -> ExpertPlacement:
    """The placement of `[L, E]` loads in so many slots, by the published algorithm, in plain loops.

    After the description of https://github.com/deepseek-ai/EPLB: one layer at a time; equally many slots on every rank,
    and no regard to where experts are now.
    """
    experts = [[expert for rank in one_layer(list(layer), slots, ranks) for expert in rank] for layer in loads]
    return ExpertPlacement(np.array(experts), loads.shape[1], ranks)


def one_layer(loads: Sequence[float], slots: int, ranks: int) -> list[list[int]]:
    """The experts of each rank."""
    experts = [*range(len(loads))]
    while len(experts) < slots:
        experts.append(max(range(len(loads)), key=lambda each: loads[each] / experts.count(each)))
    shares = [loads[each] / experts.count(each) for each in experts]
    return [[experts[index] for index in rank] for rank in packed(shares, ranks)]


def packed(weights: Sequence[float], packs: int) -> list[list[int]]:
    """The items of each pack: the heaviest first, to the lightest pack that has room; equally many in each."""
    items: list[list[int]] = [[] for _ in range(packs)]
    total = [0.0] * packs
    for item in sorted(range(len(weights)), key=lambda each: -weights[each]):
        open_ones = [pack for pack in range(packs) if len(items[pack]) < len(weights) // packs]
        pack = min(open_ones, key=total.__getitem__)
        items[pack].append(item)
        total[pack] += weights[item]
    return items
