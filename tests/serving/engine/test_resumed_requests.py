"""A request that lost its engine goes on in another one, after the tokens that were told of it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from engine_mains import core_over
from grammars import compiler, regex
from repository import TINY_CHAT

from attention import KVCacheExhausted
from model_runner import FinishReason, ModelRunner, SamplingParams
from model_runner.speculation import NgramProposer
from serving.engine.rank.core import EngineCore
from serving.requests import DraftCounts, RequestInput, RequestOutput

pytest.importorskip("llguidance", reason="llguidance is not installed; `make setup` installs it")

NEW = 24
WARM = {"temperature": 1.0, "ignore_eos": True, "max_tokens": NEW}
REQUESTS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=NEW, ignore_eos=True),
    "warm": SamplingParams(**WARM, seed=4, top_k=60, top_p=0.9),
    "with logprobs": SamplingParams(**WARM, seed=5, logprobs=2, prompt_logprobs=1),
    "penalised": SamplingParams(**WARM, seed=6, repetition_penalty=1.5, frequency_penalty=0.4),
    "at least": SamplingParams(max_tokens=NEW, min_tokens=9, stop_token_ids=tuple(range(0, 1024, 8))),
    "a form": SamplingParams(**{**WARM, "max_tokens": 60}, seed=7, grammar=regex("[a-z]{3}-[0-9]{4}-[a-z]{6}")),
    "bad words": SamplingParams(**WARM, seed=8, bad_token_sequences=((5, 6), (9,)), logit_bias=((17, 2.0),)),
}
PROMPTS = {name: [1, 400 + place, 17, 33 + place] * (1 + place) for place, name in enumerate(REQUESTS)}
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
WAYS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"overlap": True},
    "drafts": {"proposer": NgramProposer(1, 4), "num_speculative_tokens": 3},
    "prefixes": {"enable_prefix_caching": True},
}


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    with ModelRunner(TINY_CHAT, num_kv_blocks=160, block_size=4, max_num_seqs=8) as runner:
        yield runner


class Told:
    """What was told of the requests, as a client keeps it."""

    def __init__(self) -> None:
        self.parts: dict[str, list[RequestOutput]] = {name: [] for name in REQUESTS}

    def run(self, runner: ModelRunner, core: EngineCore, steps: int | None = None) -> None:
        """Some steps of an engine with the requests that have not ended; then it is gone."""
        for name, params in REQUESTS.items():
            known = self.parts[name]
            if not (known and known[-1].finish_reason):
                generated = tuple(token for part in known for token in part.token_ids)
                core.add(RequestInput(name, PROMPTS[name], params, generated=generated))
        while core.has_work and steps != 0:
            core.wait(30)
            for request_id in core.ready():
                core.admit(request_id)
            for output in core.step():
                self.parts[output.request_id].append(output)
            steps = None if steps is None else steps - 1
        for name in REQUESTS:
            core.abort(name)
        core.drain()
        core.scheduler.check(idle=True)
        cached = core.scheduler.kv.tree
        runner.allocator.free(cached.evict(cached.num_evictable))

    def outputs(self) -> dict[str, RequestOutput]:
        """Without what depends on the engine's cache."""
        merged = {name: RequestOutput.merged(parts) for name, parts in self.parts.items()}
        return {name: replace(output, times=None, drafts=DraftCounts()) for name, output in merged.items()}


def engine(runner: ModelRunner, **options: Any) -> EngineCore:
    core = core_over(runner, **{**SMALL, "enable_prefix_caching": False, **options})
    core._grammars = compiler()
    return core


@pytest.fixture(scope="module")
def undisturbed(runner: ModelRunner) -> dict[str, RequestOutput]:
    told = Told()
    told.run(runner, engine(runner))
    return told.outputs()


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_those_of_one_engine(way: str, runner: ModelRunner, undisturbed: dict[str, RequestOutput]) -> None:
    """However many steps each engine has run."""
    for steps in ((1,), (2, 3, 1), (9, 0, 4)):
        told = Told()
        for count in steps:
            told.run(runner, engine(runner, **WAYS[way]), count)
        told.run(runner, engine(runner, **WAYS[way]))
        for name, output in told.outputs().items():
            assert output.token_ids == undisturbed[name].token_ids, (name, steps)
            assert output.finish_reason == undisturbed[name].finish_reason
            assert output.num_cached_tokens == 0
            assert len(output.logprobs) == len(undisturbed[name].logprobs)
            for one, other in zip(output.logprobs, undisturbed[name].logprobs, strict=True):
                assert one.token == other.token
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert (output.prompt_logprobs is None) is (undisturbed[name].prompt_logprobs is None)


def test_a_resumed_request_is_counted_once(runner: ModelRunner) -> None:
    """The engine that has read its prompt has counted that; each counts the tokens that it has generated."""
    first, second = engine(runner), engine(runner)
    told = Told()
    told.run(runner, first, 4)
    told.run(runner, second)
    counted = second.statistics().after(first.statistics())
    outputs = told.outputs()
    assert counted.prompt_tokens == sum(map(len, PROMPTS.values()))
    assert counted.generation_tokens == sum(len(output.token_ids) for output in outputs.values())
    assert outputs["a form"].finish_reason is FinishReason.STOP


def test_one_that_does_not_fit_another_rank_is_refused_there(runner: ModelRunner) -> None:
    """Else it would stay at the head of the queue, and no other request would run."""
    core = engine(runner)
    given = RequestInput("a", [1] * 100, SamplingParams(max_tokens=100), generated=(2,) * 28)
    with pytest.raises(KVCacheExhausted, match="cannot go on on another rank: it has 128 tokens"):
        core.add(given)
    assert not core.has_work
