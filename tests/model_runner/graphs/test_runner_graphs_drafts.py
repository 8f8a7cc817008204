"""Graphs of a draft network: replays draft what eager steps draft. And the table of modes, by what is captured."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_checkpoint import DenseQwen3
from draft_cases import Recording, attached, drafting, make_head
from fake_graphs import FakeGraphs
from request_steps import admitted, prefill, step, verify
from runner_graph_cases import SIZES, TINY, make_checkpoint, make_runner

from attention import MODES
from model_runner import Acceptance, ModelRunner, ScheduledRequest, make_random_qwen3_moe
from model_runner.drafting import DraftProposer, load_draft
from model_runner.drafting import graphs as draft_graphs
from ubatch import ConfigError, ForwardMode
from ubatch.process import job_store

pytestmark = pytest.mark.long

DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
PROMPTS = [[5, 17, 9, 3, 42, 42, 8], list(range(20, 41)), [1, 0, 58], [7, 7, 7, 7]]
ROUNDS = 4
CHAIN = {"num_steps": 3}
TREE = {"num_steps": 3, "topk": 2, "num_draft_tokens": 5}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("drafts")
    make_head(folder / "head", hidden_size=TINY.hidden_size, vocab_size=TINY.vocab_size)
    dense = DenseQwen3(**asdict(replace(TINY, num_hidden_layers=1, num_experts=0)))
    small = make_random_qwen3_moe(folder / "small", 5, size=dense, dtype=torch.float32)
    return SimpleNamespace(target=make_checkpoint(folder / "target"), head=folder / "head", small=small)


def captured_runner(made: SimpleNamespace, shape: dict[str, int], **options: Any) -> ModelRunner:
    """With the graphs of a shape of drafts, nothing captured yet."""
    drafts = shape.get("num_draft_tokens", shape["num_steps"])
    settings = {"cudagraph_mode": "full", "cudagraph_capture_sizes": SIZES, "graphs": FakeGraphs()}
    settings |= {"num_speculative_tokens": drafts, "speculative_trees": "topk" in shape}
    return make_runner(made.target, **(settings | options))


def played(
    runner: ModelRunner, proposer: DraftProposer, count: int, **params: Any
) -> tuple[list[Any], list[list[int]]]:
    """All drafts that are proposed while requests are verified, by twos and by fours, and decode; and their tokens."""
    requests = admitted(runner, PROMPTS, room=60, ignore_eos=True, **params)
    prefill(runner, requests)
    proposed: list[Any] = []
    for turn in range(ROUNDS):
        for chosen in (requests[: 2 + turn % 3], requests[2:], requests):
            drafts = proposer.propose(chosen, [count] * len(chosen))
            proposed += [(draft.tokens, draft.parents, draft.probs) for draft in drafts]
            assert all(len(draft.tokens) == count for draft in drafts)
            verify(runner, chosen, drafts)
        step(runner, [ScheduledRequest(request, 1) for request in requests])
    return proposed, [request.output_token_ids for request in requests]


def check_same(eager: Sequence[Any], replayed: Sequence[Any]) -> None:
    """Tokens and trees; and what drafts were drawn from, but for rounding."""
    assert [each[:2] for each in replayed] == [each[:2] for each in eager]
    for (*_, own), (*_, wanted) in zip(replayed, eager, strict=True):
        assert (own is None) == (wanted is None)
        if own is not None:
            torch.testing.assert_close(own, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("algorithm", "shape", "sampled"),
    [
        ("eagle", CHAIN, False),
        ("eagle", TREE, False),
        ("draft_model", CHAIN, False),
        ("draft_model", TREE, False),
        ("eagle", CHAIN, True),
        ("eagle", {"num_steps": 1}, False),
    ],
    ids=["head", "head's trees", "model", "model's trees", "drawn", "one draft"],
)
def test_replays_draft_what_eager_steps_draft(
    made: SimpleNamespace, algorithm: str, shape: dict[str, int], sampled: bool
) -> None:
    path = made.head if algorithm == "eagle" else made.small
    count = shape.get("num_draft_tokens", shape["num_steps"])
    params = {"temperature": 0.9, "seed": 5} if sampled else {}
    options = {"acceptance": Acceptance.REJECTION} if sampled else {}
    with make_runner(made.target, **options) as runner:
        proposer = attached(runner, load_draft(algorithm, path, runner), sampled=sampled, **shape)
        assert proposer._draft.graphs is None
        eager, expected = played(runner, proposer, count, **params)
    with captured_runner(made, shape, **options) as runner:
        proposer = attached(runner, load_draft(algorithm, path, runner), sampled=sampled, **shape)
        runner.capture_graphs()
        graphs = proposer._draft.graphs
        assert graphs is not None
        replayed, tokens = played(runner, proposer, count, **params)
        if algorithm == "eagle" or shape == CHAIN:  # the model is so sure that many of its trees' nodes are as likely
            check_same(eager, replayed)
        assert tokens == expected
        proposals, levels = 3 * ROUNDS, shape["num_steps"] - 1
        of_drafts = proposals * (levels if "topk" in shape else min(levels, 1))
        # A head takes in what every step has settled. A model catches up when it drafts, eagerly if by more than that.
        of_extends = graphs.replays - of_drafts
        assert of_extends == proposals + ROUNDS if algorithm == "eagle" else of_extends > 0
        assert runner.statistics().graph_replays == proposals + ROUNDS


@pytest.mark.wide
def test_fewer_drafts_than_a_chain_has(made: SimpleNamespace) -> None:
    """The graph drafts all of a chain; what nobody wants goes to no slot of the cache."""
    wanted = [1, 2, 0, 1]
    with make_runner(made.target) as runner:
        proposer, requests = drafting(runner, load_draft("eagle", made.head, runner), PROMPTS, **CHAIN)
        expected = proposer.propose(requests, wanted)
    with captured_runner(made, CHAIN) as runner:
        proposer, requests = drafting(runner, load_draft("eagle", made.head, runner), PROMPTS, **CHAIN)
        runner.capture_graphs()
        cache = proposer._draft.kv_cache
        before = cache.keys(0).clone()
        assert proposer.propose(requests, wanted) == expected
        assert proposer._draft.graphs is not None
        assert proposer._draft.graphs.replays == 1
        changed = (cache.keys(0) != before).flatten(2).any(-1)  # [blocks, places of a block]
        assert int(changed.sum()) == 3, "one draft of each of three requests was run and kept"


def test_what_fits_no_graph_runs_eagerly(made: SimpleNamespace) -> None:
    """More requests than the largest graph has room for, and chains that end behind the longest sequence."""
    with captured_runner(made, CHAIN, cudagraph_capture_sizes=(2,)) as runner:
        proposer, requests = drafting(runner, load_draft("eagle", made.head, runner), PROMPTS, **CHAIN)
        runner.capture_graphs()
        graphs = proposer._draft.graphs
        assert graphs is not None
        proposer.propose(requests, [3] * 4)
        assert graphs.replays == 0
        proposer.propose(requests[:2], [3] * 2)
        assert graphs.replays == 1
        longest = runner.request_table.max_blocks * 4
        assert graphs.find_chain([longest - 2]) is not None
        assert graphs.find_chain([longest - 1]) is None


@pytest.mark.wide
def test_a_network_that_comes_late_is_captured_at_once(made: SimpleNamespace) -> None:
    with captured_runner(made, CHAIN) as runner:
        before = len(runner.capture_graphs())
        proposer, requests = drafting(runner, load_draft("eagle", made.head, runner), PROMPTS, **CHAIN)
        assert len(runner.graph_shapes) == before + 2 * len(SIZES)
        proposer.propose(requests, [3] * 4)
        assert proposer._draft.graphs is not None
        assert proposer._draft.graphs.replays == 1


def test_peers_wait_while_drafts_are_captured(made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures take long, and ranks do not take equally long."""
    late = []
    record = draft_graphs.record

    def noted(*args: Any) -> Any:
        late.append(bool(job_store._own.blocks))
        return record(*args)

    monkeypatch.setattr(draft_graphs, "record", noted)
    with captured_runner(made, CHAIN, cudagraph_capture_sizes=(1, 2)) as runner:
        attached(runner, load_draft("eagle", made.head, runner), **CHAIN)
        runner.capture_graphs()
    assert late == [True] * 4
    assert not job_store._own.blocks


def test_what_cannot_be_captured_is_refused_by_name(made: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """A draft model with other experts: `full` refuses it, `auto` drafts eagerly and says so."""
    for mode in ("full", "auto"):
        with captured_runner(made, CHAIN, cudagraph_mode=mode) as runner:
            assert runner.graphs is not None
            runner.experts_backend = "grouped"
            network = load_draft("draft_model", made.target, runner)
            if mode == "full":
                with pytest.raises(ConfigError, match=r"full: the experts back end \w+ cannot be captured"):
                    attached(runner, network, **CHAIN)
                with pytest.raises(ConfigError, match=r"Recording drafts, but is no nn\.Module"):
                    attached(runner, Recording(network), **CHAIN)
                continue
            with caplog.at_level(logging.WARNING, logger="model_runner"):
                proposer, requests = drafting(runner, network, PROMPTS, **CHAIN)
            assert "draft steps are not captured as CUDA graphs: the experts back end" in caplog.text
            assert proposer._draft.graphs is None
            runner.capture_graphs()
            assert [len(draft.tokens) for draft in proposer.propose(requests, [3] * 4)] == [3] * 4


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chains", "trees"])
def test_the_table_of_modes_says_what_is_captured(made: SimpleNamespace, shape: dict[str, int]) -> None:
    """By what a runner and its draft network capture, and by the modes of the steps that they replay."""
    count = shape.get("num_draft_tokens", shape["num_steps"])
    with captured_runner(made, shape) as runner:
        proposer = attached(runner, load_draft("eagle", made.head, runner), **shape)
        graphs = runner.capture_graphs()
        captured = {graph.key.mode for graph in graphs}
        assert len(graphs) == len(runner.graph_shapes)
        # An idle rank has no graphs of its own: it replays whichever of them the others do, all of it padding.
        assert {mode for mode, traits in MODES.items() if traits.graph} == captured | {ForwardMode.IDLE}
        played(runner, proposer, count)
        replayed = {graph.key.mode for graph in graphs if graph.recording.replayed}  # type: ignore[attr-defined]
        assert replayed == captured == {DECODE, VERIFY, EXTEND}
