"""`ep_implementation="ubatch"`: models that transformers shards, their tokens over our transports and points.

And transformers' own parallelism under the wrapper: its three modes, without a line of glue.
"""

import importlib.util
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import COMMON
from repository import TINY_MOE
from sharded_cases import LAYOUTS, check_calls, check_generate, hidden_transfers, load, prompts, wrapped
from torch import nn
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from transformers.distributed.expert_parallel import EPImplementationInterface

from moe import EmulatedLink, TransformersUnsupportedError, register_with_transformers
from moe.transformers_parallel import _LocalExperts, _shares
from ranks import run_ranks
from ubatch import CommGroup, ConfigError, GradientError, Schedule, SpanKind

SIZES = {**COMMON, "num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.2}


def qwen2_moe() -> nn.Module:
    """A shared expert whose gate is read behind the routed ones."""
    sizes = {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 24}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **sizes))


def glm4_moe() -> nn.Module:
    """A dense first layer, groups of experts, a shared expert behind the routed ones."""
    sizes = {"n_routed_experts": 4, "moe_intermediate_size": 12, "n_shared_experts": 1, "head_dim": 8}
    return Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES, **sizes, first_k_dense_replace=1, n_group=2, topk_group=1))


def granite_moe() -> nn.Module:
    """A block with other names: `block_sparse_moe`, `router`."""
    return GraniteMoeForCausalLM(GraniteMoeConfig(**SIZES, num_local_experts=4))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "qwen2_moe": (qwen2_moe, 3),
    "glm4_moe": (glm4_moe, 2),
    "granitemoe": (granite_moe, 3),
}
"""By name: a model with random weights, and how many of its layers have experts."""


def saved(family: str, folder: Path) -> Path:
    torch.manual_seed(0)
    FAMILIES[family][0]().save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------------------ what it does


@torch.no_grad()
def on_ranks(rank: int, world_size: int, folder: Path, layout: str, sparse_layers: int) -> None:
    whole = load(folder)
    register_with_transformers()
    model = load(folder, layout, "ubatch")
    with wrapped(model) as wrapper:
        assert wrapper.ubatch_config.group is not None, "nobody had to name the ranks that vote"
        for uneven in (False, True):
            ids = prompts(rank, layout, uneven=uneven)
            trace = check_calls(whole, wrapper, ids)
            points = [(lane, str(point)) for lane, point in trace.order]
            layer = ["dispatch", "combine"] + ["collective"] * (layout == "tensor-parallel")
            expected = [(lane, point) for point in layer * sparse_layers for lane in (0, 1)]
            assert points == [*expected, (0, "end"), (1, "end")]
            for name in ("dispatch", "combine"):
                assert hidden_transfers(trace, name) > 0, name
            check_generate(whole, wrapper, ids)
        assert not wrapper.statistics().declined


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if number else []) for number, name in enumerate(FAMILIES)]
)
def test_families_that_expert_parallel_does_not_know(family: str, layout: str, tmp_path: Path) -> None:
    run_ranks(on_ranks, 2, saved(family, tmp_path), layout, FAMILIES[family][1])


@torch.no_grad()
def on_ranks_with(rank: int, world_size: int, folder: Path) -> None:
    """Other transports, chunks of experts, a lane that leads; torch's waits intercepted; one token for two ranks."""
    whole, group, link = load(folder), CommGroup.from_process_group(), EmulatedLink(1e-4, 1e9)
    chunks = Schedule("two_by_two", lanes=2, chunks=2)
    for layout in LAYOUTS:
        for backend, settings in (
            ("torch_dist", {"schedule": "two_batch_decode"}),
            ("torch_dist", {"schedule": chunks, "intercept_collectives": True}),
            ("allgather_reducescatter", {}),
        ):
            register_with_transformers(group, all2all_backend=backend, link=link)
            link.reset_statistics()
            model = load(folder, layout, "ubatch")
            with wrapped(model, **settings) as wrapper:
                assert wrapper.ubatch_config.group is group
                trace = check_calls(whole, wrapper, prompts(rank, layout, uneven=True))
                assert {lane for lane, _ in trace.order} == {0, 1}
                one = prompts(rank, layout, rows=1)[:, :1]
                expected = whole(one, use_cache=False).logits
                torch.testing.assert_close(wrapper(one, use_cache=False).logits, expected, atol=1e-4, rtol=1e-4)
            assert link.statistics().transfers > 0, "the link that was given carries what travels"


@pytest.mark.slow
def test_transports_schedules_and_a_batch_smaller_than_the_ranks(tmp_path: Path) -> None:
    run_ranks(on_ranks_with, 2, saved("qwen2_moe", tmp_path))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@torch.no_grad()
def test_the_experts_of_a_rank_take_both_layouts(implementation: str) -> None:
    experts: Any = qwen2_moe().model.layers[0].mlp.experts
    experts.config._experts_implementation = implementation
    x = torch.randn(7, SIZES["hidden_size"])
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    ids[2] = 3  # has no expert of a rank that holds 0 to 2
    weights = torch.rand(7, 2)
    expected = experts(x, ids, weights * (ids < 3))
    local = _LocalExperts(experts, range(3))
    torch.testing.assert_close(local(x, ids, weights), expected)
    assert not local(x[2:3], ids[2:3], weights[2:3]).any()
    assert local(x[:0], ids[:0], weights[:0]).shape == (0, SIZES["hidden_size"])

    counts, room = torch.tensor([2, 0, 3], dtype=torch.int32), 4
    batches = torch.randn(3, room, SIZES["hidden_size"])
    batched = local.run_batched(batches, counts)
    for slot, rows in enumerate(counts.tolist()):
        alone = (
            experts(batches[slot, :rows], torch.full((rows, 1), slot), torch.ones(rows, 1)) if rows else batches[:0, 0]
        )
        torch.testing.assert_close(batched[slot, :rows], alone)


def test_shares_of_a_batch() -> None:
    for tokens in range(9):
        shares = _shares(tokens, 3)
        assert sum(shares) == tokens
        assert max(shares) - min(shares) <= 1


# -------------------------------------------------------------------------------------------------- what it refuses


def registered() -> Any:
    return dict(EPImplementationInterface._global_mapping)


def with_version(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)


@pytest.mark.parametrize(
    ("version", "said"), [("5.24.0", "5.24.0"), ("5.2.3", "5.2.3"), ("6.0.0", "6.0.0"), (None, "not installed")]
)
def test_another_transformers_is_refused(version: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = registered()
    with_version(monkeypatch, version)
    with pytest.raises(
        TransformersUnsupportedError, match=rf"transformers is {said}, .*5\.23\.x.*ubatch\[transformers\]"
    ):
        register_with_transformers()
    assert registered() == before


def test_every_release_of_the_tested_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EPImplementationInterface, "_global_mapping", registered())
    with_version(monkeypatch, "5.23.7")
    register_with_transformers()
    assert "ubatch" in EPImplementationInterface()


def test_accelerate_is_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TransformersUnsupportedError, match=r"needs accelerate .*Install 'ubatch\[transformers\]'"):
        register_with_transformers()


def test_wrong_arguments_are_refused_at_once() -> None:
    before = registered()
    with pytest.raises(ConfigError, match="did you mean 'torch_dist'"):
        register_with_transformers(all2all_backend="torch_dits")
    group: Any = "all of them"
    with pytest.raises(ConfigError, match="group must be a CommGroup, not str"):
        register_with_transformers(group)
    assert registered() == before


def on_ranks_with_faults(rank: int, world_size: int, folder: Path) -> None:
    register_with_transformers(all2all_options={"wings": 2})
    with pytest.raises(ConfigError, match="wings"):
        load(folder, "data-parallel", "ubatch")
    register_with_transformers()
    model, ids = load(folder, "data-parallel", "ubatch"), prompts(rank, "data-parallel")
    with pytest.raises(GradientError, match=r"torch\.no_grad"):
        model(ids)


def test_unknown_options_and_training_are_refused(tmp_path: Path) -> None:
    run_ranks(on_ranks_with_faults, 2, saved("granitemoe", tmp_path))


MODES = {
    "all_to_all": ("tensor-parallel", "all_to_all", {"all_reduce", "all_to_all_single"}),
    "all_reduce": ("tensor-parallel", "all_reduce", {"all_reduce"}),
    "fsdp": ("data-parallel", "auto", {"all_to_all_single"}),
}
"""By name: layout, `ep_implementation`, and collectives that travel while another lane computes."""


@torch.no_grad()
def on_ranks_in_its_own_mode(rank: int, world_size: int, mode: str) -> None:
    layout, implementation, collectives = MODES[mode]
    whole, model = load(TINY_MOE), load(TINY_MOE, layout, implementation)
    with wrapped(model, group=CommGroup.from_process_group(), intercept_collectives=True) as wrapper:
        for uneven in (False, True):
            ids = prompts(rank, layout, uneven=uneven)
            trace = check_calls(whole, wrapper, ids)
            lanes = [lane for lane, point in trace.order if point == "collective"]
            assert lanes == [0, 1] * (len(lanes) // 2), "every collective of a lane travels while the other computes"
            assert len(lanes) >= 2 * model.config.num_hidden_layers
            assert {span.name for span in trace.spans if span.kind is SpanKind.TRANSFER} >= collectives
            for name in collectives:
                assert hidden_transfers(trace, name) > 0, name
            check_generate(whole, wrapper, ids)
        assert not wrapper.statistics().declined


@pytest.mark.wide
@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_transformers_shards(mode: str) -> None:
    run_ranks(on_ranks_in_its_own_mode, 2, mode)
