"""Trees of drafts, how they lie in a batch, and which drafts are right; without a model."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from repository import ROOT
from speculating import p_value
from torch import Tensor

from attention import MODES, KVCacheSpec, MLACacheSpec, make_kv_cache
from model_runner import Acceptance, Request, RequestError, SamplingParams, SamplingRow, ScheduledRequest, sample
from model_runner.sampling.sampler import distributions
from model_runner.speculation import DraftRows, accepted_nodes, check_acceptance, sample_by_rejection
from model_runner.step.batch import DraftTrees, chain_of_drafts, check_parents, path_to

pytestmark = pytest.mark.long

# -- trees -------------------------------------------------------------------------------------------------------------

THE_DOCUMENTS = (0, 0, 1, 1)  # root -> a, b; a -> c, d


def test_the_tree_of_the_document() -> None:
    trees = DraftTrees.of([THE_DOCUMENTS, None], 4)
    assert trees is not None
    positions = trees.positions([10, 3])
    assert positions.tolist() == [10, 11, 11, 12, 12, 3, 4, 5, 6, 7]
    spec = trees.verify_input([10, 3], torch.arange(10), positions)
    assert (spec.num_draft_tokens, spec.prefix_lens) == (5, (10, 3))
    assert spec.retrieve_index.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert spec.retrieve_next_token.tolist() == [[1, 3, -1, -1, -1], [1, 2, 3, 4, -1]]
    assert spec.retrieve_next_sibling.tolist() == [[-1, 2, -1, 4, -1], [-1] * 5]
    first, second = spec.mask_of(0), spec.mask_of(1)
    assert first is not None
    assert second is not None
    assert first[:, :10].all()
    seen = ["10000", "11000", "10100", "11010", "11001"]
    assert ["".join(str(int(bit)) for bit in row) for row in first[:, 10:]] == seen
    assert torch.equal(second, torch.ones(5, 8, dtype=torch.bool).tril(3))


@given(st.data())
def test_random_trees(data: st.DataObject) -> None:
    """Links, depths and masks against what parents say one by one."""
    num_drafts = data.draw(st.integers(1, 9))
    prefixes = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
    forest = [tuple(data.draw(st.integers(0, draft)) for draft in range(num_drafts)) for _ in prefixes]
    trees = DraftTrees.of(forest, num_drafts)
    if trees is None:
        assert all(parents == tuple(range(num_drafts)) for parents in forest)
        return
    spec = trees.verify_input(prefixes, torch.arange(len(prefixes) * (num_drafts + 1)), trees.positions(prefixes))
    for request, (parents, prefix) in enumerate(zip(forest, prefixes, strict=True)):
        mask = spec.mask_of(request)
        assert mask is not None
        child, sibling = spec.retrieve_next_token[request].tolist(), spec.retrieve_next_sibling[request].tolist()
        for node in range(num_drafts + 1):
            path = path_to(node, parents)
            seen = {0, *(draft + 1 for draft in path)}
            assert set(mask[node].nonzero().flatten().tolist()) == {*range(prefix), *(prefix + each for each in seen)}
            assert int(spec.positions[request * (num_drafts + 1) + node]) == prefix + len(path)
            children, each = [], child[node]
            while each >= 0:
                children.append(each)
                each = sibling[each]
            assert children == [draft + 1 for draft, parent in enumerate(parents) if parent == node]


def test_trees_that_are_chains_need_no_mask() -> None:
    assert DraftTrees.of([None, (0, 1, 2)], 3) is None
    assert chain_of_drafts(3, [4], torch.arange(4), torch.arange(4, 8)).custom_mask is None


def test_parents_that_make_no_tree() -> None:
    for parents, message in (((0, 2), "draft 1 has node 2"), ((-1, 0), "draft 0 has node -1"), ((0,), "parents of 1")):
        with pytest.raises(RequestError, match=f"request 'a'.*{message}"):
            check_parents("a", parents, 2)


# -- which are right ---------------------------------------------------------------------------------------------------


@given(st.data())
def test_the_accepted_path(data: st.DataObject) -> None:
    """Down from the root, to whichever child is what the row says, as slowly as it can be written."""
    num_drafts = data.draw(st.integers(0, 8))
    drafts = data.draw(st.lists(st.integers(0, 2), min_size=num_drafts, max_size=num_drafts))
    says = data.draw(st.lists(st.integers(0, 2), min_size=num_drafts + 1, max_size=num_drafts + 1))
    chain = data.draw(st.booleans())
    parents = list(range(num_drafts)) if chain else [data.draw(st.integers(0, draft)) for draft in range(num_drafts)]
    node, expected = 0, [0]
    while right := [d for d in range(num_drafts) if parents[d] == node and drafts[d] == says[node]]:
        node = right[0] + 1
        expected.append(node)
    assert accepted_nodes(drafts, None if chain else parents, says) == tuple(expected)
    assert path_to(node, parents) == tuple(each - 1 for each in expected[1:])


def test_what_cannot_be_accepted() -> None:
    sampled, greedy = SamplingParams(temperature=1.0), SamplingParams()
    probs = torch.full((2, 5), 0.2)

    def share(params: SamplingParams, parents: tuple[int, ...] | None, probs: Tensor | None) -> ScheduledRequest:
        return ScheduledRequest(Request("a", [1], params), 1, (3, 4), parents, probs)

    fine = [share(sampled, None, probs), share(sampled, (0, 1), probs), share(greedy, (0, 0), None)]
    check_acceptance(fine, Acceptance.REJECTION)
    check_acceptance([share(sampled, (0, 0), None)], Acceptance.MATCH)
    for wrong, acceptance, message in (
        (share(sampled, (0, 0), None), Acceptance.REJECTION, "only chains are accepted by rejection"),
        (share(sampled, None, probs), Acceptance.MATCH, "which are accepted by match; leave them out"),
        (share(sampled, None, probs[:1]), Acceptance.REJECTION, r"shape \[1, 5\]; there must be one row per draft"),
    ):
        with pytest.raises(RequestError, match=message):
            check_acceptance([wrong], acceptance)


# -- rejection sampling ------------------------------------------------------------------------------------------------

VOCAB, MANY = 6, 5_000
TARGET = torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(5))
"""Logits behind each token, and behind the prompt."""
FAR = torch.tensor([0.05, 0.05, 0.1, 0.1, 0.3, 0.4])  # of the target's tokens, most likely first
DRAFTER = torch.stack([FAR[row.argsort(descending=True).argsort()] for row in TARGET])
PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "warm": SamplingParams(temperature=1.7, min_p=0.05),
    "truncated": SamplingParams(temperature=0.9, top_k=4, top_p=0.95),
    "biased": SamplingParams(temperature=1.0, logit_bias=((1, 2.0),)),
}


def draw_pairs(params: SamplingParams, rule: Callable[[Tensor, list[DraftRows]], Tensor], known: bool) -> Tensor:
    """How often which two tokens come first, `[VOCAB, VOCAB]`, of many requests with a draft of one token each.

    Where the draft is right the second token comes with it, else in the next step, without a draft.
    """
    requests = [Request(seed, [0], replace(params, seed=seed)) for seed in range(MANY)]
    q = DRAFTER[VOCAB] if known else torch.eye(VOCAB)[0]
    certain = SamplingParams(temperature=1.0)
    drafted = sample(
        q.log().expand(MANY, -1), {n: SamplingRow(certain, request.draft_draw(0)) for n, request in enumerate(requests)}
    )
    rows, drafts = [], []
    for number, (request, draft) in enumerate(zip(requests, drafted.tolist(), strict=True)):
        share = ScheduledRequest(request, 1, (draft,), draft_probs=q[None] if known else None)
        own = {number * 2 + node: SamplingRow(request.params, request.draw(node)) for node in range(2)}
        rows.append(own)
        drafts.append(DraftRows.of(share, number * 2, own, 0))
    logits = torch.stack((TARGET[VOCAB].expand(MANY, -1), TARGET[drafted]), dim=1).flatten(0, 1)
    first, second = rule(logits, drafts).view(MANY, 2).unbind(1)
    alone = sample(TARGET[first], {n: row[n * 2 + 1] for n, row in enumerate(rows)})
    second = torch.where(first == drafted, second, alone)
    return torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB).view(VOCAB, VOCAB)


def by_rejection(logits: Tensor, requests: list[DraftRows]) -> Tensor:
    where, says = sample_by_rejection(logits, requests)
    assert torch.equal(where, torch.arange(len(logits)))
    return says


def with_the_wrong_rest(logits: Tensor, requests: list[DraftRows]) -> Tensor:
    """A rejected draft is replaced by a token from p itself."""
    says = by_rejection(logits, requests)
    from_p = sample(logits, {request.first + n: row for request in requests for n, row in enumerate(request.rows)})
    drafts = torch.tensor([[*request.share.drafts, -1] for request in requests]).flatten()
    return torch.where((says == drafts) | (drafts < 0), says, from_p)


def always_accepted(logits: Tensor, requests: list[DraftRows]) -> Tensor:
    drafts = torch.tensor([[*request.share.drafts, -1] for request in requests]).flatten()
    return torch.where(drafts < 0, by_rejection(logits, requests), drafts)


@pytest.mark.sample(4)
@pytest.mark.parametrize("known", [True, False], ids=["drawn", "certain"])
@pytest.mark.parametrize("params", PARAMS)
def test_tokens_have_the_targets_distribution(params: str, known: bool) -> None:
    """The first token and the first two, from a draft distribution that is about the opposite."""
    row = SamplingRow(PARAMS[params])
    p = distributions(TARGET, [row] * (VOCAB + 1))
    pairs = p[VOCAB][:, None] * p[:VOCAB]
    counts = draw_pairs(PARAMS[params], by_rejection, known)
    assert p_value(counts.sum(1), p[VOCAB]) > 1e-3
    assert p_value(counts.flatten(), pairs.flatten()) > 1e-3


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize("known", [True, False], ids=["drawn", "certain"])
@pytest.mark.parametrize("wrong", [with_the_wrong_rest, always_accepted])
def test_the_test_sees_wrong_rules(wrong: Callable[[Tensor, list[DraftRows]], Tensor], known: bool) -> None:
    assert p_value(draw_pairs(PARAMS["plain"], wrong, known).sum(1), TARGET[VOCAB].double().softmax(0)) < 1e-9


def test_a_perfect_drafter_is_always_accepted() -> None:
    """q is p, but for rounding to float32; and what a request gets depends on its seed and place only."""
    requests = [Request(seed, [0], SamplingParams(temperature=1.0, seed=seed)) for seed in range(500)]
    p = TARGET[VOCAB].double().softmax(0).float()
    logits = TARGET[VOCAB].expand(3, -1)

    def rows_of(numbers: Sequence[int]) -> list[DraftRows]:
        made = []
        for place, number in enumerate(numbers):
            own = {place * 3 + n: SamplingRow(requests[number].params, requests[number].draw(n)) for n in range(3)}
            share = ScheduledRequest(requests[number], 1, (number % VOCAB, 3), draft_probs=p.expand(2, -1))
            made.append(DraftRows.of(share, place * 3, own, 0))
        return made

    _, together = sample_by_rejection(logits.repeat(500, 1), rows_of(range(500)))
    together = together.view(500, 3)
    assert torch.equal(together[:, 0], torch.arange(500) % VOCAB)
    assert (together[:, 1] == 3).all()
    assert len(set(together[:, 2].tolist())) > 2
    for number in (7, 123):
        assert torch.equal(sample_by_rejection(logits, rows_of([number]))[1], together[number])


def test_a_drafter_of_another_vocabulary() -> None:
    request = Request("a", [0], SamplingParams(temperature=1.0, seed=1))
    own = {n: SamplingRow(request.params, 0.5) for n in range(2)}
    share = ScheduledRequest(request, 1, (3,), draft_probs=torch.ones(1, 9))
    with pytest.raises(RequestError, match="a vocabulary of 9 tokens; the model's has 6"):
        sample_by_rejection(TARGET[:2], [DraftRows.of(share, 0, own, 0)])


# -- moving keys and values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", [KVCacheSpec, MLACacheSpec])
def test_moving_tokens(kind: type[KVCacheSpec | MLACacheSpec], fp8: bool) -> None:
    """Also where a slot is both a source and a target; in every layer, and nothing else changes."""
    cache = make_kv_cache(kind(3, 2, 4, block_size=4, fp8=fp8), 5)
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    for pool in cache._pools:
        pool.memory.copy_(torch.randint(0, 100, pool.memory.shape, generator=generator))
    before = [pool.memory.clone().flatten(1, 2) for pool in cache._pools]
    sources, targets = rng.sample(range(20), 7), rng.sample(range(20), 7)
    assert set(sources) & set(targets)
    cache.move(torch.tensor(sources), torch.tensor(targets))
    for pool, old in zip(cache._pools, before, strict=True):
        expected = old.clone()
        for source, target in zip(sources, targets, strict=True):
            expected[:, target] = old[:, source]
        assert torch.equal(pool.memory.flatten(1, 2), expected)


# -- the table of modes ------------------------------------------------------------------------------------------------


def test_the_document_has_the_table_of_modes() -> None:
    text = (ROOT / "docs" / "modes.md").read_text(encoding="utf-8")
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", text, re.M)]
    expected = [
        [
            str(mode),
            traits.sglang,
            traits.tokens_per_request,
            str(traits.split),
            str(traits.kernel),
            "yes" if traits.graph else "no",
            traits.refused,
        ]
        for mode, traits in MODES.items()
    ]
    assert shown[2:] == expected
    assert {traits.sglang for traits in MODES.values()} == {
        *("DECODE", "EXTEND", "MIXED", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2")
    }
