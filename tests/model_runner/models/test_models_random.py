"""Random configs of all model families against transformers: logits of all positions and greedy tokens, in lanes, too,
and over two ranks that share attention."""

from __future__ import annotations

from pathlib import Path

import model_checks
import pytest
from checkpoints import FAMILIES, make_checkpoint
from model_checks import check_decode, check_prefill
from random_models import RANDOM_FAMILIES, random_fields
from tensor_parallel_steps import EAGER, check_logits, play_all

from model_runner.decoder.layers import AllHeadsNormAttention
from model_runner.models.olmoe import OlmoeForCausalLM
from model_runner.parallel.tensor_parallel import Shard
from model_runner.weights.hf_config import HFConfig
from ranks import run_ranks
from serving.engine.rank.runner_setup import tensor_parallel_faults
from ubatch import ConfigError, UBatchConfig

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
@pytest.mark.parametrize("family", [family for family in RANDOM_FAMILIES if family != "Olmoe"])
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


def test_norms_over_all_heads_are_not_shared_by_ranks() -> None:
    """A command says so before it starts ranks."""
    assert not OlmoeForCausalLM.serves_tensor_parallel
    config = HFConfig(FAMILIES["Olmoe"], Path("config.json"))
    model = OlmoeForCausalLM.read_config(config, HFConfig({}, Path("generation_config.json")))
    (fault, *_) = tensor_parallel_faults(model, 2, "-tp", expert_parallel=False)
    assert "-tp: tensor_parallel_size 2 does not fit the model: it normalises queries and keys over all heads" in fault
    assert not list(tensor_parallel_faults(model, 1, "-tp", expert_parallel=False))
    with pytest.raises(ConfigError, match="normalised over all heads; use tensor_parallel_size 1"):
        AllHeadsNormAttention(norm_eps=1e-6, clip=None, shard=Shard(0, 2))
