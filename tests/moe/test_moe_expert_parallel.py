"""Hugging Face models, their MoE blocks replaced, against the untouched models."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from checkpoints import COMMON
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe import EmulatedLink, ExpertParallelMoE, UnsupportedModelError, expert_parallel
from ranks import run_ranks
from ubatch import CommGroup, ConfigError, UBatchConfig, UBatchWrapper, dbo_current_ubatch_id, tracing

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
OWN = {"hidden_size": 16, "intermediate_size": 24, "num_experts_per_tok": 2, "initializer_range": 0.3}
SIZES = {**COMMON, **HEADS, **OWN}


def qwen3_moe(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    dense_first = {"mlp_only_layers": [0], "moe_intermediate_size": 12, "num_experts": 4, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **dense_first, **changes})).eval()


def mixtral(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**{**SIZES, "num_local_experts": 4, **changes})).eval()


def olmoe(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return OlmoeForCausalLM(OlmoeConfig(**{**SIZES, "num_experts": 4, "norm_topk_prob": True, **changes})).eval()


LATENT: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name != "head_dim"},
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 12,
}


def deepseek_v2(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    method = {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5}
    config = DeepseekV2Config(**{**LATENT, **method, **changes})
    return DeepseekV2ForCausalLM(config).eval()


def deepseek_v3(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**LATENT, **changes})).eval()
    for block in moe_blocks(model):
        nn.init.normal_(block.gate.e_score_correction_bias, std=0.3)
    return model


MODELS = [qwen3_moe, mixtral, olmoe, deepseek_v2, deepseek_v3]


def moe_blocks(model: nn.Module) -> list[Any]:
    """The untouched model's MoE blocks, whatever the version of transformers calls the attribute."""
    return [module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.Module)]


def prompts(rank: int, batch: int = 3, length: int = 5) -> torch.Tensor:
    return torch.randint(1, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("make", [*MODELS, partial(qwen3_moe, norm_topk_prob=False)])
@torch.inference_mode()
def test_one_rank_equals_the_untouched_model(make: Any) -> None:
    model, ids = make(), prompts(0)
    untouched = copy.deepcopy(model)
    names_before = set(model.state_dict())
    assert expert_parallel(model, None, all2all_backend="local") is model
    blocks = [module for module in model.modules() if isinstance(module, ExpertParallelMoE)]
    assert len(blocks) == sum("experts.gate_up_proj" in name for name in names_before)
    expected = untouched(ids, output_router_logits=True)
    actual = model(ids, output_router_logits=True)
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert len(actual.router_logits) == len(blocks), "the router stays, so its logits can still be asked for"
    torch.testing.assert_close(actual.router_logits, expected.router_logits, atol=1e-5, rtol=1e-5)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in untouched.parameters())


@torch.inference_mode()
def test_shared_experts_run_inside_the_kernel() -> None:
    """Where a lane waits for combine, so that they hide it; and their weights are the block's own."""
    model = deepseek_v3()
    shared = [block.shared_experts for block in moe_blocks(model)]
    expert_parallel(model, None, all2all_backend="local")
    replaced = [module for module in model.modules() if isinstance(module, ExpertParallelMoE)]
    assert [module.kernel.shared_experts for module in replaced] == shared
    lanes: list[int] = []
    shared[0].register_forward_pre_hook(lambda module, args: lanes.append(dbo_current_ubatch_id()))
    with tracing() as trace:
        wrapper = UBatchWrapper(model, UBatchConfig(verify="off", dbo_prefill_token_threshold=2))
        wrapper(prompts(0), use_cache=False)
        wrapper.close()
    assert lanes == [0, 1]
    assert [point for lane, point in trace.order if lane == 0] == ["dispatch", "combine"] * len(replaced) + ["end"]


def test_two_ranks_equal_the_untouched_model() -> None:
    run_ranks(_two_ranks, 2)


def _two_ranks(rank: int, ranks: int) -> None:
    group = CommGroup.from_process_group(timeout_s=20.0)
    with torch.inference_mode():
        for make in MODELS:
            _check_model(make, rank, group, (2, 2))
        _check_model(partial(qwen3_moe, num_experts=7), rank, group, (4, 3))
        _check_model(partial(olmoe, num_experts=3), rank, group, (2, 1))
        _check_generate(rank, group)
    with pytest.raises(ConfigError, match="'local' holds all experts on one rank"):
        expert_parallel(qwen3_moe(), group, all2all_backend="local")
    part = expert_parallel(qwen3_moe(), group)
    assert UBatchWrapper(nn.Sequential(part)).ubatch_config.group is group, "a part of the module may be spread"


def _check_model(make: Any, rank: int, group: CommGroup, experts: tuple[int, int]) -> None:
    ids = prompts(rank, batch=3 + rank)
    expected = make()(ids).logits
    for backend, link in (("torch_dist", EmulatedLink(1e-3, 1e9)), ("allgather_reducescatter", None)):
        model = expert_parallel(make(), group, all2all_backend=backend, link=link)
        held = [m for m in model.modules() if isinstance(m, ExpertParallelMoE)]
        assert all(m.kernel.experts.w13.shape[0] == experts[rank] for m in held), "each rank keeps half of the experts"
        assert not any("gate_up_proj" in name for name in model.state_dict()), "the others are freed"
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
        if link is not None:
            assert link.statistics().transfers == 2 * len(held)
        wrapper = UBatchWrapper(model, UBatchConfig(verify="off", dbo_prefill_token_threshold=2, timeout_s=20.0))
        assert wrapper.ubatch_config.group is group, "the wrapper votes over the group of the experts"
        overlapped = wrapper(ids, use_cache=False)
        assert wrapper.statistics().engaged == 1, wrapper.statistics()
        torch.testing.assert_close(overlapped.logits, expected, atol=1e-5, rtol=1e-5)
        wrapper.close()


def _check_generate(rank: int, group: CommGroup) -> None:
    """Cached decoding, each rank with its own prompts: the same greedy tokens."""
    ids = prompts(rank, batch=2)
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = qwen3_moe().generate(ids, **settings)
    actual = expert_parallel(qwen3_moe(), group).generate(ids, **settings)
    assert torch.equal(actual, expected)


# ------------------------------------------------------------------------------------------------- what is refused


def of_unknown_family() -> nn.Module:
    config = {**SIZES, "num_experts": 4, "moe_intermediate_size": 12, "eos_token_id": 2}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**config))


def dense() -> nn.Module:
    sizes = {key: value for key, value in SIZES.items() if key != "num_experts_per_tok"}
    return Qwen3ForCausalLM(Qwen3Config(**sizes))


def without_shared_experts() -> nn.Module:
    model = deepseek_v2()
    del moe_blocks(model)[1].shared_experts
    return model


def whose_block_chooses() -> nn.Module:
    """As some releases of transformers have it."""
    model = deepseek_v3()
    gate = moe_blocks(model)[0].gate
    gate.forward = lambda x: nn.functional.linear(x, gate.weight)
    return model


def with_experts(number: int, **changes: Any) -> nn.Module:
    """A Mixtral in one of whose blocks the experts are not as usual."""
    model = mixtral()
    block = moe_blocks(model)[number]
    for name, value in changes.items():
        setattr(block if name == "experts" else block.experts, name, value)
    return model


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (
            of_unknown_family,
            r"Qwen2MoeSparseMoeBlock.* Known families: Qwen3-MoE, Mixtral, OLMoE, DeepSeek-V2, DeepSeek-V3",
        ),
        (dense, "Qwen3ForCausalLM has no MoE block"),
        (without_shared_experts, r"layers\.2\..*DeepseekV2Moe has no shared_experts"),
        (whose_block_chooses, "TopkRouter that does not return logits, weights and ids"),
        (lambda: mixtral(hidden_act="gelu"), "has the activation GELUActivation, not SiLU"),
        (
            lambda: with_experts(2, down_proj=nn.Parameter(torch.zeros(4, 16, 23))),
            r"layers\.2\..* down_proj \[4, 16, 23\]\. Expected a Mixtral",
        ),
        (
            lambda: with_experts(1, down_proj=nn.Parameter(torch.zeros(4, 16, 24, dtype=torch.float64))),
            r"down_proj of torch\.float64",
        ),
        (
            lambda: with_experts(1, experts=nn.ModuleList(nn.Linear(2, 2) for _ in range(4))),
            "has gate MixtralTopKRouter and experts ModuleList",
        ),
        (lambda: moe_blocks(mixtral())[0], "MixtralSparseMoeBlock alone cannot be replaced"),
        (
            lambda: expert_parallel(qwen3_moe(), None, all2all_backend="local"),
            r"layers\.1\..* is expert parallel already",
        ),
    ],
)
def test_models_that_are_not_built_as_known_are_refused(make: Any, complaint: str) -> None:
    model = make()
    replaced = sum(isinstance(module, ExpertParallelMoE) for module in model.modules())
    with pytest.raises(UnsupportedModelError, match=complaint):
        expert_parallel(model, None, all2all_backend="local")
    assert replaced == sum(isinstance(module, ExpertParallelMoE) for module in model.modules()), "nothing was replaced"


@pytest.mark.parametrize(
    ("group", "options", "complaint"),
    [
        ("world", {}, "group must be a CommGroup, not str"),
        (None, {"all2all_backend": "deepep"}, "unknown all2all back end 'deepep'"),
        (None, {"all2all_backend": "local", "experts_backend": "tritn"}, "unknown experts back end 'tritn'"),
        (None, {"all2all_backend": "local", "all2all_options": {"speed": 1}}, "'local': got an unexpected .* 'speed'"),
    ],
)
def test_other_bad_input_is_refused(group: Any, options: dict[str, Any], complaint: str) -> None:
    model = qwen3_moe()
    with pytest.raises(ConfigError, match=complaint):
        expert_parallel(model, group, **options)
    assert not any(isinstance(module, ExpertParallelMoE) for module in model.modules()), "nothing was replaced"


def test_router_jitter_is_refused_in_training() -> None:
    model = expert_parallel(mixtral(router_jitter_noise=0.1), None, all2all_backend="local")
    with torch.no_grad():
        model(prompts(0))
        with pytest.raises(ConfigError, match=r"router_jitter_noise = 0\.1 in training mode"):
            model.train()(prompts(0))


def test_a_block_used_twice_stays_one_block() -> None:
    model = qwen3_moe()
    model.model.layers[2].mlp = model.model.layers[1].mlp
    assert len(moe_blocks(model)) == 1
    with torch.inference_mode():
        expected = model(prompts(0)).logits
        expert_parallel(model, None, all2all_backend="local")
        torch.testing.assert_close(model(prompts(0)).logits, expected, atol=1e-5, rtol=1e-5)
    assert model.model.layers[2].mlp is model.model.layers[1].mlp
