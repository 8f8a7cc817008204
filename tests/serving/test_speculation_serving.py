"""Speculation in the scheduler and through whole engines: the same tokens as without it, whoever guesses.

`test_scheduler_random` runs chains and trees of random drafts through every kind of scheduler, without a model.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engine_mains import core_over
from fake_proposer import FakeProposer, oracle
from fake_runner import be_optimistic, hashed, make_loop
from repository import TINY_MOE

from model_runner import Draft, ModelRunner, Request, SamplingParams, generate
from serving import LLM
from serving.cli import main
from serving.engine.options import EngineOptions
from serving.engine.rank.build import make_core
from serving.engine.rank.build import make_runner as make_engine_runner
from serving.engine.speculation import Algorithm, SpeculationConfig
from serving.requests import DraftCounts, EngineStatistics, RequestInput
from serving.scheduler import SchedulerConfig
from serving.scheduler.request import shares_of
from serving.scheduler.speculation import depth_of
from serving.workbench.bench.runtime.speculation import census_of
from ubatch import ConfigError, ForwardMode, UBatchConfig

pytestmark = pytest.mark.long

HEAD = TINY_MOE.parent / "tiny-moe-eagle"
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [53], [58, 97, 93, 23, 84], [62, 64, 33] * 7, [100] * 4]
PARAMS = [
    SamplingParams(max_tokens=30),
    SamplingParams(max_tokens=25, temperature=1.2, seed=3, top_p=0.95),
    SamplingParams(max_tokens=30, frequency_penalty=1.0, repetition_penalty=1.3),
    SamplingParams(max_tokens=5),
    SamplingParams(max_tokens=28, min_tokens=6, stop_token_ids=(11, 12, 13)),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("speculation"), "Qwen3Moe", num_hidden_layers=2)


def make_runner(checkpoint: Path, **dbo: Any) -> ModelRunner:
    return ModelRunner(checkpoint, num_kv_blocks=60, block_size=4, max_num_seqs=5, dbo=UBatchConfig(**dbo))


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> list[list[int]]:
    with make_runner(checkpoint, enable_dbo=False) as runner:
        return [list(output.token_ids) for output in generate(runner, PROMPTS, PARAMS)]


def serve(
    runner: ModelRunner, proposer: FakeProposer, drafts: int = 3, **config: Any
) -> tuple[list[list[int]], EngineStatistics, list[DraftCounts]]:
    """All prompts through an engine's plain loop: tokens, totals, and the drafts of each."""
    settings = {"max_num_seqs": 5, "max_num_batched_tokens": 24, "max_model_len": 100, **config}
    core = core_over(runner, proposer=proposer, num_speculative_tokens=drafts, **settings)
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        core.add(RequestInput(str(index), prompt, params))
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    counts = [DraftCounts() for _ in PROMPTS]
    while core.has_work:
        for output in core.step():
            tokens[int(output.request_id)] += output.token_ids
            counts[int(output.request_id)] += output.drafts
    core.scheduler.check(idle=True)
    return tokens, core.statistics(), counts


# -- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("lanes", [1, 2])
def test_an_engine_gives_the_same_tokens(
    checkpoint: Path, wanted: list[list[int]], trees: bool, lanes: int, no_thread_leaks: None
) -> None:
    dbo = {"dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2} if lanes == 2 else {"enable_dbo": False}
    with make_runner(checkpoint, **dbo) as runner:
        proposer = oracle(wanted, 131, trees=trees, silent=0.2, places=6 if trees else 0)
        proposer.table = runner.request_table
        tokens, statistics, counts = serve(runner, proposer, num_draft_places=6 if trees else 0)
    assert tokens == wanted
    assert not proposer.known
    verify = {step: count for step, count in statistics.steps.items() if step.startswith("target_verify/")}
    assert sum(verify.values()) > 5
    if lanes == 2:  # one request alone cannot be cut
        lonely = verify.get("target_verify/last_ubatch_empty", 0)
        assert verify["target_verify/engaged"] == sum(verify.values()) - lonely > sum(verify.values()) / 2
    total = sum(counts, DraftCounts())
    assert (total.verified, total.drafted, total.accepted) == (
        statistics.num_drafts,
        statistics.drafted_tokens,
        statistics.accepted_tokens,
    )
    assert sum(statistics.accepted_per_position) == total.accepted > 10
    assert list(statistics.accepted_per_position) == sorted(statistics.accepted_per_position, reverse=True)


@pytest.mark.parametrize("trees", [False, True])
def test_retracted_and_shared_prefixes_with_drafts(checkpoint: Path, wanted: list[list[int]], trees: bool) -> None:
    """Few blocks: requests are retracted, and come back to what the prefix cache kept of them."""
    with ModelRunner(checkpoint, num_kv_blocks=22, block_size=4, max_num_seqs=5) as runner:
        proposer = oracle(wanted, 131, trees=trees)
        tokens, statistics, _ = serve(runner, proposer, max_model_len=60)
    assert tokens == wanted
    assert statistics.preemptions > 0
    assert statistics.accepted_tokens > 0
    assert not proposer.known


def drafting(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"speculative_algorithm": algorithm, **{f"speculative_{name}": value for name, value in more.items()}}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "speculation",
    [
        drafting("ngram", ngram_min=1),
        drafting("draft_model", draft_model_path=TINY_MOE),
        drafting("draft_model", draft_model_path=TINY_MOE, eagle_topk=2, num_steps=3, num_draft_tokens=5),
        drafting("eagle", draft_model_path=HEAD),
        drafting("eagle", draft_model_path=HEAD, eagle_topk=3),
    ],
    ids=["ngram", "draft_model", "draft_model_tree", "eagle", "eagle_tree"],
)
def test_settings_of_llm_do_not_change_greedy_tokens(speculation: dict[str, Any]) -> None:
    texts = ["import os\nimport sys\n\n\ndef main(", "class Test(", "for name in names:\n    ", "0 1 2 3 0 1 2 3 0 1"]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    small = {"max_num_seqs": 4, "kv_cache_memory": "16M", "max_model_len": 256}
    with LLM(TINY_MOE, **small) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(texts, params)]
    with LLM(TINY_MOE, **small, **speculation) as llm:
        outputs = [output.outputs[0] for output in llm.generate(texts, params)]
        statistics = llm.statistics[0]
    assert [output.token_ids for output in outputs] == plain
    drafts = sum((output.drafts for output in outputs), DraftCounts())
    assert 0 < drafts.accepted == statistics.accepted_tokens
    assert drafts.drafted == statistics.drafted_tokens
    length = drafts.mean_accepted_length
    assert length is not None
    if speculation.get("speculative_draft_model_path") == TINY_MOE:
        assert length > 3  # it guesses what it says itself


# -- the scheduler ----------------------------------------------------------------------------------------------------


def test_trees_are_filled_up_behind_their_last_node() -> None:
    loop = make_loop(num_speculative_tokens=4, proposer=_Fixed(Draft((7, 8, 9), (0, 0, 1)), Draft((5,) * 4)))
    loop.add("tree", [1, 2], max_tokens=20, ignore_eos=True)
    loop.add("chain", [3, 4], max_tokens=20, ignore_eos=True)
    loop.step()
    step = loop.step()
    assert step.mode is ForwardMode.TARGET_VERIFY
    first, second = step.shares
    assert (first.drafts, first.parents) == ((7, 8, 9, 9), (0, 0, 1, 3))
    assert (second.drafts, second.parents) == ((5,) * 4, None)
    assert [(share.num_drafted, share.reach) for share in shares_of(step)] == [(3, 2), (4, 4)]
    loop.run()


def test_drawn_drafts_are_filled_up_with_certain_ones() -> None:
    probs = torch.full((1, 50), 0.02)
    loop = make_loop(
        num_speculative_tokens=3, proposer=_Fixed(Draft((7,), None, probs), Draft((5, 5, 5), None, probs.repeat(3, 1)))
    )
    for name in ("short", "long"):
        loop.add(name, [1, 2], max_tokens=20, ignore_eos=True)
    loop.step()
    short, long = loop.step().shares
    assert short.drafts == (7, 7, 7)
    assert torch.equal(short.draft_probs[0], probs[0])
    assert short.draft_probs[1:].nonzero().tolist() == [[0, 7], [1, 7]]
    assert torch.equal(long.draft_probs, probs.repeat(3, 1))
    loop.run()


def test_only_proposed_drafts_count_as_right() -> None:
    """All of them are, here: those that fill up as well, and give tokens."""
    loop = make_loop(
        num_speculative_tokens=3, proposer=_Fixed(Draft((3,)), Draft((3,) * 3)), next_token=lambda tokens: 3
    )
    for name in ("short", "long"):
        loop.add(name, [1, 2, 3], max_tokens=9, ignore_eos=True)
    while not any(output.drafts.verified for outputs in loop.outputs.values() for output in outputs):
        loop.step()
    short, long = (loop.outputs[name][-1] for name in ("short", "long"))
    assert (len(short.token_ids), short.drafts) == (4, DraftCounts(1, 1, 1))
    assert (len(long.token_ids), long.drafts) == (4, DraftCounts(1, 3, 3))
    statistics = loop.scheduler.statistics()
    assert (statistics.num_drafts, statistics.drafted_tokens, statistics.accepted_tokens) == (2, 4, 4)
    assert statistics.accepted_per_position == (2, 1, 1)
    loop.run()


class _Fixed:
    """The same drafts for every step, of the first request and of the others, as long as there is room for them."""

    def __init__(self, *drafts: Draft) -> None:
        self._drafts = drafts

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        full = all(count >= len(max(self._drafts, key=lambda d: len(d.tokens)).tokens) for count in counts)
        return list(self._drafts[: len(requests)]) if full else [Draft(())] * len(requests)

    def forget(self, request: Request) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize(
    ("draft", "depth"),
    [(Draft(()), 0), (Draft((1, 2)), 2), (Draft((1, 2, 3), (0, 0, 0)), 1), (Draft((1, 2, 3, 4), (0, 1, 0, 2)), 3)],
)
def test_how_many_drafts_may_be_right_at_once(draft: Draft, depth: int) -> None:
    assert depth_of(draft) == depth


def test_a_request_is_forgotten_when_it_is_aborted_or_retracted() -> None:
    proposer = FakeProposer(lambda request, tokens: hashed(tokens), right=1.0)
    loop = make_loop(num_blocks=12, num_speculative_tokens=2, proposer=proposer)
    be_optimistic(loop)
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        loop.add(name, prompt, max_tokens=30, ignore_eos=True)
    for _ in range(4):
        loop.step()
    assert len(proposer.known) == 2
    while not loop.scheduler.statistics().preemptions:
        loop.step()
    assert len(proposer.known) == 1
    loop.abort(str(next(iter(proposer.known)).request_id))
    assert not proposer.known
    loop.run()
    assert not proposer.known


def test_there_are_slots_for_all_that_a_proposer_writes() -> None:
    """At the end of the context, and of the cache, a request does without drafts rather than without slots."""
    for limits in ({"max_model_len": 24}, {"num_blocks": 6, "max_model_len": 64}):
        proposer = FakeProposer(lambda request, tokens: hashed(tokens), right=1.0, trees=True, places=9)
        loop = make_loop(num_speculative_tokens=3, num_draft_places=9, proposer=proposer, **limits)  # type: ignore[arg-type]
        proposer.table = loop.runner.table
        loop.add("a", [5], max_tokens=100, ignore_eos=True)
        loop.run()
        assert proposer.asked > 1


def test_drafts_need_a_proposer_and_the_other_way_round() -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens is 0, but there is a proposer"):
        make_loop(proposer=FakeProposer(lambda request, tokens: 0))


def test_mean_accepted_length() -> None:
    assert DraftCounts().mean_accepted_length is None
    assert (DraftCounts(2, 6, 1) + DraftCounts(2, 6, 5)).mean_accepted_length == 2.5


# -- commands ---------------------------------------------------------------------------------------------------------

GENERATE = ["generate", str(TINY_MOE), "--max-tokens", "24"]
GENERATE += ["--prompt", "import os\n", "def main(", "class A:\n    def"]
CHAIN = ["--speculative-algorithm", "eagle", "--speculative-draft-model-path", str(HEAD)]


def generated(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[list[str], str]:
    """The completions that `ubatch generate` prints, and what it says of speculation."""
    assert main([*GENERATE, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    ends = [index for index, line in enumerate(lines) if line.startswith("steps: ")]
    said = [line for line in lines if line.startswith("speculation: ")]
    return lines[: ends[0]], "".join(said)


def test_speculation_uses_the_plain_loop_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    options = EngineOptions(
        TINY_MOE,
        scheduler=SchedulerConfig(max_model_len=256),
        speculation=SpeculationConfig(Algorithm.NGRAM, 3),
        overlap_schedule=True,
        kv_cache_memory=1 << 20,
    )
    with make_engine_runner(options) as runner, caplog.at_level(logging.INFO, logger="serving"):
        assert not make_core(options, runner).overlap_schedule
    assert sum("plain loop" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.slow
def test_the_generate_command_speculates(capsys: pytest.CaptureFixture[str]) -> None:
    plain, nothing = generated(capsys)
    assert nothing == ""
    for flags in (CHAIN, [*CHAIN, "--speculative-eagle-topk", "2"], ["--speculative-algorithm", "ngram"]):
        text, said = generated(capsys, *flags, "--max-num-batched-tokens", "16")
        assert text == plain
        assert "tokens per request and verify step" in said
    ranks = ("--data-parallel-size", "2", "--enable-expert-parallel", "--enable-dbo")
    text, said = generated(capsys, *CHAIN, *ranks, "--dbo-decode-token-threshold", "8")
    assert text == plain
    assert "tokens per request and verify step" in said


def test_acceptance_by_rejection_is_seeded() -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True)
    greedy = SamplingParams(max_tokens=20, ignore_eos=True)
    keywords = {"kv_cache_memory": "8M", "max_model_len": 128, "max_num_seqs": 2, "skip_tokenizer_init": True}
    prompts = [[5, 6, 7, 8], [40, 41, 42]]
    with LLM(TINY_MOE, **keywords) as llm:  # type: ignore[arg-type]
        (_, wanted) = llm.generate(prompts, [params, greedy])
    head = {"speculative_algorithm": "eagle", "speculative_draft_model_path": CHAIN[3]}
    with LLM(TINY_MOE, **keywords, **head, speculative_accept="rejection") as llm:  # type: ignore[arg-type]
        first, second = ([o.outputs[0].token_ids for o in llm.generate(prompts, [params, greedy])] for _ in range(2))
        assert llm.statistics[0].accepted_tokens > 0
    assert first == second
    assert first[1] == wanted.outputs[0].token_ids


@pytest.mark.slow
def test_bench_speculation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "speculation.json"
    size = ["--prompts", "2", "--batches", "1", "2", "--input-len", "12", "--output-len", "10", "--blocks", "2"]
    assert main(["bench", "speculation", *size, "--threads", "1", "--no-census", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert [each["batch"] for each in results["results"]] == [1, 2]
    for each in results["results"]:
        assert list(each["arms_ms"]) == ["without", "ngram", "eagle_chain", "eagle_tree"]
        assert all(len(values) == 2 for values in each["arms_ms"].values())
        assert list(each["speedup"]) == ["ngram", "eagle_chain", "eagle_tree"]
        found = each["acceptance"]["eagle_chain"]
        assert found["same"] is True
        assert 1 < found["mean_length"] <= 4
        assert len(found["per_position"]) <= 3
        assert found["mean_length"] == pytest.approx(1 + sum(found["per_position"]))
    assert results["census"] is None
    assert "speculation: 2 requests at once" in capsys.readouterr().out


def test_census() -> None:
    busy = {"decode/engaged": 9, "target_verify/engaged": 8, "target_verify/peer_declined": 5}
    other = {"target_verify/below_decode_threshold": 3, "target_verify/engaged": 8, "target_verify/modes_differ": 1}
    assert census_of([busy, other]) == (16, 19)  # of the five, three were below the other rank's threshold
