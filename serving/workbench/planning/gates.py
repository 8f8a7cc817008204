"""The first gate: compare the simulator's predictions with published measurements.

Only the shapes of the runs are taken from the publication. `constants.yaml` says at its head which constants were
fitted, and which were put in after these gates had been seen to miss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from serving.workbench.planning.constants import PublishedGains, load_constants
from serving.workbench.planning.costs import LayerCosts
from serving.workbench.planning.plan import plain_step, predict_step
from serving.workbench.planning.shapes import Mode, Workload, read_model
from ubatch import SCHEDULES

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
    constants = load_constants()
    workload = Workload(mode, tokens, context, ep, tokens_per_sequence, constants.gates.redundant_experts)
    costs = LayerCosts(read_model("deepseek-v3"), constants.machine("h100-ib"), workload)
    name = "two_batch_prefill" if mode is Mode.PREFILL else "two_batch_decode"
    return plain_step(costs).seconds / predict_step(costs, SCHEDULES[name]).seconds - 1
