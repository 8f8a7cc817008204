"""Whether an answer is what an undisturbed server answers, and whether rounding may excuse a difference.

    lost        no answer, or none that is whole: an error, no finish_reason, tokens that the usage does not count
    equal       every output has the reference's tokens, text and finish_reason
    excused     the first difference is where rounding decides (`may_differ`)
    wrong       any other difference

A request that is sampled without a seed has no reference. It is `equal` if it is whole, and if each of its tokens has
the log-probability that an undisturbed server gives to it in this place (`same_logprobs`).

The referee is an undisturbed server of one rank: its answers are right, and where another differs it tells the logits
there. All else is pure.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from model_runner import SamplingParams, sample
from model_runner.sampling.rows import SamplingRow, adjust_logits, uniform
from serving.workbench.bench.faults.answers import Answer, Asked, Choice, ask_all
from serving.workbench.bench.server.requests import Server, ask_json

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


# -- the undisturbed server --------------------------------------------------------------------------------------------


_MOST_LOGPROBS = 1024
_EXAMPLES = 5
_AT_ONCE = 4
FLAGS = (f"--max-logprobs={_MOST_LOGPROBS}", "--no-enable-prefix-caching")
"""Of its server: it tells as many log-probabilities as any server does."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


@dataclass
class Tally:
    """Answers, by verdict.

    Attributes:
        problems: the first lost and wrong ones, in words.
        excuses: the first excused ones.
    """

    counts: Counter[Verdict] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    excuses: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.counts.total()

    def add(self, verdict: Verdict, why: str) -> None:
        self.counts[verdict] += 1
        if verdict is not Verdict.EQUAL and len(self.told(verdict)) < _EXAMPLES:
            (self.excuses if verdict is Verdict.EXCUSED else self.problems).append(f"{verdict}: {why}")

    def told(self, verdict: Verdict) -> list[str]:
        """The first of this verdict, in words."""
        return [each for each in [*self.problems, *self.excuses] if each.startswith(f"{verdict}: ")]

    def as_json(self) -> dict[str, Any]:
        counts = {each.value: self.counts[each] for each in Verdict}
        return {"requests": self.requests, **counts, "problems": self.problems, "excuses": self.excuses}


class Referee:
    """Judges answers.

    Args:
        server: the undisturbed one, with `FLAGS`.
        model: its checkpoint.
    """

    def __init__(self, server: Server, model: Path) -> None:
        self.server = server
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        ends = config.get("eos_token_id")
        self.vocab_size = int(config["vocab_size"])
        self._ends: tuple[int, ...] = tuple(ends) if isinstance(ends, list) else () if ends is None else (int(ends),)

    async def references(self, requests: Sequence[Asked]) -> list[Answer]:
        """The right answers. Of a request that is sampled without a seed it is one of many.

        Raises:
            UBatchError: the undisturbed server does not answer one of them.
        """
        return await ask_all(self.server, requests)

    async def tally(self, answers: Iterable[tuple[Asked, Answer, Answer]]) -> Tally:
        """The verdicts on requests, their references and their answers."""
        tally, cases, turn = Tally(), list(answers), asyncio.Semaphore(_AT_ONCE)

        async def judge(client: httpx.AsyncClient, case: tuple[Asked, Answer, Answer]) -> tuple[Verdict, str]:
            async with turn:
                return await self._judge(client, *case)

        async with self.server.client() as client:
            verdicts = await asyncio.gather(*(judge(client, case) for case in cases))
        for (asked, _, _), (verdict, why) in zip(cases, verdicts, strict=True):
            tally.add(verdict, f"{asked}: {why}")
        return tally

    async def _judge(
        self, client: httpx.AsyncClient, asked: Asked, reference: Answer, answer: Answer
    ) -> tuple[Verdict, str]:
        if why := missing(asked, answer):
            return Verdict.LOST, why
        if not asked.repeats:
            for choice in answer.choices:
                if wrong := same_logprobs(choice, await self._logprobs(client, asked, choice)):
                    return Verdict.WRONG, wrong
            return Verdict.EQUAL, ""
        different = first_differences(reference, answer)
        for found in different:
            if not await self._excuses(client, asked, reference, found):
                return Verdict.WRONG, str(found)
        return (Verdict.EXCUSED, ", ".join(map(str, different))) if different else (Verdict.EQUAL, "")

    async def _excuses(self, client: httpx.AsyncClient, asked: Asked, reference: Answer, found: Difference) -> bool:
        """Whether rounding decides at the first difference."""
        if found.expected is None or found.got is None:
            return False
        before = reference.choices[found.output].tokens[: found.place]
        logits = await self._logits(client, [*asked.prompt, *before])
        stops = asked.fields.get("stop_token_ids", ())
        if len(before) < asked.fields.get("min_tokens", 0):
            logits[[*stops, *self._ends]] = -math.inf
        own = {name: asked.fields[name] for name in _SAMPLING if name in asked.fields}
        return may_differ(logits, SamplingParams(**own), asked.prompt, before, asked.seed(found.output), found)

    async def _logits(self, client: httpx.AsyncClient, tokens: Sequence[int]) -> Tensor:
        """The logits after these tokens, `[vocab]`, up to a constant. What is less likely than the most likely 1024
        shares what is left, so edges between the tokens of a larger vocabulary are not exact."""
        most = min(self.vocab_size, _MOST_LOGPROBS)
        body = {"logprobs": most, "return_tokens_as_token_ids": True, "temperature": 0, "ignore_eos": True}
        choice = await self._post(client, {"prompt": tokens, "max_tokens": 1, **body})
        likeliest: Mapping[str, float] = choice["logprobs"]["top_logprobs"][0]
        found = {int(name.removeprefix("token_id:")): value for name, value in likeliest.items()}
        others = self.vocab_size - len(found)
        rest = 1 - math.fsum(map(math.exp, found.values()))
        logits = torch.full((self.vocab_size,), math.log(max(rest, 1e-12) / others) if others else 0.0)
        logits[list(found)] = torch.tensor(list(found.values()))
        return logits

    async def _logprobs(self, client: httpx.AsyncClient, asked: Asked, choice: Choice) -> list[float]:
        """The log-probability of each token of an output, computed in one pass over prompt and output."""
        tokens = [*asked.prompt, *choice.tokens]
        body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        told = (await self._post(client, body))["prompt_logprobs"][len(asked.prompt) :]
        return [each[str(token)]["logprob"] for token, each in zip(choice.tokens, told, strict=True)]

    async def _post(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> Any:
        answer = await ask_json(client, "POST", self.server.endpoint.path, {"model": self.server.model, **body})
        return answer["choices"][0]
