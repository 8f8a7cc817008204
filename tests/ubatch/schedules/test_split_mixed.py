"""Decodes and prefills in one batch: lanes of equal cost or a separate lane, whichever is predicted to be faster."""

import random
from dataclasses import replace

import pytest
from splits import check_covers

from model_runner import make_offer
from tests.support.shaped_steps import shaped_step
from ubatch import ForwardMode, SplitCost, UBatchConfig, UBatchSlice, get_schedule, split_by_cost
from ubatch.schedules.split_cost import predicted_cost, split_mixed

SCHEDULE = get_schedule("mlp_shared_overlap")
HEADS, LATENT, NOPE, ROPE, VALUE = 128, 512, 128, 64, 128
PER_TOKEN = 2 * 37e9 / 61
"""37 G weights visited in 61 layers."""
DEEPSEEK_V3 = SplitCost(
    PER_TOKEN,
    per_pair=2.0 * HEADS * (NOPE + ROPE + VALUE),
    per_expanded=2.0 * HEADS * LATENT * (NOPE + VALUE),
    per_absorbed_pair=2.0 * HEADS * (2 * LATENT + ROPE),
    per_sent=PER_TOKEN,
)
"""Operations in one layer."""


def batch(decodes: int, cached: int, prompt: int, prefix: int) -> tuple[list[int], list[int]]:
    """Query and prefix lengths of so many decodes, and a chunk of a prompt behind them."""
    return [1] * decodes + [prompt], [cached] * decodes + [prefix]


def tokens(slices: tuple[UBatchSlice, ...]) -> list[int]:
    return [piece.num_tokens for piece in slices]


def test_decodes_stay_apart_where_a_cut_prompt_would_expand_its_prefix_twice() -> None:
    lens = batch(256, 2000, 512, 16000)
    equal = split_by_cost(*lens, DEEPSEEK_V3, 2, 0.48)
    assert tokens(equal)[0] > 256, "equal lanes cut the prompt"
    apart = split_mixed(*lens, DEEPSEEK_V3, SCHEDULE, 0.48)
    assert tokens(apart) == [256, 512]
    assert [piece.request_slice for piece in apart] == [slice(0, 256), slice(256, 257)]
    faster, slower = (predicted_cost(slices, *lens, DEEPSEEK_V3, SCHEDULE) for slices in (apart, equal))
    assert faster < 0.95 * slower
    signalled = replace(SCHEDULE, signalled=True)
    assert split_mixed(*lens, DEEPSEEK_V3, signalled, 0.48) == apart, "not simulated as such"


def test_few_decodes_share_the_lane_of_a_fresh_prompt() -> None:
    """Apart they would be done at once, and hide nothing of what the prompt sends."""
    lens = batch(8, 2000, 512, 0)
    equal = split_by_cost(*lens, DEEPSEEK_V3, 2, 0.48)
    assert split_mixed(*lens, DEEPSEEK_V3, SCHEDULE, 0.48) == equal
    assert tokens(equal)[0] > 200
    apart = (UBatchSlice(slice(0, 8), slice(0, 8)), UBatchSlice(slice(8, 9), slice(8, 520)))
    assert predicted_cost(apart, *lens, DEEPSEEK_V3, SCHEDULE) > 1.1 * predicted_cost(
        equal, *lens, DEEPSEEK_V3, SCHEDULE
    )


def test_how_long_sending_takes_decides_too() -> None:
    lens = batch(64, 2000, 512, 16000)
    sent = {
        factor: tokens(split_mixed(*lens, replace(DEEPSEEK_V3, per_sent=factor * PER_TOKEN), SCHEDULE, 0.48))
        for factor in (0, 1, 4)
    }
    assert sent[0] == sent[1] == [64, 512], "nothing or little to hide: do no work twice"
    assert sent[4] != [64, 512], "a slow link: hide it"


def test_a_prediction_is_the_lanes_own_costs() -> None:
    """Without a link lanes run one after the other, so the step takes what all parts cost."""
    cost = replace(DEEPSEEK_V3, per_sent=0.0)
    lens = batch(2, 100, 40, 50)
    cut = (UBatchSlice(slice(0, 3), slice(0, 12)), UBatchSlice(slice(2, 3), slice(12, 42)))
    parts = 2 * cost.of(1, 100) + cost.of(10, 50) + cost.of(30, 60)
    assert predicted_cost(cut, *lens, cost, SCHEDULE) == pytest.approx(3 * parts)


@pytest.mark.long
@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_the_faster_one_is_taken_and_every_token_is_in_one_lane(lanes: int) -> None:
    schedule = SCHEDULE.with_lanes(lanes)
    rng = random.Random(lanes)
    apart = 0
    for _ in range(120):
        decodes, prompts = rng.randint(0, 60), rng.randint(0, 5)
        query_lens = [1] * decodes + [rng.randint(2, 400) for _ in range(prompts)]
        prefix_lens = [rng.choice([0, 100, 3000, 20000]) for _ in query_lens]
        cost = replace(DEEPSEEK_V3, per_sent=rng.choice([0.0, PER_TOKEN]))
        threshold = rng.choice([0.0, 0.48]) if lanes == 2 else 0.0
        found = split_mixed(query_lens, prefix_lens, cost, schedule, threshold)
        equal = split_by_cost(query_lens, prefix_lens, cost, lanes, threshold)
        check_covers(query_lens, found, lanes)
        if found != equal:
            apart += 1
            assert found[0].token_slice == slice(0, decodes)
            assert predicted_cost(found, query_lens, prefix_lens, cost, schedule) < predicted_cost(
                equal, query_lens, prefix_lens, cost, schedule
            )
    assert 3 < apart < 117


def test_the_vote_splits_mixed_batches_so_when_asked_to() -> None:
    query_lens, prefix_lens = batch(256, 2000, 512, 16000)
    shape = shaped_step(query_lens, ForwardMode.MIXED, prefix_lens)
    by_cost = UBatchConfig(split_by="cost")
    assert make_offer(by_cost, shape, DEEPSEEK_V3)[0].tokens == (256, 512)
    assert make_offer(UBatchConfig(), shape)[0].tokens == (384, 384)
    query_lens, prefix_lens = batch(8, 2000, 512, 0)
    few = shaped_step(query_lens, ForwardMode.MIXED, prefix_lens)
    assert make_offer(by_cost, few, DEEPSEEK_V3)[0].tokens[0] > 200
