"""Models whose experts lie in any slots: the same logits, whatever form the checkpoint has.

On two, four and eight ranks, too, in steps of every mode; `all2all_contract` has the transports.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from c_kernels import needs_c
from checkpoints import FAMILIES, family_checkpoints_fixture, make_checkpoint, make_mtp_checkpoint
from drafted import generate_drafted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_checks import PROMPTS, check_decode, close, prefill_logits
from placements import random_placement
from tensor_parallel_steps import EAGER, check_logits, play_all
from torch import nn

from model_runner import ModelRunner, SamplingParams, generate
from model_runner.models import DecoderConfig
from model_runner.parallel import make_placement
from moe import ExpertPlacement, FusedMoEModularKernel
from moe.balance import EplbConfig
from moe.placement import IDLE
from ranks import run_ranks
from serving.engine.speculation import Algorithm, SpeculationConfig, runner_options
from ubatch import CommGroup, ConfigError, DeclineReason, UBatchConfig

SPARSE = ["Qwen3Moe", "Mixtral", "DeepseekV3", "GptOss", "Qwen3Next", "GraniteMoe"]


checkpoint = family_checkpoints_fixture()


def config_of(path: Path) -> DecoderConfig:
    with ModelRunner(path, num_kv_blocks=1) as runner:
        assert isinstance(runner.config, DecoderConfig)
        return runner.config


@pytest.mark.wide
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


@pytest.mark.long
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


def test_draft_networks_are_not_placed(tmp_path: Path) -> None:
    """They hold all experts, and count none; the placed model's tokens are its own."""
    path = make_mtp_checkpoint(tmp_path)
    config = config_of(path)
    placement = random_placement(len(config.moe_layers), config.num_experts, 1, 2, 5)
    speculation = SpeculationConfig(algorithm=Algorithm.MTP, num_draft_tokens=2, num_steps=2)
    prompts, params = PROMPTS[:2], [SamplingParams(max_tokens=8, ignore_eos=True)] * 2
    with ModelRunner(path, num_kv_blocks=64) as plain:
        expected = [output.token_ids for output in generate(plain, prompts, params)]
    with ModelRunner(path, num_kv_blocks=64, placement=placement, **runner_options(speculation)) as runner:
        kernels = [each for each in cast(nn.Module, runner.draft).modules() if isinstance(each, FusedMoEModularKernel)]
        assert [(each.expert_map, each.load) for each in kernels] == [(None, None)]
        assert len(kernels[0].experts.expert_range) == config.num_experts
        outputs = generate_drafted(runner, prompts, params, speculation)
        assert [tuple(output.token_ids) for output in outputs] == [tuple(tokens) for tokens in expected]


# ----------------------------------------------------------------------------------------------------- which placement


def test_a_placement_for_others_is_refused() -> None:
    def made(*sizes: int, redundant: int = 0) -> ExpertPlacement:
        return make_placement(7, (1, 3), 2, redundant, ExpertPlacement.default(*sizes) if sizes else None)

    assert made().experts.tolist() == [[0, 1, 2, 3, 4, 5, 6, IDLE]] * 2
    assert made(redundant=2).experts.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 1, IDLE]] * 2
    assert made(2, 7, 2, 3) == ExpertPlacement.default(2, 7, 2, 3)
    for sizes, message in (
        ((2, 8, 2), "for 8 experts in a layer, but there are 7"),
        ((2, 7, 3), "for 3 ranks, but there are 2"),
        ((1, 7, 2), "for 1 MoE layers, but there are 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            made(*sizes)
    with pytest.raises(ConfigError, match="8 slots, but 3 redundant experts make 10"):
        made(2, 7, 2, redundant=3)


def test_redundant_experts_that_no_rank_has_room_for_are_refused() -> None:
    assert (make_placement(7, (1, 3), 2, 7).replicas == 2).all()
    with pytest.raises(ConfigError, match="8 redundant experts are too many: with 7, each of 2 ranks holds all 7"):
        make_placement(7, (1, 3), 2, 8)


def test_no_rank_is_without_experts() -> None:
    placement = make_placement(3, (0,), 5)
    assert placement.slots_per_rank == 1
    assert sorted(set(placement.experts[0].tolist())) == [0, 1, 2]
    assert not (placement.experts == IDLE).any()


@given(experts=st.integers(1, 9), ranks=st.integers(1, 4), redundant=st.integers(0, 6), seed=st.integers(0, 99))
def test_replicas_fill_idle_slots(experts: int, ranks: int, redundant: int, seed: int) -> None:
    placement = random_placement(2, experts, ranks, redundant, seed)
    filled = placement.filled()
    used = placement.experts != IDLE
    assert (filled.experts[used] == placement.experts[used]).all()
    assert not (filled.experts == IDLE).any()
    assert filled.filled() == filled
    if filled.slots_per_rank <= experts:
        for layer in range(2):
            for rank in range(ranks):
                new = filled.held(layer, rank)[len(placement.held(layer, rank)) :]
                assert not set(new.tolist()) & set(placement.held(layer, rank).tolist()), "a replica of what is there"


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


@pytest.mark.wide
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
