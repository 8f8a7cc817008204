"""Trees of drafts against growing them one path at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_qwen3_moe_checkpoint
from draft_cases import (
    PROMPTS,
    TINY_HEAD,
    TINY_MOE,
    TOLERANCE,
    Recording,
    Reference,
    drafted_tokens,
    drafting,
    head_estimates,
    make_head,
    make_proposer,
    plain_tokens,
)
from hypothesis import given
from hypothesis import strategies as st
from request_steps import admitted, prefill, verify
from torch import Tensor
from transformers import AutoTokenizer

from model_runner import ModelRunner
from model_runner.drafting import load_draft
from model_runner.drafting.proposer import select_nodes
from model_runner.settings import most_nodes
from model_runner.step.batch import check_parents, path_to

pytestmark = pytest.mark.long

Nodes = tuple[int, ...]
Shape = dict[str, int]


def grown(
    reference: Reference, tokens: list[int], num_steps: int, topk: int
) -> tuple[dict[Nodes, float], list[list[Tensor]]]:
    """All candidates of a request's tree, by the drafts on their path, and the logarithms of their probabilities; and
    the logits behind each node that was gone on from, level by level."""
    found: dict[Nodes, float] = {}
    given: list[list[Tensor]] = []
    level: list[Nodes] = [()]
    for _ in range(num_steps):
        given.append([reference.logits(tokens, path) for path in level])
        new: dict[Nodes, float] = {}
        for path, logits in zip(level, given[-1], strict=True):
            chances = logits.log_softmax(dim=-1)
            for token in chances.topk(topk).indices.tolist():
                new[(*path, token)] = found.get(path, 0.0) + float(chances[token])
        found |= new
        level = sorted(new, key=lambda path: -new[path])[:topk]
    return found, given


@pytest.mark.sample(3)
@pytest.mark.parametrize(("num_steps", "topk", "count"), [(1, 3, 3), (3, 2, 6), (3, 2, 10), (4, 3, 30), (2, 4, 20)])
def test_the_most_likely_nodes(tmp_path: Path, num_steps: int, topk: int, count: int) -> None:
    target = make_qwen3_moe_checkpoint(tmp_path / "target")
    reference = Reference(target, head_estimates(make_head(tmp_path / "head")))
    with ModelRunner(target, num_kv_blocks=128, block_size=4) as runner:
        network = Recording(load_draft("eagle", tmp_path / "head", runner))
        proposer, requests = drafting(runner, network, PROMPTS, num_steps=num_steps, topk=topk, num_draft_tokens=count)
        for _ in range(2):
            network.given.clear()
            drafts = proposer.propose(requests, [count] * 3)
            for index, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
                assert draft.parents is not None
                check_parents(request.request_id, draft.parents, count)
                paths = {tuple(draft.tokens[i] for i in path_to(n + 1, draft.parents)) for n in range(count)}
                assert len(paths) == len(draft.tokens) == count
                chances, logits = grown(reference, request.token_ids, num_steps, topk)
                assert len(chances) == most_nodes(num_steps, topk)
                least = sorted(chances.values(), reverse=True)[count - 1]
                assert all(chances[path] > least - 1e-4 for path in paths)  # a near tie may go either way
                for got, expected in zip(network.given, logits, strict=True):
                    assert (got.view(3, -1, 131)[index] - torch.stack(expected)).abs().max() < TOLERANCE
            verify(runner, requests, drafts)


def mean_lengths(target: Path, prompts: list[list[int]], kind: str, path: Path, shapes: list[Shape]) -> list[float]:
    """Mean accepted lengths with each shape of drafts; what comes out is always what comes out without."""
    expected = plain_tokens(target, prompts, 24)
    means = []
    for shape in shapes:
        with ModelRunner(target, num_kv_blocks=512, block_size=4) as runner:
            proposer, requests = drafting(
                runner, load_draft(kind, path, runner), prompts, params={"ignore_eos": True}, num_steps=3, **shape
            )
            lengths = drafted_tokens(runner, proposer, requests, 24, shape.get("num_draft_tokens", 3))
            assert [request.output_token_ids[:24] for request in requests] == expected
            means.append(sum(lengths) / len(lengths))
    return means


def test_the_target_drafts_trees_for_itself(tmp_path: Path) -> None:
    target = make_qwen3_moe_checkpoint(tmp_path)
    chain, tree = mean_lengths(target, PROMPTS, "draft_model", target, [{}, {"topk": 3, "num_draft_tokens": 21}])
    assert chain == 4
    assert tree > 3.5  # the path of best tokens is not always among the most likely ones


def test_trees_of_the_trained_head_accept_more_than_chains() -> None:
    text = AutoTokenizer.from_pretrained(TINY_MOE)(Path(__file__).read_text()).input_ids
    prompts = [text[start : start + 100] for start in range(0, 700, 100)]
    chain, tree = mean_lengths(TINY_MOE, prompts, "eagle", TINY_HEAD, [{}, {"topk": 3, "num_draft_tokens": 8}])
    assert tree > chain + 0.1
    assert chain > 1.8


def test_fewer_nodes_than_the_tree_has(tmp_path: Path) -> None:
    target = make_qwen3_moe_checkpoint(tmp_path / "target")
    make_head(tmp_path / "head")
    with ModelRunner(target, num_kv_blocks=128, block_size=4) as runner:
        network = load_draft("eagle", tmp_path / "head", runner)
        proposer = make_proposer(runner, network, num_steps=3, topk=2, num_draft_tokens=7)
        assert proposer.num_places == 7
        assert make_proposer(runner, network, num_steps=4, topk=4, num_draft_tokens=5).num_places == 12
        runner.set_observer(proposer)
        requests = admitted(runner, PROMPTS)
        prefill(runner, requests)
        for request, draft, count in zip(requests, proposer.propose(requests, [7, 4, 0]), (7, 4, 0), strict=True):
            assert len(draft.tokens) == count
            check_parents(request.request_id, draft.parents or (), count)


@given(
    tree=st.lists(st.tuples(st.integers(0, 20), st.sampled_from([0.0, -0.5, -1.0])), min_size=1, max_size=12),
    count=st.integers(1, 12),
)
def test_no_node_is_kept_without_its_parent(tree: list[tuple[int, float]], count: int) -> None:
    parents = [(choice % (node + 1)) - 1 for node, (choice, _) in enumerate(tree)]
    chances: list[float] = []
    for parent, (_, own) in zip(parents, tree, strict=True):
        chances.append((chances[parent] if parent >= 0 else 0.0) + own)  # often as likely as its parent
    count = min(count, len(tree))
    numbers = torch.arange(len(tree))[None]
    ((kept, places),) = select_nodes(torch.tensor([chances]), numbers, torch.tensor([parents]), count=count).tolist()
    assert len(set(kept)) == count
    assert min(chances[node] for node in kept) >= max(
        (chance for node, chance in enumerate(chances) if node not in kept), default=-99.0
    )
    check_parents("tree", places, count)
    for node, place in zip(kept, places, strict=True):
        assert parents[node] == (kept[place - 1] if place else -1)
