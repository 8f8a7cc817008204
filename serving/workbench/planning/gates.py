"""The first gate: compare the simulator's predictions with published measurements.

Only the shapes of the runs are taken from the publication; no constant was fitted to its gains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from serving.workbench.planning.constants import Hardware, load_constants
from serving.workbench.planning.costs import LayerCosts
from serving.workbench.planning.shapes import ModelShape, read_model
from serving.workbench.planning.steps import plain_step, predict_step
from serving.workbench.planning.workload import Mode, Workload
from ubatch.schedules.schedule import SCHEDULES

__all__ = ["Gate", "crossover", "published_gates"]


@dataclass(frozen=True)
class Gate:
    """A prediction beside what was published or measured.

    Attributes:
        name: the figure that is compared.
        predicted: a gain (0.25 is 25% more throughput), or a number of `unit`.
        observed: the published or measured value, as text.
        distance: error of the prediction, as a share; 0 inside a published range.
        limit: largest distance that passes; None if the comparison is for information only.
    """

    name: str
    predicted: float
    observed: str
    distance: float
    limit: float | None
    unit: str = "gain"

    @property
    def passed(self) -> bool:
        """Whether the distance is within the limit."""
        return self.limit is None or self.distance <= self.limit

    def __str__(self) -> str:
        value = f"{self.predicted:+.1%}" if self.unit == "gain" else f"{self.predicted:.0f} {self.unit}"
        verdict = "no gate" if self.limit is None else "passed" if self.passed else "FAILED"
        return f"{self.name:48} {value:>12} {self.observed:>24} {self.distance * 100:8.1f}  {verdict}"


def published_gates() -> list[Gate]:
    """All comparisons with SGLang's two-batch overlap of DeepSeek-V3 on H100."""
    constants = load_constants()
    model, hardware = read_model("deepseek-v3"), constants.machine("h100-ib")
    return [
        *_prefill_gates(model, hardware),
        *_decode_gates(model, hardware),
        _verify_comparison(model, hardware),
    ]


def _prefill_gates(model: ModelShape, hardware: Hardware) -> Iterator[Gate]:
    published = load_constants().gates
    low, high = published.prefill.gain
    for context in published.prefill.contexts:
        ep, tokens = published.prefill.ep, published.prefill.tokens
        gain = _gain(model, hardware, Workload(Mode.PREFILL, tokens, context, ep, 1, published.redundant_experts))
        distance = max(0.0, low - gain, gain - high)
        name = f"prefill, EP {ep}, {tokens} tokens, prompts of {context}"
        yield Gate(name, gain, f"{low:+.0%} to {high:+.0%}", distance, published.points)


def _decode_gates(model: ModelShape, hardware: Hardware) -> Iterator[Gate]:
    published = load_constants().gates
    run = published.decode

    def gain(tokens: int) -> float:
        load = Workload(Mode.DECODE, tokens, run.context, run.ep, 1, published.redundant_experts)
        return _gain(model, hardware, load)

    for tokens, expected in run.gains.items():
        found = gain(tokens)
        name = f"decode, EP {run.ep}, {tokens} tokens"
        yield Gate(name, found, f"{expected:+.1%}", abs(found - expected), published.points)
    low, high = run.crossover
    distance = max(0.0, gain(low), -gain(high))
    found = crossover({tokens: gain(tokens) for tokens in range(low // 4, 4 * high, 8)})
    where = f"between {low} and {high} tokens"
    yield Gate(f"decode, EP {run.ep}, crossover", found, where, distance, published.points, "tokens")


def _verify_comparison(model: ModelShape, hardware: Hardware) -> Gate:
    """A comparison without a limit: the published runs slowed attention with dummy kernels, by an unknown factor."""
    published = load_constants().gates
    run = published.verify
    load = Workload(Mode.VERIFY, run.tokens, run.context, run.ep, run.tokens_per_sequence, published.redundant_experts)
    gain = _gain(model, hardware, load)
    name = f"verify, EP {run.ep}, {run.tokens} tokens, simulated"
    return Gate(name, gain, f"{run.gain:+.0%}", abs(gain - run.gain), None)


def crossover(gains: Mapping[int, float]) -> float:
    """Tokens from which the gain is positive, interpolated linearly; the largest number if no gain is positive."""
    points = sorted(gains.items())
    for (before, loss), (after, gain) in pairwise(points):
        if loss < 0 <= gain:
            return before + (after - before) * -loss / (gain - loss)
    return float(points[0][0] if points[0][1] >= 0 else points[-1][0])


def _gain(model: ModelShape, hardware: Hardware, workload: Workload) -> float:
    """Throughput of SGLang's schedule over its plain forward."""
    costs = LayerCosts(model, hardware, workload)
    name = "two_batch_prefill" if workload.mode is Mode.PREFILL else "two_batch_decode"
    return plain_step(costs).seconds / predict_step(costs, SCHEDULES[name]).seconds - 1
