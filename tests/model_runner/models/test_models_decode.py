"""Every family against transformers: a prefill and 32 decode steps, unsplit and in two lanes."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import FAMILIES, make_checkpoint
from model_checks import check_decode, check_overlap

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
@pytest.mark.parametrize("schedule", ["mlp_shared_overlap", "two_batch_prefill", "two_batch_decode"])
def test_shared_experts_may_run_at_every_place(checkpoints: dict[str, Path], schedule: str) -> None:
    check_overlap(checkpoints["DeepseekV3"], schedule)
