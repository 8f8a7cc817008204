"""Drafts are cut at the first token that a grammar refuses."""

from __future__ import annotations

import pytest
import torch
from grammars import Rule, RuleMasks

from model_runner import Draft, SamplingParams
from serving.scheduler.request import TrackedRequest
from serving.scheduler.speculation import _obeying

PROBS = torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (Draft((2, 3, 4, 5)), Draft((2, 3, 4, 5))),
        (Draft((2, 3, 9, 5)), Draft((2, 3))),
        (Draft((9, 2)), Draft(())),
        (Draft((1, 1, 2, 4), (0, 0, 1, 3)), Draft((), ())),
        (Draft((9, 2, 3, 3, 8), (0, 0, 1, 2, 4)), Draft((2, 3), (0, 1))),
        (Draft((2, 2, 3, 3, 4), (0, 0, 1, 2, 4)), Draft((2, 2, 3, 3, 4), (0, 0, 1, 2, 4))),
    ],
)
def test_drafts_are_cut(given: Draft, kept: Draft) -> None:
    """Every token is one above the one before. After the output 0, 1 that is 2."""
    request = a_request()
    assert _obeying(request, given) == kept
    assert request.grammar is not None
    assert request.grammar.num_tokens == 2, "the state follows the output, not the drafts"


@pytest.mark.parametrize(("tokens", "count"), [((2, 3, 4, 5), 4), ((2, 3, 9, 5), 3), ((9, 2, 3, 4), 1)])
def test_a_refused_draft_that_was_drawn_is_left_to_rejection(tokens: tuple[int, ...], count: int) -> None:
    """Without it, the token in its place would not be drawn from what the target leaves."""
    kept = _obeying(a_request(), Draft(tokens, None, PROBS))
    assert kept.tokens == tokens[:count]
    assert kept.probs is not None
    assert torch.equal(kept.probs, PROBS[:count])


def a_request() -> TrackedRequest:
    rule = Rule(lambda output: [len(output)], RuleMasks(1))
    request = TrackedRequest("a", [7, 7, 7], SamplingParams(grammar="any text"), limit=90, grammar=rule)
    request.token_ids += [0, 1]
    return request
