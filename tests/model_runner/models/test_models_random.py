"""Random configs of all model families against transformers: logits of all positions and greedy tokens, in lanes, too,
and over two ranks that share attention."""

from __future__ import annotations

from pathlib import Path

import model_checks
import pytest
from checkpoints import make_checkpoint
from model_checks import check_decode, check_prefill
from random_models import RANDOM_FAMILIES, random_fields
from tensor_parallel_steps import EAGER, check_logits, play_all

from ranks import run_ranks
from ubatch import UBatchConfig

SEEDS = 10
PROMPTS = [[5, 17, 99, 3, 42, 42, 8], [1], list(range(20, 61))]
ARMS = {"off": {}, "two lanes": {"dbo": UBatchConfig(**EAGER)}}


@pytest.mark.long
@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", RANDOM_FAMILIES)
def test_steps_equal_transformers(family: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "DECODE_STEPS", 6)
    path = make_checkpoint(tmp_path, family, seed=seed, **random_fields(family, seed))
    for dbo in (UBatchConfig(enable_dbo=False), UBatchConfig(**EAGER, require_overlap=True)):
        check_prefill(path, PROMPTS, dbo=dbo)
        assert check_decode(path, PROMPTS, dbo=dbo) == (7 if dbo.enable_dbo else 0)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("family", RANDOM_FAMILIES)
def test_two_ranks_share_attention(family: str, tmp_path: Path) -> None:
    paths = {
        f"{seed}": str(make_checkpoint(tmp_path / f"{seed}", family, seed=seed, **random_fields(family, seed)))
        for seed in range(SEEDS)
    }
    alone = play_all(0, 1, paths, {"off": {}}, 1, {})
    for rank, results in enumerate(run_ranks(play_all, 2, paths, ARMS, 2, {})):
        for (name, arm), played in results.items():
            check_logits(played, alone[name, "off"], (family, name, arm, rank))
            assert (played.engaged > 0) == (arm != "off"), (name, played.declined)
