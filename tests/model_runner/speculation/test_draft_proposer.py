"""Draft extend and draft steps against recomputing the draft network over whole sequences, after all that happens."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    attached,
    draft_shape,
    drafted_tokens,
    drafting,
    head_estimates,
    make_head,
    make_proposer,
    plain_tokens,
    trainer,
)
from request_steps import admitted, counts, prefill, step, verify
from transformers import AutoTokenizer

from attention import CommonAttentionMetadata, UBatchAttention
from model_runner import Acceptance, Draft, ModelRunner, Request, RequestError, SamplingParams, ScheduledRequest
from model_runner.drafting import DraftProposer, DraftSetting, load_draft
from model_runner.drafting.network import DraftDraws, choose_drafts
from ranks import run_ranks
from ubatch import CommGroup, ConfigError, ForwardMode, UBatchConfig

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("draft")
    target = make_qwen3_moe_checkpoint(folder / "target")
    head = make_head(folder / "head")
    small = make_qwen3_moe_checkpoint(folder / "small", num_hidden_layers=1, seed=3)
    reference = Reference(target, head_estimates(head))
    return SimpleNamespace(target=target, head=folder / "head", small=small, reference=reference)


@pytest.fixture
def runner(made: SimpleNamespace) -> Iterator[ModelRunner]:
    with ModelRunner(made.target, num_kv_blocks=128, block_size=4) as runner:
        yield runner


def check_chain(
    proposer: DraftProposer, network: Recording, reference: Reference, requests: list[Request], count: int = 3
) -> list[Draft]:
    """Propose, and compare every draft's logits with those of recomputing everything."""
    network.given.clear()
    drafts = proposer.propose(requests, [count] * len(requests))
    assert len(network.given) == count
    for index, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
        assert len(draft.tokens) == count
        for place, token in enumerate(draft.tokens):
            expected = reference.logits(request.token_ids, draft.tokens[:place])
            got = network.given[place][index]
            assert (got - expected).abs().max() < TOLERANCE
            assert expected.abs().max() > 0.3  # large enough for the tolerance to mean something
            assert token == int(got.argmax())
    return drafts


@pytest.mark.parametrize("chunk", [1000, 5], ids=["whole", "chunked"])
def test_after_prompts(made: SimpleNamespace, runner: ModelRunner, chunk: int) -> None:
    network = Recording(load_draft("eagle", made.head, runner))
    proposer, requests = drafting(runner, network, chunk=chunk, num_steps=3)
    check_chain(proposer, network, made.reference, requests)


def test_after_any_number_of_accepted_drafts_and_plain_steps(made: SimpleNamespace, runner: ModelRunner) -> None:
    network = Recording(load_draft("eagle", made.head, runner))
    proposer = attached(runner, network, num_steps=3)
    prompts = [*PROMPTS, [7, 8, 9, 10]]
    right = plain_tokens(made.target, prompts, 16)
    requests = admitted(runner, prompts)
    prefill(runner, requests)
    check_chain(proposer, network, made.reference, requests)
    for turn in range(3):
        drafts, expected = [], []
        for index, request in enumerate(requests):
            follows = right[index][request.num_output_tokens :][:3]
            wrong = (index + turn) % 4  # the first draft that is: 3 for none
            drafts.append(Draft(tuple(t if p < wrong else (t + 1) % 131 for p, t in enumerate(follows))))
            expected.append(wrong + 1)
        assert counts(verify(runner, requests, drafts)) == expected
        check_chain(proposer, network, made.reference, requests)
        step(runner, [ScheduledRequest(request, 1) for request in requests])
        check_chain(proposer, network, made.reference, requests, count=2)


def test_after_retraction(made: SimpleNamespace, runner: ModelRunner) -> None:
    network = Recording(load_draft("eagle", made.head, runner))
    proposer, requests = drafting(runner, network, num_steps=3)
    drafted_tokens(runner, proposer, requests, 6, 3)
    runner.release(requests[1])
    proposer.forget(requests[1])
    drafted_tokens(runner, proposer, [requests[0], requests[2]], 10, 3)  # into the blocks that became free, too
    assert proposer.propose([requests[0]], [3])[0].tokens
    with pytest.raises(RequestError, match="request 1 has no row"):
        proposer.propose(requests, [3] * 3)
    runner.admit(requests[1], requests[1].num_tokens + 40)
    assert proposer.propose([requests[1]], [3]) == [Draft(())]  # nothing of it was run yet
    step(runner, [ScheduledRequest(requests[1], requests[1].num_uncomputed_tokens)])
    check_chain(proposer, network, made.reference, requests)


def test_drafts_are_as_many_as_wanted(made: SimpleNamespace, runner: ModelRunner) -> None:
    proposer, requests = drafting(runner, load_draft("eagle", made.head, runner), num_steps=3)
    whole = proposer.propose(requests, [3, 3, 3])
    assert [len(draft.tokens) for draft in proposer.propose(requests, [0, 1, 2])] == [0, 1, 2]
    part = proposer.propose([requests[2], requests[0]], [1, 3])  # in another order, too
    assert [draft.tokens for draft in part] == [whole[2].tokens[:1], whole[0].tokens]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["eagle", "tree", "draft_model"])
def test_what_comes_out_never_depends_on_the_drafts(made: SimpleNamespace, runner: ModelRunner, kind: str) -> None:
    algorithm, path = ("draft_model", made.small) if kind == "draft_model" else ("eagle", made.head)
    shape = {"topk": 2, "num_draft_tokens": 5} if kind == "tree" else {}
    proposer, requests = drafting(runner, load_draft(algorithm, path, runner), num_steps=3, **shape)
    drafted_tokens(runner, proposer, requests, 6, 5)
    for pool in (proposer._draft.kv_cache.key_pool, proposer._draft.kv_cache.value_pool):
        pool.memory.normal_()  # as stale as keys and values can be
    drafted_tokens(runner, proposer, requests, 20, 5)
    expected = plain_tokens(made.target, PROMPTS, 20)
    assert [request.output_token_ids[:20] for request in requests] == expected


def test_a_model_drafts_what_it_would_say(made: SimpleNamespace, runner: ModelRunner) -> None:
    proposer, requests = drafting(runner, load_draft("draft_model", made.small, runner), chunk=5, num_steps=3)
    for turn in range(4):
        drafts = proposer.propose(requests, [3] * 3)
        for request, draft in zip(requests, drafts, strict=True):
            (expected,) = plain_tokens(made.small, [request.token_ids], 3)
            assert list(draft.tokens) == expected
        step(runner, [ScheduledRequest(r, 1) for r in requests]) if turn == 1 else verify(runner, requests, drafts)


def test_a_model_runs_what_was_accepted_even_if_plain_steps_come_first(
    made: SimpleNamespace, runner: ModelRunner
) -> None:
    proposer, requests = drafting(runner, load_draft("draft_model", made.target, runner), num_steps=3)
    for _ in range(3):
        assert counts(verify(runner, requests, proposer.propose(requests, [3] * 3))) == [4] * 3
        step(runner, [ScheduledRequest(request, 1) for request in requests])


@pytest.mark.parametrize("algorithm", ["eagle", "draft_model"])
def test_all_that_is_planned_waits_for_the_plan_before(
    made: SimpleNamespace, runner: ModelRunner, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Back ends on a GPU copy a plan from a host buffer, which the next one overwrites; see `StepStreams.planning`."""
    plan, modes, inside = UBatchAttention.plan, list[ForwardMode](), list[bool]()

    @contextmanager
    def planning() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def recorded(attention: UBatchAttention, metadata: CommonAttentionMetadata) -> Any:
        assert inside, f"a {metadata.mode} batch was planned without waiting"
        modes.append(metadata.mode)
        return plan(attention, metadata)

    monkeypatch.setattr(runner.streams, "planning", planning)
    monkeypatch.setattr(UBatchAttention, "plan", recorded)
    path = made.head if algorithm == "eagle" else made.small
    proposer, requests = drafting(runner, load_draft(algorithm, path, runner), num_steps=3, topk=2, num_draft_tokens=5)
    drafted_tokens(runner, proposer, requests, 8, 5)
    assert {ForwardMode.PREFILL, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND} == set(modes)


def test_trees_need_a_back_end_with_masks(
    made: SimpleNamespace, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft network's, which is another one than the target's where their kinds of attention differ."""
    head = load_draft("eagle", made.head, runner)
    monkeypatch.setattr(UBatchAttention, "takes_trees", False)
    with pytest.raises(ConfigError, match=r"back end '\w+' has no tree masks, so drafts cannot be trees"):
        make_proposer(runner, head, num_steps=3, topk=2)


def test_drawn_drafts_say_what_they_were_drawn_from(made: SimpleNamespace, runner: ModelRunner) -> None:
    network = Recording(load_draft("eagle", made.head, runner))
    proposer = attached(runner, network, num_steps=3, sampled=True)
    requests = admitted(runner, PROMPTS, temperature=0.8, seed=11)
    requests[1].params = SamplingParams()
    prefill(runner, requests)
    drafts = proposer.propose(requests, [3, 3, 2])
    assert drafts[1].probs is None
    for index in (0, 2):
        probs = drafts[index].probs
        assert probs is not None
        assert probs.shape == (len(drafts[index].tokens), 131)
        for place, own in enumerate(probs):
            torch.testing.assert_close(own, (network.given[place][index] / 0.8).softmax(dim=-1))
    assert [draft.tokens for draft in proposer.propose(requests, [3, 3, 2])] == [draft.tokens for draft in drafts]


def test_drawn_drafts_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    requests = [Request(index, [1], SamplingParams(temperature=0.7, seed=index)) for index in range(4000)]
    draws = DraftDraws.of(requests, 2, torch.device("cpu"))
    first, second = (choose_drafts(logits.expand(len(requests), -1), draws, step)[0] for step in range(2))
    pairs = (first * 5 + second).bincount(minlength=25)
    chances = (logits / 0.7).softmax(dim=-1)
    expected = chances.outer(chances).flatten() * len(requests)
    assert ((pairs - expected) ** 2 / expected).sum() < 51.2  # chi-squared, 24 degrees of freedom: p > 0.001


def test_a_request_that_ended_meanwhile_is_not_kept(made: SimpleNamespace, runner: ModelRunner) -> None:
    network = Recording(load_draft("eagle", made.head, runner))
    proposer = attached(runner, network, num_steps=3)
    requests = admitted(runner, PROMPTS)
    launched = runner.launch([ScheduledRequest(request, request.num_tokens) for request in requests])
    launched.sample()
    runner.release(requests[1])
    proposer.forget(requests[1])
    for request, new in zip(requests, launched.result().tokens, strict=True):
        request.advance(request.num_tokens, new[0])
    requests.pop(1)
    check_chain(proposer, network, made.reference, requests)
    assert len(proposer._places) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"num_steps": 3, "num_draft_tokens": 4}, "one draft per step"),
        ({"num_steps": 2, "topk": 2, "num_draft_tokens": 7}, "has 6 nodes"),
        ({"num_steps": 2, "topk": 2, "sampled": True}, "drafts that are drawn are chains"),
    ],
)
def test_numbers_that_do_not_fit(
    made: SimpleNamespace, runner: ModelRunner, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftSetting("eagle", made.head, draft_shape(**settings))


@pytest.mark.slow
def test_drawn_drafts_are_right_more_often() -> None:
    text = AutoTokenizer.from_pretrained(TINY_MOE)(Path(__file__).read_text()).input_ids
    means = []
    for sampled in (False, True):
        with ModelRunner(TINY_MOE, acceptance=Acceptance.REJECTION) as runner:
            proposer = attached(runner, load_draft("eagle", TINY_HEAD, runner), num_steps=3, sampled=sampled)
            prompts = [text[start : start + 60] for start in range(0, 960, 60)]
            requests = admitted(runner, prompts, temperature=1.0, seed=1, ignore_eos=True)
            prefill(runner, requests)
            lengths = drafted_tokens(runner, proposer, requests, 24, 3)
            means.append(sum(lengths) / len(lengths))
    assert means[1] > means[0] + 0.2


def generate_on_rank(rank: int, world_size: int, target: str, head: str) -> list[list[int]]:
    """Rank 0 has requests and drafts, rank 1 only when rank 0 is half done, and then two more than it."""
    group = CommGroup.from_process_group(timeout_s=20)
    dbo = UBatchConfig(dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2)
    with ModelRunner(target, group=group, dbo=dbo, num_kv_blocks=256, block_size=4) as runner:
        proposer = attached(runner, load_draft("eagle", head, runner), num_steps=3)
        requests = admitted(runner, PROMPTS if rank == 0 else [*PROMPTS, [1, 2], [3]])
        for turn in range(14):
            if (rank == 1 and turn < 4) or (rank == 0 and turn >= 9):
                step(runner, [])
            elif not requests[0].num_computed_tokens:
                prefill(runner, requests)
            else:
                verify(runner, requests, proposer.propose(requests, [3] * len(requests)))
        return [request.output_token_ids for request in requests]


@pytest.mark.slow
def test_ranks_draft_by_themselves(made: SimpleNamespace) -> None:
    by_rank = run_ranks(generate_on_rank, 2, str(made.target), str(made.head))
    expected = plain_tokens(made.target, [*PROMPTS, [1, 2], [3]], 60)
    for outputs in by_rank:
        for got, own in zip(outputs, expected, strict=False):
            assert len(got) >= 9
            assert got == own[: len(got)]


@pytest.mark.wide
def test_the_trained_head_on_held_out_text() -> None:
    train = trainer()
    prompts = train.held_out_prompts(AutoTokenizer.from_pretrained(TINY_MOE), train.read_corpus(0), 0)[:12]
    with ModelRunner(TINY_MOE) as runner:
        proposer, requests = drafting(
            runner, load_draft("eagle", TINY_HEAD, runner), prompts.tolist(), params={"ignore_eos": True}, num_steps=3
        )
        lengths = drafted_tokens(runner, proposer, requests, 40, 3)
    assert sum(lengths) / len(lengths) > 2.5  # 3.4 over 64 prompts and 128 tokens each
