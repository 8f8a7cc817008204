"""Steps of a runner with drafts: what its observer is told, drafts accepted by rejection, trees with graphs."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import runner_graph_cases as graphs
import torch
from checkpoints import checkpoint_fixture, make_checkpoint
from dense_checkpoint import make_small
from flashinfer_cases import install
from flashinfer_standin import StandIns
from request_steps import admit, admitted, prefill, step, verify
from speculating import NEW, PARAMS, PROMPTS, VOCAB, chain, check, p_value, speculate, tree
from step_cases import StepStreamsFake, recording
from torch import Tensor

from model_runner import (
    Acceptance,
    Draft,
    ModelRunner,
    Request,
    RequestError,
    SamplingParams,
    ScheduledRequest,
    Step,
    build_input_batch,
    generate,
)
from ubatch import ConfigError, ForwardMode, UBatchConfig

pytestmark = pytest.mark.long


@dataclass
class Recorder:
    """An observer that checks what it is told against the model's head, and keeps it."""

    runner: ModelRunner
    modes: list[ForwardMode] = field(default_factory=list)

    def observe(
        self, batch: Step, hidden: Tensor, tokens: Sequence[tuple[int, ...]], accepted_rows: Sequence[tuple[int, ...]]
    ) -> None:
        assert torch.is_inference_mode_enabled()
        assert hidden.shape == (batch.num_tokens, self.runner.config.hidden_size)
        says = self.runner.model.compute_logits(hidden).argmax(-1).tolist()
        starts = batch.metadata.query_start_loc_cpu
        for number, (share, own, rows) in enumerate(zip(batch.shares, tokens, accepted_rows, strict=True)):
            if batch.mode is ForwardMode.TARGET_VERIFY:
                assert rows[0] == starts[number]
                assert batch.input_ids[list(rows)].tolist()[1:] == list(own[:-1])
                assert [says[row] for row in rows] == list(own)
            else:
                assert rows == ()
                assert own == ((says[starts[number + 1] - 1],) if share.samples else ())
        self.modes.append(batch.mode)


checkpoint = checkpoint_fixture(make_checkpoint, "Qwen3Moe", num_hidden_layers=2)


def make_runner(checkpoint: Path, **options: Any) -> ModelRunner:
    settings: dict[str, Any] = {"dbo": UBatchConfig(enable_dbo=False), "max_num_seqs": 6}
    return ModelRunner(checkpoint, num_kv_blocks=400, **({"block_size": 4} | settings | options))


# -- the observer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [False, True])
def test_the_observer_is_told_every_step(checkpoint: Path, lanes: bool) -> None:
    """A chunk of a prompt, its end with a decode, a decode, verified chains and trees; whole and in lanes."""
    dbo = UBatchConfig(enable_dbo=lanes, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2)
    with make_runner(checkpoint, dbo=dbo) as runner:
        recorder = Recorder(runner)
        runner.set_observer(recorder)
        first, second = (Request(n, PROMPTS[n], SamplingParams(max_tokens=NEW)) for n in (0, 3))
        admit(runner, [first, second], NEW)
        prefill(runner, [first])
        for chunk in (9, second.num_tokens - 9):
            step(runner, [ScheduledRequest(first, 1), ScheduledRequest(second, chunk)])
        step(runner, [ScheduledRequest(first, 1), ScheduledRequest(second, 1)])
        for draft in (Draft((1, 2)), Draft((1, 2, 3), (0, 0, 2))):
            verify(runner, (first, second), [draft] * 2)
        runner.execute(())
        kinds = [ForwardMode.PREFILL, ForwardMode.MIXED, ForwardMode.MIXED, ForwardMode.DECODE]
        assert recorder.modes == [*kinds, *[ForwardMode.TARGET_VERIFY] * 2]
        assert (runner.statistics().engaged > 3) is lanes

        runner.set_observer(None)
        runner.execute([ScheduledRequest(first, 1)])
        assert len(recorder.modes) == 6


@pytest.mark.parametrize("drafting", [chain, tree])
def test_the_observer_sees_drafts_that_are_right(checkpoint: Path, drafting: Any) -> None:
    greedy = [SamplingParams(max_tokens=NEW)] * len(PROMPTS)
    with make_runner(checkpoint) as runner:
        expected = [list(output.token_ids) for output in generate(runner, PROMPTS, greedy)]
        recorder = Recorder(runner)
        runner.set_observer(recorder)
        requests = admitted(runner, PROMPTS, 3 * NEW)
        prefill(runner, requests)
        accepted, rng = 0, random.Random(0)
        for _ in range(3):
            pairs = zip(requests, expected, strict=True)
            known = [[*tokens, *[0] * 9][request.num_output_tokens :] for request, tokens in pairs]
            output = verify(runner, requests, [drafting(5, 0.9)(rng, each) for each in known])
            accepted += sum(len(tokens) - 1 for tokens in output.tokens)
        check([request.output_token_ids for request in requests], [tokens[:4] for tokens in expected])
        assert accepted > 5
        assert recorder.modes.count(ForwardMode.TARGET_VERIFY) == 3


@pytest.mark.wide
def test_the_observer_of_replayed_steps(tmp_path: Path) -> None:
    """A graph's hidden states, without its padding."""
    with graphs.make_captured(graphs.make_checkpoint(tmp_path / "tiny"), lanes=2, num_speculative_tokens=3) as runner:
        recorder = Recorder(runner)
        runner.set_observer(recorder)
        requests = graphs.start(runner, [3, 6, 1, 5, 2], room=30)
        for drafts in (0, 3, 2, 3):
            verify(runner, requests, [Draft((7, 8, 9)[:drafts])] * 5)
        assert recorder.modes == [ForwardMode.PREFILL, ForwardMode.DECODE, *[ForwardMode.TARGET_VERIFY] * 3]
        assert runner.statistics().graph_replays == 3


@pytest.mark.parametrize("trees", [False, True])
def test_trees_beside_graphs(tmp_path: Path, trees: bool) -> None:
    """Captured without masks, trees run eagerly; with masks, chains have one, too."""
    options = {"num_speculative_tokens": 3, "speculative_trees": trees}
    with graphs.make_captured(graphs.make_checkpoint(tmp_path / "tiny"), **options) as runner:
        (request,) = graphs.start(runner, [4], room=30)
        for parents, replayed in ((None, True), ((0, 1, 2), True), ((0, 0, 1), trees)):
            before = runner.statistics().graph_replays
            verify(runner, [request], [Draft((1, 2, 3), parents)])
            assert (runner.statistics().graph_replays > before) is replayed
        share = ScheduledRequest(request, 1, (1, 2, 3))
        batch = build_input_batch([share], runner.request_table, runner.kv_cache.spec)
        assert (runner.agree(batch).graph is not None) is not trees, "a batch without a mask fits no graph with one"


def test_trees_are_refused_where_attention_takes_no_mask(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, StandIns().find)
    with make_runner(checkpoint, attention_backend="trtllm_mha", block_size=16) as runner:
        assert not runner.attention.takes_trees
        (request,) = admitted(runner, [[1, 2, 3]])
        prefill(runner, [request])
        verify(runner, [request], [Draft((1, 2), (0, 1))])
        with pytest.raises(ConfigError, match="'trtllm_mha' takes no tree mask"):
            verify(runner, [request], [Draft((1, 2), (0, 0))])


# -- rejection ---------------------------------------------------------------------------------------------------------

ROUNDS, AT_ONCE, TOP = 25, 60, 5


def first_tokens(runner: ModelRunner, params: SamplingParams, q: Tensor, *, known: bool) -> list[tuple[int, ...]]:
    """What a verify step gives to many requests with one prompt, each with two drafts drawn from `q` `[vocab]`."""
    found: list[tuple[int, ...]] = []
    cumulative = q.double().cumsum(0)
    for first in range(0, ROUNDS * AT_ONCE, AT_ONCE):
        requests = [Request(n, PROMPTS[0], replace(params, seed=n)) for n in range(first, first + AT_ONCE)]
        admit(runner, requests, 3)
        drafts = []
        for request in requests:
            drawn = [int(torch.searchsorted(cumulative, request.draft_draw(n), right=True)) for n in range(2)]
            drafts.append(Draft(tuple(drawn), probs=q.expand(2, -1) if known else None))
        step(runner, [ScheduledRequest(request, request.num_tokens - 1) for request in requests])
        found += verify(runner, requests, drafts).tokens
        for request in requests:
            runner.release(request)
    return found


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize("known", [True, False], ids=["drawn", "certain"])
def test_a_runner_that_rejects_gives_the_targets_distribution(checkpoint: Path, known: bool) -> None:
    """The distribution is worked out from log-probabilities. Drafts come from one that is the other way round."""
    params = SamplingParams(temperature=2.5, top_k=TOP)
    with make_runner(checkpoint, acceptance=Acceptance.REJECTION, max_num_seqs=AT_ONCE) as runner:
        (asked,) = generate(runner, PROMPTS[:1], SamplingParams(max_tokens=1, logprobs=TOP))
        assert asked.logprobs is not None
        most_likely = asked.logprobs[0].top
        p, q = torch.zeros(2, VOCAB, dtype=torch.float64)
        for share, (token, logprob) in zip((0.05, 0.05, 0.1, 0.2, 0.6), most_likely, strict=True):
            p[token], q[token] = math.exp(logprob / 2.5), share
        tokens = first_tokens(runner, params, q.float(), known=known)
        counts = torch.bincount(torch.tensor([own[0] for own in tokens]), minlength=VOCAB)
        assert p_value(counts, p / p.sum()) > 1e-3
        assert p_value(counts, q) < 1e-9
        accepted = sum(len(own) > 1 for own in tokens) / len(tokens)
        overlap = torch.minimum(p / p.sum(), q).sum() if known else (p / p.sum() * q).sum()
        assert abs(accepted - overlap) < 4 * (overlap * (1 - overlap) / len(tokens)) ** 0.5
        assert tokens == first_tokens(runner, params, q.float(), known=known)


def test_greedy_requests_match_whatever_the_rule(checkpoint: Path) -> None:
    """Together with sampled ones, which get other tokens than without drafts."""
    with make_runner(checkpoint, acceptance=Acceptance.REJECTION) as runner:
        expected = [list(output.token_ids) for output in generate(runner, PROMPTS, PARAMS)]
        for num_drafts, right in ((3, 0.7), (4, 1.0)):
            tokens, _, _ = speculate(runner, expected, num_drafts, chain(num_drafts, right))
            for number, params in enumerate(PARAMS):
                if params.greedy:
                    check([tokens[number]], [expected[number]])
        with pytest.raises(RequestError, match="only chains are accepted by rejection"):
            speculate(runner, expected, 3, tree(3, 0.5))


# -- on streams --------------------------------------------------------------------------------------------------------


def test_trees_and_rejection_on_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody touches what another stream still works on, and nothing but reading a step waits for the device."""
    checkpoint = make_small(tmp_path, dense=True, layers=1)

    class Drafter(Recorder):
        """Its distribution is what the target said last."""

        probs: Tensor

        def observe(self, batch: Step, hidden: Tensor, *_: Any) -> None:
            self.modes.append(batch.mode)
            self.probs = self.runner.model.compute_logits(hidden[-1:]).softmax(-1).expand(3, -1)

    def run(runner: ModelRunner) -> list[list[int]]:
        runner.set_observer(drafter := Drafter(runner))
        greedy = Request("greedy", PROMPTS[3], SamplingParams())
        drawn = Request("drawn", PROMPTS[0], SamplingParams(temperature=1.5, top_k=60, seed=3))
        admit(runner, [greedy, drawn], 20)
        prefill(runner, [greedy, drawn])
        for parents in ((0, 0, 2), None):
            guesses = (7, right_after(greedy), 9) if parents else (1, 2, 3)
            drafts = [Draft(guesses, parents), Draft((4, 5, 6), probs=drafter.probs)]
            verify(runner, [greedy, drawn], drafts)
        assert drafter.modes == [ForwardMode.PREFILL, *[ForwardMode.TARGET_VERIFY] * 2]
        for request in (greedy, drawn):
            runner.release(request)
        return [greedy.token_ids, drawn.token_ids]

    seen = {"experts_backend": "grouped", "attention_backend": "torch"}  # the fake sees no kernels in C
    with make_runner(checkpoint, acceptance=Acceptance.REJECTION, **seen) as plain:
        (known,) = generate(plain, PROMPTS[3:4], SamplingParams(max_tokens=NEW, ignore_eos=True))

        def right_after(request: Request) -> int:
            return known.token_ids[request.num_output_tokens]

        expected = run(plain)
    fake = StepStreamsFake()
    with make_runner(checkpoint, acceptance=Acceptance.REJECTION, streams=fake, **seen) as runner:
        with recording(runner, fake, monkeypatch):
            assert run(runner) == expected
        assert fake.races + fake.faults == []
