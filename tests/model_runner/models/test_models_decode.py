"""Every family against transformers: a prefill and 32 decode steps, unsplit and in two lanes."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import FAMILIES, load_reference, make_checkpoint, reference_logits
from model_checks import admitted, all_logits, check_decode, check_overlap, close

from model_runner import ModelRunner, ScheduledRequest
from ubatch import Schedule

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_checkpoint(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_equals_transformers(checkpoints: dict[str, Path], family: str) -> None:
    assert check_decode(checkpoints[family]) == 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_lanes_change_nothing(checkpoints: dict[str, Path], family: str) -> None:
    """Handing on at every point there is, in dense layers too."""
    check_overlap(checkpoints[family], Schedule("every_point", points_off=frozenset()))


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_prompts_and_drafts(checkpoints: dict[str, Path], family: str) -> None:
    """A prompt behind a part of it that is in the cache, as a shared prefix is, and a step that verifies drafts."""
    prompt, drafts = list(range(40, 63)), (9, 100, 77)
    logits = reference_logits(load_reference(checkpoints[family]), [*prompt, 5, *drafts])
    with ModelRunner(checkpoints[family], num_kv_blocks=32, num_speculative_tokens=3) as runner:
        (request,) = admitted(runner, [prompt])
        for end in (7, 8, 23):
            share = ScheduledRequest(request, end - request.num_computed_tokens)
            first = request.num_computed_tokens
            close(all_logits(runner, [share]), logits[first:end])
            request.advance(share.num_tokens, 5 if end == len(prompt) else None)
        close(all_logits(runner, [ScheduledRequest(request, 1, drafts)]), logits[len(prompt) :])


@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", ["mlp_shared_overlap", "two_batch_prefill", "two_batch_decode"])
def test_shared_experts_may_run_at_every_place(checkpoints: dict[str, Path], schedule: str) -> None:
    check_overlap(checkpoints["DeepseekV3"], schedule)
