"""Allowed tokens and bad sequences through a runner, verify steps and both loops, against their definition."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from engine_mains import core_over
from fake_device import run
from hypothesis import given
from hypothesis import strategies as st
from speculating import NEW, PROMPTS, VOCAB, Drafting, chain, check, speculate, tree

from model_runner import ModelRunner, Request, SamplingParams, SamplingRow, ScheduledRequest, generate
from model_runner.sampling.sampler import NO_TOKEN, OUT_OF_TOKENS, sample
from model_runner.sampling.sampling_params import BadSequences
from model_runner.speculation import Acceptance, DraftRows, sample_by_rejection
from serving.requests import RequestInput
from ubatch import UBatchConfig

ODD = tuple(range(1, VOCAB, 2))
FREE = [
    SamplingParams(max_tokens=NEW),
    SamplingParams(max_tokens=NEW, temperature=1.2, seed=3, top_p=0.95),
    SamplingParams(max_tokens=NEW, frequency_penalty=1.0, repetition_penalty=1.3, allowed_token_ids=ODD),
    SamplingParams(max_tokens=NEW, temperature=0.8, seed=8, presence_penalty=1.0, min_p=0.01, top_k=20),
    SamplingParams(max_tokens=NEW, min_tokens=6, stop_token_ids=(11, 12, 13), allowed_token_ids=(*ODD, 12)),
]

tokens = st.integers(0, 3)


def completing(sequences: Sequence[Sequence[int]], output: Sequence[int]) -> set[int]:
    """The definition: the last tokens of those whose others are what the output ends with."""
    return {last for *before, last in sequences if list(output)[len(output) - len(before) :] == before}


def without(params: SamplingParams, output: Sequence[int], seed: int) -> SamplingParams:
    """With sequences of one to four tokens of this output among the bad ones, and some others."""
    rng = random.Random(seed)
    places = [(rng.randrange(len(output)), rng.randrange(2, 5)) for _ in range(6)]
    bad = [tuple(output[at : at + length]) for at, length in places] + [(output[-1],)]
    bad += [(rng.randrange(VOCAB), rng.randrange(VOCAB)) for _ in range(20)]
    return replace(params, bad_token_sequences=tuple(bad))


@given(sequences=st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=8), output=st.lists(tokens, max_size=8))
def test_what_would_complete_a_sequence(sequences: list[list[int]], output: list[int]) -> None:
    found = BadSequences(sequences)
    single = {sequence[0] for sequence in sequences if len(sequence) == 1}
    assert set(found.single) == single
    assert set(found.completing(output)) | single == completing(sequences, output)
    tail = output[len(output) - found.reach :] if found.reach < len(output) else output
    assert found.completing(tail) == found.completing(output), "no more than `reach` tokens are looked at"


# -- through a runner --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("limits"), "Qwen3Moe", num_hidden_layers=2)


def make_runner(checkpoint: Path, *, acceptance: Acceptance = Acceptance.MATCH, lanes: bool = False) -> ModelRunner:
    dbo = UBatchConfig(enable_dbo=lanes, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2)
    return ModelRunner(checkpoint, num_kv_blocks=120, block_size=4, max_num_seqs=6, dbo=dbo, acceptance=acceptance)


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> Iterator[ModelRunner]:
    with make_runner(checkpoint) as runner:
        yield runner


def outputs_of(runner: ModelRunner, params: Sequence[SamplingParams]) -> list[list[int]]:
    return [list(output.token_ids) for output in generate(runner, PROMPTS, params)]


@pytest.fixture(scope="module")
def free(runner: ModelRunner) -> list[list[int]]:
    return outputs_of(runner, FREE)


@pytest.fixture(scope="module")
def params(free: list[list[int]]) -> list[SamplingParams]:
    return [without(*each, seed) for seed, each in enumerate(zip(FREE, free, strict=True))]


@pytest.fixture(scope="module")
def expected(runner: ModelRunner, params: list[SamplingParams]) -> list[list[int]]:
    return outputs_of(runner, params)


def keep_to(params: SamplingParams, output: Sequence[int]) -> bool:
    """Whether an output has allowed tokens only, and no bad sequence."""
    allowed = range(VOCAB) if params.allowed_token_ids is None else params.allowed_token_ids
    completes = (token in completing(params.bad_token_sequences, output[:at]) for at, token in enumerate(output))
    return set(output) <= set(allowed) and not any(completes)


def logits_after(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """The model's logits of the token after these."""
    request = Request("again", tokens, SamplingParams())
    runner.admit(request, len(tokens))
    step = runner.launch([ScheduledRequest(request, len(tokens))])
    assert step._logits is not None
    logits = step._logits[0].clone()
    runner.release(request)
    return logits


def test_greedy_tokens_are_the_most_likely_ones_that_may_come(
    runner: ModelRunner, params: list[SamplingParams], expected: list[list[int]], free: list[list[int]]
) -> None:
    for own, output, before in zip(params, expected, free, strict=True):
        assert keep_to(own, output)
        assert not keep_to(own, before), "the sequences are of tokens that would come"
    for number in (0, 4):
        own, changed = params[number], 0
        for place, token in enumerate(expected[number]):
            logits = logits_after(runner, PROMPTS[number] + expected[number][:place])
            changed += token != logits.argmax()
            never = completing(own.bad_token_sequences, expected[number][:place])
            never |= set((*own.stop_token_ids, *runner.config.eos_token_ids) if place < own.min_tokens else ())
            never |= set() if own.allowed_token_ids is None else set(range(VOCAB)) - set(own.allowed_token_ids)
            logits[list(never)] = -torch.inf
            assert logits.max() - logits[token] < 1e-4
            assert token not in never
        assert changed


@pytest.mark.parametrize("drafting", [None, chain(3, 1.0)], ids=["plain", "verify"])
def test_the_prompt_is_no_part_of_a_bad_sequence(
    runner: ModelRunner, free: list[list[int]], drafting: Drafting | None
) -> None:
    """Sequences that begin in the prompt, of two to five tokens: what would come, comes."""
    params = []
    for own, prompt, output in zip(FREE, PROMPTS, free, strict=True):
        both = prompt + output
        places = [(begin, end) for begin in (1, 2, 3) for end in (1, 2) if begin <= len(prompt)]
        bad = [tuple(both[len(prompt) - begin : len(prompt) + end]) for begin, end in places]
        bad = [each for each in bad if keep_to(replace(own, bad_token_sequences=(each,)), output)]
        assert bad, "some are not in the output itself"
        params.append(replace(own, bad_token_sequences=tuple(bad)))
    tokens = outputs_of(runner, params) if drafting is None else speculate(runner, free, 3, drafting, params=params)[0]
    check(tokens, free)


@pytest.mark.parametrize("drafted", ["expected", "free"])
@pytest.mark.parametrize("drafting", [chain(3, 0.8), chain(5, 1.0), tree(5, 0.9)], ids=["chain", "long", "tree"])
def test_verify_steps_keep_to_them(
    runner: ModelRunner,
    params: list[SamplingParams],
    expected: list[list[int]],
    free: list[list[int]],
    drafted: str,
    drafting: Drafting,
) -> None:
    """Drafts are right, or what would have come without limits: with bad sequences across drafts and before them."""
    known = expected if drafted == "expected" else free
    tokens, _, steps = speculate(runner, known, 5, drafting, params=params)
    check(tokens, expected)
    assert drafted == "free" or steps < NEW - 1


@pytest.mark.slow
def test_rejected_drafts_keep_to_them(
    checkpoint: Path, params: list[SamplingParams], expected: list[list[int]], free: list[list[int]]
) -> None:
    with make_runner(checkpoint, acceptance=Acceptance.REJECTION) as runner:
        for known in (expected, free):
            tokens, _, _ = speculate(runner, known, 4, chain(4, 1.0), params=params)
            for own, output, wanted in zip(params, tokens, expected, strict=True):
                assert keep_to(own, output)
                if own.greedy:
                    check([output], [wanted])


@pytest.mark.parametrize("lanes", [False, True])
def test_both_loops_give_the_same_tokens(
    checkpoint: Path, params: list[SamplingParams], expected: list[list[int]], lanes: bool
) -> None:
    with make_runner(checkpoint, lanes=lanes) as runner:
        for overlap in (False, True):
            sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "max_model_len": 128}
            core = core_over(runner, overlap=overlap, enable_prefix_caching=False, **sizes)
            inputs = [RequestInput(str(n), prompt, params[n]) for n, prompt in enumerate(PROMPTS)]
            outputs = run(core, inputs)
            check([outputs[str(n)] for n in range(len(PROMPTS))], expected)
            if overlap and lanes:
                assert core.statistics().steps["decode/engaged"] > 0


# -- where nothing is left ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [40, 3000])
def test_a_row_with_nothing_left_has_no_token_and_changes_no_other(vocab: int) -> None:
    """Sampled in every way, and greedy; drawn from, and where drafts are rejected."""
    ways = [{"temperature": 0.0}, {"temperature": 0.8}]
    ways += [{"temperature": 0.8, **each} for each in ({"top_k": 5}, {"top_k": 1200}, {"top_p": 0.9, "min_p": 0.05})]
    rows = [SamplingRow(SamplingParams(**way, allowed_token_ids=(2, 5)), 0.4) for way in ways]  # type: ignore[arg-type]
    nothing = [replace(row, forbidden=(2, 5)) for row in rows]
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(3))
    alone = sample(logits, dict(enumerate(rows))).tolist()
    assert set(alone) <= {2, 5}
    mixed = [row for pair in zip(rows, nothing, strict=True) for row in pair]
    found = sample(logits.repeat_interleave(2, dim=0), dict(enumerate(mixed))).tolist()
    assert (found[::2], found[1::2]) == (alone, [OUT_OF_TOKENS] * len(rows))
    for wrong in (torch.nan, torch.inf):
        broken = logits.index_fill(1, torch.tensor([7]), wrong)
        assert sample(broken, dict(enumerate(nothing))).tolist() == [NO_TOKEN] * len(rows), (
            "the model's fault comes first"
        )

    for good, bad in zip(rows[1:], nothing[1:], strict=True):
        share = ScheduledRequest(Request("a", [0], good.params), 1, (2,))
        drafts = [DraftRows(share, 0, [good, bad], [0.0]), DraftRows(share, 2, [bad, good], [0.0])]
        _, says = sample_by_rejection(logits[:4], drafts)
        assert [token == OUT_OF_TOKENS for token in says.tolist()] == [False, True, True, False]


def test_bad_sequences_that_leave_nothing_end_one_output(
    runner: ModelRunner, params: list[SamplingParams], expected: list[list[int]]
) -> None:
    stuck = SamplingParams(max_tokens=9, allowed_token_ids=(7,), bad_token_sequences=((7, 7, 7),))
    outputs = generate(runner, [*PROMPTS, [3, 4]], [*params, stuck])
    assert [list(output.token_ids) for output in outputs[:-1]] == expected
    assert (outputs[-1].token_ids, outputs[-1].finish_reason) == ((7, 7), "no_token_left")
