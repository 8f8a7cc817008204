"""Whether an answer is what an undisturbed server answers, and whether rounding may excuse a difference. Pure.

    lost        no answer, or none that is whole: an error, no finish_reason, tokens that the usage does not count
    equal       every output has the reference's tokens, text and finish_reason
    excused     the first difference is where rounding decides (`may_differ`)
    wrong       any other difference

A request that is sampled without a seed has no reference. It is `equal` if it is whole, and if each of its tokens has
the log-probability that an undisturbed server gives to it in this place (`same_logprobs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from model_runner import SamplingParams, sample
from model_runner.sampling.rows import SamplingRow, adjust_logits, uniform
from serving.workbench.bench.faults.answers import Answer, Asked, Choice

NEAR = 1e-4
"""Logits that are as close as this tie; a draw as close as this to an edge may fall on either side."""
_LOGPROB = 2e-3


class Verdict(StrEnum):
    EQUAL = "equal"
    EXCUSED = "excused"
    WRONG = "wrong"
    LOST = "lost"


def missing(asked: Asked, answer: Answer) -> str | None:
    """Why an answer is not whole, or None."""
    if answer.error is not None:
        return answer.error
    for number, choice in enumerate(answer.choices):
        if choice.finish_reason not in ("stop", "length"):
            return f"output {number} ends with {choice.finish_reason}"
        if choice.finish_reason == "length" and len(choice.tokens) != asked.fields["max_tokens"]:
            return f"output {number} has {len(choice.tokens)} tokens of {asked.fields['max_tokens']}"
        if "logprobs" in asked.fields and len(choice.logprobs) != len(choice.tokens):
            return f"output {number} has {len(choice.logprobs)} log-probabilities of {len(choice.tokens)} tokens"
    total = sum(len(choice.tokens) for choice in answer.choices)
    if answer.completion_tokens != total:
        return f"the usage counts {answer.completion_tokens} tokens, but {total} came"
    return None


@dataclass(frozen=True)
class Difference:
    """The first place where an output is another than the reference's.

    Attributes:
        output: which of the request's outputs.
        place: tokens before the difference.
        expected, got: the tokens there; None where an output has ended.
    """

    output: int
    place: int
    expected: int | None
    got: int | None

    def __str__(self) -> str:
        return f"output {self.output}: token {self.place} is {self.got} instead of {self.expected}"


def first_differences(reference: Answer, answer: Answer) -> list[Difference]:
    """One of every output that differs in tokens, text or end."""
    pairs = enumerate(zip(reference.choices, answer.choices, strict=True))
    return [_first(number, *pair) for number, pair in pairs if not _same(*pair)]


def _same(expected: Choice, got: Choice) -> bool:
    same_end = expected.finish_reason == got.finish_reason
    return same_end and expected.tokens == got.tokens and expected.text == got.text


def _first(output: int, expected: Choice, got: Choice) -> Difference:
    ours, theirs = expected.tokens, got.tokens
    pairs = enumerate(zip(ours, theirs, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
    at = [tokens[place] if place < len(tokens) else None for tokens in (ours, theirs)]
    return Difference(output, place, *at)


def may_differ(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], seed: int, found: Difference
) -> bool:
    """Whether rounding decides between the two tokens of a difference.

    It does if the undisturbed server gives the other token itself, now that it computes in one pass what it had
    generated token by token: rounding may also change which experts a token visits. Otherwise, greedy: their logits,
    after penalties and bias, tie within `NEAR`. Sampled: the draw lies within `NEAR` of an edge of the distribution, or
    the truncation has its limit within `NEAR` of a token.

    Args:
        logits: `[vocab]`, of an undisturbed server, in this place.
        prompt, output: the tokens before it.
        seed: of this output.
    """
    if found.expected is None or found.got is None:
        return False  # one goes on after the other's end, with the same tokens: no rounding does that
    draw = uniform(seed, len(output))
    row = SamplingRow(params, draw, torch.tensor(sorted(set(prompt)), dtype=torch.int64), output)
    if int(sample(logits[None], {0: row})) == found.got:
        return True
    adjusted = adjust_logits(logits[None].clone(), [row])[0].double()
    if (adjusted[found.expected] - adjusted[found.got]).abs() <= NEAR:
        return True
    return not params.greedy and near_an_edge(adjusted, params, draw)


def near_an_edge(logits: Tensor, params: SamplingParams, draw: float) -> bool:
    """Whether a draw lies near an edge between two tokens, or a truncation near a token: a slow, obvious definition.

    Args:
        logits: `[vocab]` float64, after penalties.
    """
    lowered = (logits - logits.max()) / params.temperature
    truncated = params.top_k > 0 or params.top_p < 1
    order = lowered.argsort(descending=True, stable=True) if truncated else torch.arange(len(lowered))
    weights = lowered[order].exp()
    if params.min_p:
        if ((weights - params.min_p * weights.max()).abs() <= NEAR).any():
            return True
        weights = weights.where(weights >= params.min_p * weights.max(), 0)
    if 0 < params.top_k < len(weights):
        if (lowered[order[params.top_k - 1]] - lowered[order[params.top_k]]).abs() <= NEAR:
            return True
        weights[params.top_k :] = 0
    if params.top_p < 1:
        before = (weights.cumsum(0) - weights) / weights.sum()
        if ((before - params.top_p).abs() <= NEAR).any():
            return True
        weights = weights.where(before < params.top_p, 0)
    edges = weights.cumsum(0) / weights.sum()
    return bool(((edges - draw).abs() <= NEAR).any())


def same_logprobs(choice: Choice, expected: Sequence[float]) -> str | None:
    """Compare an output's log-probabilities with those of an undisturbed server for the same tokens; returns the first
    that differs, in words, or None."""
    for place, (got, own) in enumerate(zip(choice.logprobs, expected, strict=True)):
        if abs(got - own) > _LOGPROB:
            return f"token {place} has the log-probability {got:.4f} instead of {own:.4f}"
    return None
