"""Masks of bits on logits: every way to apply them against the reference, and what they do to sampling."""

from typing import Any

import pytest
import torch
from c_kernels import needs_c
from grammars import Rule, RuleMasks, rule_rows
from torch import Tensor

from model_runner import (
    MAX_GRAMMAR_LENGTH,
    Request,
    RequestError,
    SamplingParams,
    SamplingRow,
    ScheduledRequest,
    sample,
)
from model_runner.kernels import small_ops
from model_runner.sampling import rows as sampling_rows
from model_runner.sampling import sampler
from model_runner.sampling.rows import GrammarRows, StepMasks, fill_masks, forbid_reference
from model_runner.sampling.sampler import NO_TOKEN, OUT_OF_TOKENS, distributions
from model_runner.speculation import DraftRows, sample_by_rejection

GRAMMAR = SamplingParams(grammar="any text")
SAMPLED = SamplingParams(grammar="any text", temperature=1.0)


def naive(logits: Tensor, rows: list[int], allowed: list[list[int]]) -> Tensor:
    expected = logits.clone()
    for row, tokens in zip(rows, allowed, strict=True):
        expected[row] = -torch.inf
        expected[row, tokens] = logits[row, tokens]
    return expected


def a_case(vocab: int, seed: int) -> tuple[Tensor, list[int], list[list[int]], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, vocab, generator=generator)
    rows = torch.randperm(7, generator=generator)[:5].tolist()
    shares = (0.0, 0.01, 0.5, 1.0, 0.3)
    allowed = [(torch.rand(vocab, generator=generator) < share).nonzero().flatten().tolist() for share in shares]
    return logits, rows, allowed, rule_rows(allowed, vocab + 70)  # a tokenizer may know more tokens than the model


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000, 4096])
@pytest.mark.parametrize("way", ["reference", pytest.param("c", marks=needs_c)])
def test_forbidden_tokens(way: str, vocab: int) -> None:
    logits, rows, allowed, masks = a_case(vocab, vocab)
    forbid = small_ops.forbid if way == "c" else forbid_reference
    for where in (rows, None):
        given = logits[:5] if where is None else logits
        own = given.clone()
        forbid(own, None if where is None else torch.tensor(where), masks)
        assert torch.equal(own, naive(given, list(range(5)) if where is None else where, allowed))


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 31, 33, 1000])
def test_the_most_likely_allowed_token(vocab: int, dtype: torch.dtype) -> None:
    logits, rows, allowed, masks = a_case(vocab, vocab)
    logits = logits.to(dtype)
    logits[rows[3]] = -torch.inf  # allowed, all of them
    wanted = naive(logits, rows, allowed)[rows]
    order = [2, 0, 1, 3, 4]  # of the masks
    found = small_ops.find_allowed(logits, torch.tensor(rows)[order], masks, torch.tensor(order), -2)
    for place, token in zip(order, found.tolist(), strict=True):
        best = int(wanted[place].argmax())
        assert token == (best if wanted[place, best] > -torch.inf else -2)


@pytest.mark.parametrize("in_c", [pytest.param(True, marks=needs_c), False])
def test_sampling_sees_the_masks(in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch with others, in any order, and the same alone."""
    if not in_c:
        for module in (sampler, sampling_rows):
            monkeypatch.setattr(module, "runs_in_c", lambda *tensors: False)
    logits = torch.randn(8, 40, generator=torch.Generator().manual_seed(0))
    logits[:, 39] = 9.0  # what all would say
    logits[2, 38] = 8.0
    logits[7, 1] = torch.nan
    allowed = [[3, 4], [], [7, 33], [31], [5, 38], [3]]
    masks = rule_rows(allowed, 40)
    biased = SamplingParams(grammar="any text", logit_bias=((7, 50.0), (39, 100.0)))
    rows = {
        4: SamplingRow(SAMPLED, draw=0.99, mask=0),
        1: SamplingRow(biased, mask=2),
        3: SamplingRow(SAMPLED, draw=0.0, forbidden=[31], mask=3),
        5: SamplingRow(SamplingParams(temperature=1.0), draw=0.5),
    }
    greedy = {0: 1, 2: 4, 7: 5}
    tokens = sample(logits, rows, StepMasks(masks, greedy)).tolist()
    assert tokens == [OUT_OF_TOKENS, 7, 38, OUT_OF_TOKENS, tokens[4], tokens[5], 39, NO_TOKEN]
    assert tokens[4] in allowed[0]
    for row, how in rows.items():
        assert sample(logits[row : row + 1], {0: how}, StepMasks(masks, {})).tolist() == [tokens[row]]
    for row, mask in greedy.items():
        assert sample(logits[row : row + 1], {}, StepMasks(masks, {0: mask})).tolist() == [tokens[row]]
    found = distributions(logits[[4, 1]], [rows[4], SamplingRow(SAMPLED)], masks)
    assert found[0].nonzero().flatten().tolist() == allowed[0]
    assert (found[1] > 0).all()


def test_masks_follow_trees() -> None:
    """A toy grammar: every token is one above its parent's, or two."""
    masks = RuleMasks(2)
    growing = Rule(lambda output: [output[-1] + 1, output[-1] + 2] if output else [0], masks)
    growing.advance([0])
    other = Rule(lambda output: [5], masks)
    found = fill_masks([GrammarRows(other, 0), GrammarRows(growing, 1, (1, 2, 3, 9), (0, 0, 1, 3))])
    assert torch.equal(found, rule_rows([[5], [1, 2], [2, 3], [3, 4], [4, 5], []], 64))


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "must be the text"), (7, "must be the text"), ("x" * (MAX_GRAMMAR_LENGTH + 1), "has 1048577 characters")],
)
def test_a_text_that_is_none(text: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        SamplingParams(grammar=text)
    assert error.value.param == "grammar"


def test_parameters() -> None:
    assert GRAMMAR.needs_history
    assert GRAMMAR.adjusts
    assert not GRAMMAR.plain
    assert "any text" not in repr(GRAMMAR)
    assert SamplingParams(grammar="x", ignore_eos=True).ending_tokens([2]) == (2,)


def test_a_request_without_the_state_of_its_grammar() -> None:
    request = Request("a", [1, 2], GRAMMAR)
    with pytest.raises(RequestError, match="'a' has the text of a grammar, and nothing that follows its tokens"):
        request.grammar_after(2)
    request.grammar = Rule(lambda output: range(40), RuleMasks(2))
    request.token_ids += [7, 8, -1]
    assert request.grammar_after(4) is request.grammar
    assert request.grammar.output == [7, 8]
    with pytest.raises(RequestError, match="last token is not known yet"):
        request.grammar_after(5)


def test_rejection_sampling_sees_the_masks() -> None:
    """As if the logits of forbidden tokens were -inf: a refused draft is replaced, and nothing else is drawn."""
    vocab, count = 12, 200
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2 * count, vocab, generator=generator)
    allowed = [torch.randperm(vocab, generator=generator)[:5].tolist() for _ in range(2 * count)]
    masked = naive(logits, list(range(2 * count)), allowed)
    drafter = torch.softmax(torch.randn(1, vocab, generator=generator), dim=-1)

    def drafted(params: SamplingParams, *, masks: bool) -> list[DraftRows]:
        made = []
        for number in range(count):
            request = Request(number, [0], params)
            rows = [SamplingRow(params, 0.37 * (number % 3), mask=2 * number + n if masks else None) for n in range(2)]
            share = ScheduledRequest(request, 1, (number % vocab,), draft_probs=drafter)
            made.append(DraftRows(share, 2 * number, rows, [0.05 + 0.09 * (number % 10)]))
        return made

    _, found = sample_by_rejection(logits, drafted(SAMPLED, masks=True), rule_rows(allowed, vocab))
    _, expected = sample_by_rejection(masked, drafted(SamplingParams(temperature=1.0), masks=False))
    assert torch.equal(found, expected)
    assert all(token in own for token, own in zip(found.tolist(), allowed, strict=True))
    taken = (found.view(-1, 2)[:, 0] == torch.arange(count) % vocab).sum()
    assert 10 < taken < count / 2
