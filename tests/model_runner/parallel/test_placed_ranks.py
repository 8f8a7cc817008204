"""Experts in any slots of two, four and eight ranks: steps of every mode give the logits of one rank.

`test_placed_models` has the forms of checkpoints, `all2all_contract` the transports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from placements import random_placement
from tensor_parallel_steps import EAGER, check_logits, play_all

from model_runner import ModelRunner
from moe.balance import EplbConfig
from ranks import run_ranks
from ubatch import CommGroup, DeclineReason, UBatchConfig

pytestmark = pytest.mark.ranks

LAYERS = 2
LANES = UBatchConfig(**EAGER)
CHUNKS = UBatchConfig(**EAGER, schedule="single_batch")
SIGNALLED = UBatchConfig(**EAGER, schedule="single_batch_signalled")


def checkpoint_of(folder: Path, num_experts: int, family: str = "Qwen3Moe", **fields: Any) -> str:
    fields = {"num_hidden_layers": LAYERS, "num_experts": num_experts, "mlp_only_layers": [], **fields}
    return str(make_checkpoint(folder / f"{family}{num_experts}", family, **fields))


def check(paths: dict[str, str], arms: dict[str, dict[str, Any]], ranks: int, size: int = 1) -> None:
    """Every arm on these ranks, `size` of which share a replica, against one rank without a placement."""
    replicas = ranks // size
    idle = {replica: (replica % 6,) for replica in range(replicas)} if replicas > 1 else {}
    alone = [play_one(paths, replica, idle) for replica in range(replicas)]
    for rank, results in enumerate(run_ranks(play_all, ranks, paths, arms, size, idle)):
        for (name, arm), played in results.items():
            check_logits(played, alone[rank // size][name, "off"], (name, arm, rank))
            overlapped = played.engaged > 0 or set(played.declined) <= {DeclineReason.ALL_IDLE}  # in lanes, or whole
            assert overlapped == ("dbo" in arms[arm]), (name, arm, played.declined)


def play_one(paths: dict[str, str], replica: int, idle: dict[int, Any]) -> dict[tuple[str, str], Any]:
    """A replica's script on one rank."""
    return play_all(replica, 1, paths, {"off": {}}, 1, idle)


@pytest.mark.parametrize("experts", [7, 3])
def test_uneven_experts(tmp_path: Path, experts: int) -> None:
    arms = {
        "off": {},
        "lanes": {"dbo": LANES},
        "chunks": {"dbo": CHUNKS},
        "signalled": {"dbo": SIGNALLED},
        "gathered": {"all2all_backend": "allgather_reducescatter", "dbo": LANES},
        "redundant": {"eplb_config": EplbConfig(num_redundant_experts=3), "dbo": LANES},
    }
    check({"uneven": checkpoint_of(tmp_path, experts)}, arms, 2)


def test_any_placement_on_two_ranks(tmp_path: Path) -> None:
    arms: dict[str, dict[str, Any]] = {}
    for seed in range(6):
        placement = random_placement(LAYERS, 8, 2, seed, seed)
        arms |= {f"{seed}": {"placement": placement}, f"{seed}, lanes": {"placement": placement, "dbo": LANES}}
    check({"placed": checkpoint_of(tmp_path, 8)}, arms, 2)


@pytest.mark.wide
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2), (4, 1)])
def test_any_placement_with_tensor_parallelism_and_more_ranks(tmp_path: Path, ranks: int, size: int) -> None:
    paths = {"placed": checkpoint_of(tmp_path, 7)}
    placement = random_placement(LAYERS, 7, ranks, 4, 3)
    check(paths, {"off": {"placement": placement}, "lanes": {"placement": placement, "dbo": LANES}}, ranks, size)


def held_by(rank: int, world_size: int, path: str) -> list[int]:
    group = CommGroup.from_process_group(timeout_s=20)
    with ModelRunner(path, group=group, num_kv_blocks=8) as runner:
        return [len(layer.mlp.kernel.experts.expert_range) for layer in runner.model.layers]  # type: ignore[union-attr]


@pytest.mark.wide
def test_sixty_experts_on_eight_ranks(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path, 60)
    assert run_ranks(held_by, 8, path) == [[8] * LAYERS] * 4 + [[7] * LAYERS] * 4
    check({"uneven": path}, {"lanes": {"dbo": LANES}}, 8)
