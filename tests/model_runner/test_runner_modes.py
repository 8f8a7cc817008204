"""Every mode under a schedule of its own, on two ranks of which one is done early: the tokens do not change."""

import random
from pathlib import Path
from typing import Any

import pytest
from dense_checkpoint import make_small

from model_runner import ModelRunner, SamplingParams, coordinate_batch_across_dp, generate, make_offer
from ranks import run_ranks
from tests.support.shaped_steps import shaped_step
from ubatch import SCHEDULES, CommGroup, DeclineReason, ForwardMode, UBatchConfig, Wish, decide

DECODE, PREFILL, MIXED, IDLE = ForwardMode.DECODE, ForwardMode.PREFILL, ForwardMode.MIXED, ForwardMode.IDLE
LOW = {"dbo_decode_token_threshold": 3, "dbo_prefill_token_threshold": 3}
OWN = {"mine": {"lanes": 3, "chunks": 2, "lead": 1, "points_off": ["attn_prepare", "select", "output", "layer"]}}
ARMS: dict[str, dict[str, Any]] = {
    "off": {"enable_dbo": False},
    "single": {**LOW, "schedule": "single_batch"},
    "decode single, prefill in lanes": {**LOW, "decode": {"schedule": "single_batch", "token_threshold": 1}},
    "decode in three lanes, prefill single": {
        **LOW,
        "schedules": OWN,
        "decode": {"schedule": "mine"},
        "prefill": {"schedule": "single_batch"},
    },
    "prefill only": {**LOW, "decode": {"schedule": "serial"}},
}


# ---------------------------------------------------------------------------------------------------------- the vote


def test_each_mode_votes_with_its_own_schedule_and_threshold() -> None:
    config = UBatchConfig.from_mapping(
        {
            "schedules": OWN,
            "decode": {"schedule": "single_batch", "token_threshold": 8},
            "prefill": {"schedule": "mine", "token_threshold": 100},
            "verify": {"schedule": "serial"},
        }
    )
    single = coordinate_batch_across_dp(config, shaped_step([1] * 8, DECODE), None)
    assert (single.decision.engaged, single.decision.tokens, single.slices) == (True, ((8,),), None)
    assert single.schedule == config.for_mode(DECODE).schedule
    signalled = UBatchConfig.from_mapping({"schedule": "single_batch_signalled", "dbo_decode_token_threshold": 4})
    whole = coordinate_batch_across_dp(signalled, shaped_step([1] * 8, DECODE), None)
    assert (whole.decision.engaged, whole.slices, whole.schedule) == (True, None, SCHEDULES["single_batch_signalled"])
    lanes = coordinate_batch_across_dp(config, shaped_step([1, 50, 50, 50], MIXED), None)
    assert lanes.slices is not None
    assert (len(lanes.slices), lanes.schedule) == (3, config.for_mode(PREFILL).schedule)
    for lens, mode, reason in (
        ([1] * 7, DECODE, DeclineReason.BELOW_DECODE_THRESHOLD),
        ([99], PREFILL, DeclineReason.BELOW_PREFILL_THRESHOLD),
        ([4] * 99, ForwardMode.TARGET_VERIFY, DeclineReason.SERIAL_SCHEDULE),
    ):
        declined = coordinate_batch_across_dp(config, shaped_step(lens, mode), None)
        assert (declined.decision.reason, declined.slices, declined.schedule) == (reason, None, None)


@pytest.mark.parametrize("quiet", ["decode", "prefill"])
def test_an_idle_rank_votes_yes_whatever_its_guess_would_be(quiet: str) -> None:
    config = UBatchConfig.from_mapping({quiet: {"schedule": "serial"}})
    idle, _ = make_offer(config, shaped_step([], IDLE))
    assert idle.wish is Wish.IDLE
    mode, lens = (PREFILL, [600, 600]) if quiet == "decode" else (DECODE, [1] * 40)
    busy, _ = make_offer(config, shaped_step(lens, mode))
    assert decide([idle, busy]).engaged


# ------------------------------------------------------------------------------------------------------ a real model


def prompts_of(rank: int) -> list[list[int]]:
    rng = random.Random(rank)
    lengths = [5, 21, 4, 3] if rank == 0 else [4, 6, 7]
    return [[rng.randrange(380) for _ in range(length)] for length in lengths]


def generate_in_all_arms(rank: int, world_size: int, path: str) -> dict[str, Any]:
    group = CommGroup.from_process_group(timeout_s=30)
    results: dict[str, Any] = {}
    params = [SamplingParams(max_tokens=6 if rank == 0 else 3, ignore_eos=True)] * len(prompts_of(rank))
    for name, settings in ARMS.items():
        dbo = UBatchConfig.from_mapping(settings)
        with ModelRunner(path, group=group, num_kv_blocks=64, block_size=4, dbo=dbo) as runner:
            tokens = [list(output.token_ids) for output in generate(runner, prompts_of(rank), params)]
            seen = runner.statistics()
            results[name] = tokens, (seen.engaged, seen.engaged_single), {str(why) for why in seen.declined}
    return results


def test_tokens_are_the_same_whatever_the_modes_run(tmp_path: Path) -> None:
    first, second = run_ranks(generate_in_all_arms, 2, str(make_small(tmp_path, dense=False)))
    for results in (first, second):
        assert all(tokens == results["off"][0] for tokens, *_ in results.values())
    counts = {name: counted for name, (_, counted, _) in first.items()}
    assert counts == {name: counted for name, (_, counted, _) in second.items()}, "all ranks run the same"
    assert counts == {  # one prefill and five decodes; in the last three of them rank 1 has nothing
        "off": (0, 0),
        "single": (0, 6),
        "decode single, prefill in lanes": (1, 5),
        "decode in three lanes, prefill single": (5, 1),
        "prefill only": (1, 0),
    }
    assert first["prefill only"][2] == {"serial_schedule"}
