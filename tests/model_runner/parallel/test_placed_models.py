"""Models whose experts lie in any slots: the same logits, whatever form the checkpoint has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from c_kernels import needs_c
from checkpoints import FAMILIES, make_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_checks import check_decode, close, prefill_logits
from placements import random_placement

from model_runner import ModelRunner
from model_runner.models import DecoderConfig
from ubatch import UBatchConfig

SPARSE = ["Qwen3Moe", "Mixtral", "DeepseekV3", "GptOss", "Qwen3Next", "GraniteMoe"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(tmp_path_factory.mktemp(family), family)
        return made[family]

    return of


def config_of(path: Path) -> DecoderConfig:
    with ModelRunner(path, num_kv_blocks=1) as runner:
        assert isinstance(runner.config, DecoderConfig)
        return runner.config


@pytest.mark.parametrize("family", [each for each in SPARSE if each in FAMILIES])
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(redundant=st.integers(0, 5), seed=st.integers(0, 99))
def test_any_placement_gives_the_same_logits(
    checkpoint: Callable[[str], Path], family: str, redundant: int, seed: int
) -> None:
    path = checkpoint(family)
    config = config_of(path)
    placement = random_placement(len(config.moe_layers), config.num_experts, 1, redundant, seed)
    own: dict[str, Any] = {"experts_backend": "grouped"}
    close(prefill_logits(path, placement=placement, **own), prefill_logits(path, **own))


@pytest.mark.parametrize("experts", ["reference", "grouped", "packed", pytest.param("native", marks=needs_c)])
@pytest.mark.parametrize("overlap", [False, True], ids=["whole", "lanes"])
def test_decode_steps_with_every_back_end(checkpoint: Callable[[str], Path], experts: str, overlap: bool) -> None:
    """Recorded steps, too."""
    path = checkpoint("Qwen3Moe")
    config = config_of(path)
    placement = random_placement(len(config.moe_layers), config.num_experts, 1, 3, 7)
    dbo = UBatchConfig(enable_dbo=overlap, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2)
    engaged = check_decode(path, placement=placement, experts_backend=experts, dbo=dbo)
    assert bool(engaged) is overlap
