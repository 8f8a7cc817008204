"""Weights of an fp8 checkpoint that stay in fp8, on Triton's kernels, and those that are dequantised.

Activations are rounded to fp8, those of experts and of projections.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, with_config
from fp8_checkpoints import (
    FP8,
    PROMPTS,
    Kind,
    blockwise,
    compressed,
    kept_projections,
    load_share,
    round_operands,
    write_fp8,
)
from model_checks import prompt_logits
from safetensors.torch import load_file
from torch import Tensor, nn
from triton_batches import DEVICE  # before Triton is imported

from model_runner import Checkpoint, ModelRunner, RandomQwen3Moe, make_random_qwen3_moe, split_cost
from model_runner.decoder.layers import Projection
from model_runner.drafting.network import load_draft
from model_runner.parallel.tensor_parallel import WHOLE, Shard
from moe import FusedMoEModularKernel, fp8_block, fp8_linear_block
from ubatch import ConfigError

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_experts_per_tok": 2}
MOE = {**SIZES, "num_experts": 4, "mlp_only_layers": []}
DEEPSEEK = {
    **SIZES,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "intermediate_size": 100,
}
BLOCKS = blockwise(128, 128)


def experts_of(model: nn.Module) -> list[Any]:
    """The experts of every MoE layer."""
    return [module.experts for module in model.modules() if isinstance(module, FusedMoEModularKernel)]


def plain_and_rounded(meant: Path, projections: list[str]) -> tuple[Tensor, Tensor]:
    """Logits in float32 on the CPU: of the weights as they are, and with the fp8 operands rounded."""
    with ModelRunner(meant, num_kv_blocks=16, experts_backend="reference") as runner:
        plain = prompt_logits(runner, PROMPTS)
        round_operands(runner.model, projections)
        return plain, prompt_logits(runner, PROMPTS)


CASES = [("Qwen3Moe", MOE, torch.float32), ("DeepseekV3", DEEPSEEK, torch.float8_e8m0fnu)]


@pytest.mark.parametrize(("family", "sizes", "scales"), CASES, ids=["Qwen3-MoE", "DeepSeek-V3, ue8m0"])
def test_logits_are_those_of_rounded_operands(
    family: str, sizes: dict[str, Any], scales: torch.dtype, tmp_path: Path
) -> None:
    kind = blockwise(128, 128, scales=scales)
    path, meant = write_fp8(make_checkpoint(tmp_path / "plain", family, **sizes), tmp_path, kind)
    with ModelRunner(path, num_kv_blocks=16, device=DEVICE, experts_backend="triton") as runner:
        held = experts_of(runner.model)
        assert {(each.w13.dtype, each.w2.dtype, each.dtype) for each in held} == {(FP8, FP8, torch.float32)}
        found = prompt_logits(runner, PROMPTS)
        stored = load_file(path / "model.safetensors")
        name = "model.layers.1.mlp.experts.3.{}_proj.weight{}"
        w13 = [stored[name.format(half, "")] for half in ("gate", "up")]
        assert torch.equal(held[-1].w13[3].cpu().view(torch.uint8), torch.cat(w13).view(torch.uint8))
        w13_scale = [stored[name.format(half, "_scale_inv")].float() for half in ("gate", "up")]
        assert torch.equal(held[-1].w13_scale[3].cpu(), torch.cat(w13_scale))
        assert torch.equal(held[-1].w2_scale[3].cpu(), stored[name.format("down", "_scale_inv")].float())
        projections = kept_projections(runner.model)
    plain, expected = plain_and_rounded(meant, projections)
    assert expected.abs().max() > 0.5
    assert (found - expected).abs().max() < 1e-2
    assert (plain - expected).abs().max() > 2e-2, "or the activations were not rounded"


def dtypes(path: Path, **options: Any) -> set[torch.dtype]:
    with ModelRunner(path, num_kv_blocks=4, device=DEVICE, experts_backend="triton", **options) as runner:
        return {each.w13.dtype for each in experts_of(runner.model)}


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (
            compressed("channel", block=(1, 0)),
            {},
            "quantised weights are dequantised to torch.float32: the checkpoint's scales are for no blocks, those of "
            "experts back end 'triton' for blocks of (128, 128)",
        ),
        (
            blockwise(64, 128),
            {},
            "quantised weights are dequantised to torch.float32: the checkpoint's scales are for blocks of (64, 128), "
            "those of experts back end 'triton' for blocks of (128, 128)",
        ),
        (
            BLOCKS,
            {"moe_intermediate_size": 96},
            "projections stored in fp8 stay so; routed experts become torch.float32: blocks of (128, 128) do not "
            "divide the experts' sizes (128, 96)",
        ),
    ],
)
def test_other_experts_are_dequantised_and_it_is_said(
    kind: Kind, changes: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = write_fp8(make_checkpoint(tmp_path / "plain", "Qwen3Moe", **{**MOE, **changes}), tmp_path, kind)
    with caplog.at_level(logging.INFO, "model_runner"):
        assert dtypes(path) == {torch.float32}
    assert said in caplog.messages


def test_a_layer_with_an_expert_that_is_not_in_fp8_is_dequantised(tmp_path: Path) -> None:
    kind = blockwise(128, 128, plain=["layers.0.mlp.experts.2.up_proj"])
    path, _ = write_fp8(make_checkpoint(tmp_path / "plain", "Qwen3Moe", **MOE), tmp_path, kind)
    assert dtypes(path) == {FP8, torch.float32}


@pytest.mark.wide
def test_random_weights_and_drafts_are_in_fp8_too(tmp_path: Path) -> None:
    """Of a model whose weights are not here, with one layer listed as not quantised."""
    path = make_checkpoint(tmp_path / "plain", "DeepseekV3", **DEEPSEEK)
    kind = blockwise(128, 128, plain=["model.layers.1"])
    with_config(path, quantization_config=kind.config, num_hidden_layers=3, num_nextn_predict_layers=1)
    (path / "model.safetensors").unlink()
    with ModelRunner(path, num_kv_blocks=16, device=DEVICE, experts_backend="triton", load_format="dummy") as runner:
        assert [each.w13.dtype for each in experts_of(runner.model)] == [torch.float32, FP8]
        assert prompt_logits(runner, PROMPTS).isfinite().all()
        draft: Any = load_draft("mtp", None, runner)
        assert [each.w13.dtype for each in experts_of(draft)] == [FP8]
        w13 = experts_of(draft)[0].w13.float() * experts_of(draft)[0].w13_scale[0, 0, 0]
        assert w13.std() == pytest.approx(128**-0.5, rel=0.05)


def test_gpus_without_products_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    for capability, block in (((8, 0), None), ((8, 9), (128, 128)), ((9, 0), (128, 128))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, known=capability: known)
        assert fp8_block("triton", gpu) == fp8_block("triton_batched", gpu) == block
        assert fp8_linear_block(gpu) == block
    assert fp8_block("grouped", torch.device("cpu")) is None


@pytest.mark.gpu
def test_auto_keeps_them_in_fp8_on_a_gpu(tmp_path: Path) -> None:
    size = RandomQwen3Moe(128, 256, 2, num_experts=8, moe_intermediate_size=128)
    path, meant = write_fp8(
        make_random_qwen3_moe(tmp_path / "plain", size=size, layers_per_shard=None), tmp_path, BLOCKS
    )
    with ModelRunner(path, num_kv_blocks=16, device="cuda", dtype=torch.bfloat16) as runner:
        in_fp8 = torch.cuda.get_device_capability() >= (8, 9)
        assert {each.w13.dtype for each in experts_of(runner.model)} == {FP8 if in_fp8 else torch.bfloat16}
        found, projections = prompt_logits(runner, PROMPTS), kept_projections(runner.model)
    _, expected = plain_and_rounded(meant, projections)
    assert (found - expected).norm() < 9e-2 * expected.norm()


QWEN3 = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 64}
OF_DEEPSEEK = {
    **DEEPSEEK,
    "intermediate_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 136,  # with the key's 8 dimensions the last rows of the first product: one block, and 16 rows
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
}
ATTENTION = [f"layers.{layer}.attention.{part}" for layer in range(2) for part in ("qkv", "out")]
LATENT = [f"layers.{layer}.attention.{part}" for layer in range(2) for part in ("q_up", "down", "out")]
DENSE = ["layers.0.mlp.gate_up", "layers.0.mlp.down"]
PROJECTED_CASES = [
    ("Qwen3", {**QWEN3, "attention_bias": True}, [*ATTENTION, *DENSE, "layers.1.mlp.gate_up", "layers.1.mlp.down"]),
    (
        "DeepseekV3",
        OF_DEEPSEEK,
        [*LATENT, *DENSE, "layers.1.mlp.kernel.shared_experts.gate_up", "layers.1.mlp.kernel.shared_experts.down"],
    ),
]


@pytest.mark.wide
@pytest.mark.parametrize(("family", "sizes", "kept"), PROJECTED_CASES, ids=["Qwen3", "DeepSeek-V3"])
def test_logits_of_projections_are_those_of_rounded_operands(
    family: str, sizes: dict[str, Any], kept: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with biases and tied embeddings; DeepSeek-V3's routed experts are in fp8, too."""
    plain = make_checkpoint(tmp_path / "plain", family, **sizes, tie_word_embeddings=family == "Qwen3")
    path, meant = write_fp8(plain, tmp_path, BLOCKS)
    with (
        caplog.at_level(logging.INFO, "model_runner"),
        ModelRunner(path, num_kv_blocks=16, device=DEVICE, experts_backend="triton") as runner,
    ):
        assert sorted(kept_projections(runner.model)) == sorted(kept)
        assert f"all {len(kept)} projections of the layers stay in fp8" in caplog.messages
        of_experts = "routed experts and " if family == "DeepseekV3" else ""
        assert f"{of_experts}projections stored in fp8 stay so" in caplog.messages
        found, cost = prompt_logits(runner, PROMPTS), split_cost(runner.model)
    with ModelRunner(meant, num_kv_blocks=16, experts_backend="reference") as runner:
        assert split_cost(runner.model) == cost
        exact = prompt_logits(runner, PROMPTS)
        round_operands(runner.model, kept)
        expected = prompt_logits(runner, PROMPTS)
    assert expected.abs().max() > 0.5
    # A GPU may round a tie to the other number of fp8.
    limit = 1e-2 if DEVICE == "cpu" else 5e-2 * float(expected.abs().max())
    assert (found - expected).abs().max() < limit
    assert (exact - expected).abs().max() > 2e-2, "or the activations were not rounded"


def load(path: Path, shard: Shard, block: tuple[int, int] | None = (128, 128)) -> tuple[Any, Checkpoint]:
    """A rank's model, with its projections in fp8 where they can be."""
    checkpoint = Checkpoint(path)
    checkpoint.projection_block = block
    return load_share(checkpoint, shard, range(1)), checkpoint


@pytest.mark.parametrize(("family", "sizes"), [("Qwen3", QWEN3), ("DeepseekV3", {**OF_DEEPSEEK, "v_head_dim": 64})])
def test_ranks_hold_their_blocks(family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    """Both ranks' halves together are the whole; a half that does not end at a border is dequantised."""
    path, _ = write_fp8(make_checkpoint(tmp_path / "plain", family, **sizes), tmp_path, BLOCKS)
    whole, _ = load(path, WHOLE)
    ranks = [load(path, Shard(rank, 2))[0] for rank in range(2)]
    kept = [set(kept_projections(model)) for model in ranks]
    assert kept[0] == kept[1]
    missing = {"layers.0.attention.q_up", "layers.1.attention.q_up"} if family == "DeepseekV3" else set()
    assert kept[0] == set(kept_projections(whole)) - missing
    for name in ("layers.0.attention.out", "layers.0.mlp.down"):  # this rank's columns
        halves, all_of_it = [model.get_submodule(name) for model in ranks], whole.get_submodule(name)
        for part in ("weight", "scales"):
            both = torch.cat([getattr(half, part).float() for half in halves], 1)
            assert torch.equal(both, getattr(all_of_it, part).float())
    gate_up, all_of_it = [model.get_submodule("layers.0.mlp.gate_up") for model in ranks], whole.layers[0].mlp.gate_up
    for part in ("weight", "scales"):  # this rank's rows, of gate and up
        gates, ups = zip(*(getattr(half, part).float().chunk(2) for half in gate_up), strict=True)
        assert torch.equal(torch.cat((*gates, *ups)), getattr(all_of_it, part).float())


def test_what_does_not_fit_is_dequantised_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A key projection that is stored otherwise takes queries and values along; 192 columns are no blocks."""
    kind = blockwise(128, 128, plain=["layers.0.self_attn.k_proj"])
    sizes = {**QWEN3, "intermediate_size": 192}
    path, meant = write_fp8(make_checkpoint(tmp_path / "plain", "Qwen3", **sizes), tmp_path, kind)
    with (
        caplog.at_level(logging.INFO, "model_runner"),
        ModelRunner(path, num_kv_blocks=4, device=DEVICE, experts_backend="triton") as runner,
    ):
        assert sorted(kept_projections(runner.model)) == sorted(ATTENTION[1:])
        plain = load_file(meant / "model.safetensors")
        parts = [plain[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
        assert torch.equal(runner.model.layers[0].attention.qkv.weight.cpu(), torch.cat(parts))
    (said,) = [text for text in caplog.messages if text.endswith("do not divide it")]
    assert said.startswith("3 of 8 projections of the layers stay in fp8; the others are loaded as torch.float32: ")


@pytest.mark.parametrize(("backend", "kind"), [("grouped", BLOCKS), ("triton", blockwise(64, 128))])
def test_elsewhere_all_are_dequantised(
    backend: str, kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU, also with an interpreter that nobody asked for; and in other blocks."""
    path, _ = write_fp8(make_checkpoint(tmp_path / "plain", "Qwen3", **QWEN3), tmp_path, kind)
    with (
        caplog.at_level(logging.INFO, "model_runner"),
        ModelRunner(path, num_kv_blocks=4, device="cpu", experts_backend=backend) as runner,
    ):
        assert not kept_projections(runner.model)
    why = "fp8 is multiplied by Triton on GPUs of compute capability 8.9 or newer, not on cpu"
    if backend == "triton":
        why = "the checkpoint's scales are for blocks of (64, 128), those of projections for blocks of (128, 128)"
    assert f"quantised weights are dequantised to torch.float32: {why}" in caplog.messages


def test_random_weights_are_in_fp8_too(tmp_path: Path) -> None:
    path = with_config(
        make_checkpoint(tmp_path / "plain", "Qwen3", **QWEN3),
        quantization_config=blockwise(128, 128, plain=["model.layers.1.mlp"]).config,
    )
    (path / "model.safetensors").unlink()
    with ModelRunner(path, num_kv_blocks=16, device=DEVICE, experts_backend="triton", load_format="dummy") as runner:
        assert sorted(kept_projections(runner.model)) == sorted([*ATTENTION, *DENSE])
        down = runner.model.layers[0].mlp.down
        assert (down.weight.float() * down.scales[0, 0]).std() == pytest.approx(256**-0.5, rel=0.05)
        assert prompt_logits(runner, PROMPTS).isfinite().all()


def test_one_in_fp8_is_a_module_like_any_other() -> None:
    weight, scales = torch.randn(128, 256, device=DEVICE).to(FP8), torch.rand(1, 2, device=DEVICE)
    layer = Projection(weight, torch.randn(128, device=DEVICE), scales)
    x = torch.randn(2, 256, device=DEVICE)
    assert layer.num_weights == 128 * 256
    assert set(layer.state_dict()) == {"weight", "bias", "scales"}
    before = layer(x)
    copied = copy.deepcopy(layer)
    assert copied.weight is not layer.weight
    assert copied.scales is not layer.scales
    assert torch.equal(copied(x), before)
    there = copied.to(DEVICE, torch.bfloat16)  # its weights and their scales keep what they mean
    assert (there.weight.dtype, there.scales.dtype, there.bias.dtype) == (FP8, torch.float32, torch.bfloat16)
    assert there(x.bfloat16()).dtype == torch.bfloat16
    assert {tensor.device.type for tensor in copied.to("meta").state_dict().values()} == {"meta"}
    with pytest.raises(ConfigError, match="is no embedding"):
        layer.rows(torch.tensor([0], device=DEVICE))


@pytest.mark.gpu
def test_a_gpu_keeps_them_in_fp8_in_captured_steps(tmp_path: Path) -> None:
    path, meant = write_fp8(make_checkpoint(tmp_path / "plain", "Qwen3", **QWEN3), tmp_path, BLOCKS)
    with ModelRunner(path, num_kv_blocks=64, device="cuda", dtype=torch.bfloat16, cudagraph_mode="full") as runner:
        in_fp8 = torch.cuda.get_device_capability() >= (8, 9)
        kept = kept_projections(runner.model)
        assert len(kept) == (8 if in_fp8 else 0)
        runner.capture_graphs()
        found = prompt_logits(runner, PROMPTS)
    with ModelRunner(meant, num_kv_blocks=16) as runner:
        round_operands(runner.model, kept)
        expected = prompt_logits(runner, PROMPTS)
    # In bfloat16 an operand may round to the other number of fp8: on a CPU, too, bfloat16 and float32 are 0.09 apart.
    assert (found - expected).norm() < 0.15 * expected.norm()
