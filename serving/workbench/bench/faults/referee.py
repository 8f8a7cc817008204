"""An undisturbed server of one rank: its answers are right, and where another differs it tells the logits there."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from model_runner import SamplingParams
from serving.workbench.bench.faults.answers import Answer, Asked, Choice, ask_all
from serving.workbench.bench.faults.compare import (
    Difference,
    Verdict,
    first_differences,
    may_differ,
    missing,
    same_logprobs,
)
from serving.workbench.bench.server.requests import Server, refused

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
        answer = await client.post(self.server.endpoint.path, json={"model": self.server.model, **body})
        if answer.status_code != httpx.codes.OK:
            raise refused(answer, answer.content)
        return answer.json()["choices"][0]
