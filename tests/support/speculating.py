"""Requests of every kind of sampling, and the loop that verifies drafts for them: a prefill, then verify steps only."""

import random
from collections.abc import Callable, Sequence

import torch
from request_steps import admit, prefill, verify
from torch import Tensor

from model_runner import Draft, ModelRunner, Request, SamplingParams, TokenLogprobs

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [53], [58, 97, 93, 23, 84], [62, 64, 33] * 7, [100] * 4]
NEW = 12
VOCAB = 131
PARAMS = [
    SamplingParams(max_tokens=NEW),
    SamplingParams(max_tokens=NEW, temperature=1.2, seed=3, top_p=0.95),
    SamplingParams(max_tokens=NEW, frequency_penalty=1.0, repetition_penalty=1.3, logprobs=2),
    SamplingParams(max_tokens=NEW, temperature=0.8, seed=8, presence_penalty=1.0, min_p=0.01),
    SamplingParams(max_tokens=NEW, min_tokens=6, stop_token_ids=(11, 12, 13), logit_bias=((40, 2.0),)),
]

Drafting = Callable[[random.Random, Sequence[int]], Draft]
"""Makes the drafts of a request, given the tokens that would be right, as many as there may be."""


def chain(num_drafts: int, right: float, vocabulary: int = VOCAB) -> Drafting:
    """Chains, each draft right with this probability."""

    def draft(rng: random.Random, known: Sequence[int]) -> Draft:
        tokens = (token if rng.random() < right else rng.randrange(vocabulary) for token in known[:num_drafts])
        return Draft(tuple(tokens))

    return draft


def tree(num_drafts: int, right: float) -> Drafting:
    """Random trees. Somewhere among a node's children is the right token, if it has one, with this probability."""

    def draft(rng: random.Random, known: Sequence[int]) -> Draft:
        parents = tuple(rng.randrange(node) for node in range(1, num_drafts + 1))
        depth, taken, tokens = [0], set[int](), list[int]()
        is_right = [True]
        for parent in parents:
            depth.append(depth[parent] + 1)
            is_right.append(is_right[parent] and parent not in taken and rng.random() < right)
            taken |= {parent} if is_right[-1] else set()
            tokens.append(known[depth[-1] - 1] if is_right[-1] else rng.randrange(VOCAB))
        return Draft(tuple(tokens), parents)

    return draft


def make_requests(params: Sequence[SamplingParams] = PARAMS) -> list[Request]:
    """One request per prompt."""
    return [Request(index, *each) for index, each in enumerate(zip(PROMPTS, params, strict=True))]


def speculate(
    runner: ModelRunner,
    expected: Sequence[Sequence[int]],
    num_drafts: int,
    drafting: Drafting,
    seed: int = 0,
    params: Sequence[SamplingParams] = PARAMS,
) -> tuple[list[list[int]], list[list[TokenLogprobs]], int]:
    """Tokens, log-probabilities, and how many verify steps it took. Drafts are right as far as `expected` is."""
    rng = random.Random(seed)
    requests = make_requests(params)
    logprobs: list[list[TokenLogprobs]] = [[] for _ in requests]
    admit(runner, requests, NEW + num_drafts + 1)
    prefill(runner, requests)
    steps = 0
    while running := [request for request in requests if request.num_output_tokens < NEW]:
        drafts = []
        for request in running:
            known = [*expected[int(request.request_id)], *[0] * (NEW + num_drafts)][request.num_output_tokens :]
            drafts.append(drafting(rng, known))
        output = verify(runner, running, drafts)
        steps += 1
        for request, draft, tokens, scores in zip(running, drafts, output.tokens, output.logprobs, strict=True):
            assert 1 <= len(tokens) <= num_drafts + 1
            assert draft.parents is not None or tokens[:-1] == draft.tokens[: len(tokens) - 1]
            logprobs[int(request.request_id)] += scores
    for request in requests:
        runner.release(request)
    runner.allocator.check(idle=True)
    return [request.output_token_ids[:NEW] for request in requests], logprobs, steps


def check(tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
    """The same, as far as `generate` went, which a stop token ends."""
    for got, wanted in zip(tokens, expected, strict=True):
        assert list(got[: len(wanted)]) == list(wanted)


def p_value(observed: Tensor, probabilities: Tensor) -> float:
    """Of Pearson's test: how likely counts are that are as far from the probabilities as these, or farther."""
    if observed[probabilities == 0].any():
        return 0.0
    expected = probabilities * observed.sum()
    rare = expected < 10  # too few for the test, but together
    pairs = [torch.cat((each[~rare], each[rare].sum()[None])) for each in (observed.double(), expected)]
    observed, expected = (each[pairs[1] > 0] for each in pairs)
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
