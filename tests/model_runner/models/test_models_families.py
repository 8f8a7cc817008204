"""Single families beyond what all of them promise (`test_model_conformance`), against transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    TINY,
    checkpoint_fixture,
    load_reference,
    make_checkpoint,
    reference_greedy,
    reference_logits,
    with_tensors,
)
from model_checks import (
    PROMPTS,
    admitted,
    all_logits,
    check_prefill,
    close,
    expected_logits,
    prefill_logits,
    prompt_logits,
)
from repository import TINY_MOE
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_runner import ModelRunner, SamplingParams, ScheduledRequest, build_input_batch, generate
from model_runner.models import DecoderLM
from ubatch import ConfigError

KIMI_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 32.0, "original_max_position_embeddings": 8},
    **{"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}


def test_a_model_in_bf16_stays_near_its_reference(tmp_path: Path) -> None:
    """Compute in bf16, of a checkpoint in bf16: near the fp32 model, and the gate is not rounded."""
    path = make_checkpoint(tmp_path, "DeepseekV3", dtype=torch.bfloat16)
    with ModelRunner(path, num_kv_blocks=64, dtype=torch.bfloat16) as runner:
        mlp: Any = runner.model.get_submodule("layers.1.mlp")
        assert (mlp.gate_dtype, mlp.correction_bias.dtype) == (torch.float32, torch.float32)
        assert mlp.kernel.experts.dtype == torch.bfloat16
        assert runner.kv_cache.spec.dtype == torch.bfloat16
        got = prompt_logits(runner)
    wanted = expected_logits(path)
    error = (got.float() - wanted).abs()
    assert error.median() < 0.02 * wanted.abs().max()  # a token that bf16 sends to another expert may be far off


def test_experts_in_one_tensor_are_those_stored_one_by_one(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "Qwen3_5Moe")
    weights = load_file(path / "model.safetensors")
    by_layer: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name in sorted(weights, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        layer, experts, rest = name.partition(".experts.")
        if experts:
            by_layer.setdefault(layer, {}).setdefault(rest.split(".")[1], []).append(weights[name])
    assert by_layer
    stacked = {name: w for name, w in weights.items() if ".experts." not in name}
    for layer, kinds in by_layer.items():
        gate, up, down = (torch.stack(kinds[kind]) for kind in ("gate_proj", "up_proj", "down_proj"))
        stacked |= {f"{layer}.experts.gate_up_proj": torch.cat((gate, up), dim=1), f"{layer}.experts.down_proj": down}
    wanted = expected_logits(path)
    save_file(stacked, path / "model.safetensors")
    close(prefill_logits(path), wanted)


def test_gpt_oss_runs_on_experts_that_have_biases(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "GptOss")
    with ModelRunner(path, num_kv_blocks=8) as runner:
        assert runner.experts_backend == "grouped"
    with pytest.raises(ConfigError, match="experts back end 'native' has no biases"):
        ModelRunner(path, num_kv_blocks=8, experts_backend="native")


def test_kimi_k2_is_deepseek_v3(tmp_path: Path) -> None:
    """Its config names a model type of its own, and code that is not run; the architecture is DeepSeek-V3's."""
    overrides = {"n_routed_experts": 12, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    theirs = make_checkpoint(tmp_path / "deepseek", "DeepseekV3", rope_parameters=KIMI_ROPE, **overrides)
    path = shutil.copytree(theirs, tmp_path / "kimi")
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "model_type": "kimi_k2",
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": {"type": rope.pop("rope_type"), **rope},
    }
    (path / "config.json").write_text(json.dumps(config))
    close(prefill_logits(path), expected_logits(theirs))


def test_deepseek_keeps_one_latent_per_token(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "DeepseekV2")
    with ModelRunner(path, num_kv_blocks=8) as runner:
        assert runner.kv_cache.spec.numbers_per_token == TINY["kv_lora_rank"] + TINY["qk_rope_head_dim"]


@pytest.mark.parametrize("own", [True, False])
def test_tied_embeddings_and_an_output_layer_in_the_checkpoint(own: bool, tmp_path: Path) -> None:
    """transformers ties them only if they are equal; fine-tuned checkpoints may have both, and say they are tied."""
    path = make_checkpoint(tmp_path, "Qwen2", tie_word_embeddings=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    with_tensors(path, {"lm_head.weight": torch.randn_like(embedding) if own else embedding.clone()})
    check_prefill(path)
    with ModelRunner(path, num_kv_blocks=1) as runner:
        assert isinstance(runner.model, DecoderLM)
        assert (runner.model.lm_head is runner.model.embed_tokens) is not own


# -- Qwen3-MoE ---------------------------------------------------------------------------------------------------------


checkpoint = checkpoint_fixture(make_checkpoint, "Qwen3Moe")


def test_chunks_and_mixed_steps_change_nothing(checkpoint: Path) -> None:
    """A long prompt in chunks while another request decodes, against each alone."""
    reference = load_reference(checkpoint)
    long, short = list(range(3, 80)), [9, 9, 4]
    answers, _ = reference_greedy(reference, short, 6)
    with ModelRunner(checkpoint, num_kv_blocks=64, block_size=4) as runner:
        chunked, decoding = admitted(runner, [long, short], 90)
        parts = [all_logits(runner, [ScheduledRequest(decoding, 3)])]
        decoding.advance(3, int(parts[0][-1].argmax()))
        for length in (30, 1, 46):
            logits = all_logits(runner, [ScheduledRequest(chunked, length), ScheduledRequest(decoding, 1)])
            parts.append(logits[:length])
            chunked.advance(length, None)
            decoding.advance(1, int(logits[-1].argmax()))
        assert decoding.output_token_ids == answers[:4]
        close(torch.cat(parts[1:]), reference_logits(reference, long))


def test_older_config_names(checkpoint: Path, tmp_path: Path) -> None:
    """Before transformers 5: `rope_theta`, `num_experts`, and the end-of-sequence token of the generation config."""
    config = json.loads((checkpoint / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["num_experts"] = config.pop("num_local_experts")
    del config["head_dim"], config["mlp_only_layers"]
    config["head_dim"] = 16
    config["mlp_only_layers"] = [1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 110]}')
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    with ModelRunner(checkpoint, num_kv_blocks=8) as new, ModelRunner(tmp_path, num_kv_blocks=8) as old:
        assert old.config == replace(new.config, eos_token_ids=(7, 110))
        params = SamplingParams(max_tokens=12)
        long = generate(new, [PROMPTS[0]], params)[0].token_ids
        short = generate(old, [PROMPTS[0]], params)[0].token_ids
        assert short == long[: len(short)]


@pytest.mark.long
def test_committed_example_model() -> None:
    """The trained checkpoint that the examples use."""
    reference = load_reference(TINY_MOE)
    prompts = [[40, 300, 7, 12, 99, 250, 31], [511, 18, 1000, 3]]
    check_prefill(TINY_MOE, prompts)
    with ModelRunner(TINY_MOE, num_kv_blocks=64) as runner:
        outputs = generate(runner, prompts, SamplingParams(max_tokens=33, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == reference_greedy(reference, prompt, 33, output.token_ids)[0]


def test_a_model_without_a_plan_is_refused(checkpoint: Path) -> None:
    with ModelRunner(checkpoint, num_kv_blocks=8) as runner, pytest.raises(ConfigError, match="attention plan"):
        runner.model(torch.tensor([1, 2]), torch.tensor([0, 1]))


def test_padding_rows_reach_no_expert_and_no_cache(checkpoint: Path) -> None:
    """A batch padded at its end: the tokens' logits are the same, and the cache is untouched by the padding."""
    with ModelRunner(checkpoint, num_kv_blocks=8) as runner:
        (request,) = admitted(runner, [PROMPTS[0]])
        with torch.inference_mode():
            batch = build_input_batch([ScheduledRequest(request, 7)], runner.request_table, runner.kv_cache.spec)
            agreed = runner.agree(batch)
            plain = runner.forward(agreed)
            before = runner.kv_cache.keys(0).clone()
            pad = torch.nn.functional.pad
            padded = replace(
                agreed,
                input_ids=pad(batch.input_ids, (0, 3), value=77),
                positions=pad(batch.positions, (0, 3)),
                metadata=replace(batch.metadata, slot_mapping=pad(batch.metadata.slot_mapping, (0, 3), value=-1)),
            )
            routed: list[Tensor] = []
            kernel = runner.model.get_submodule("layers.0.mlp.kernel")
            kernel.register_forward_pre_hook(lambda module, args: routed.append(args[2]))
            torch.testing.assert_close(runner.forward(padded), plain, atol=1e-6, rtol=1e-5)
            assert routed[0][:7].min() >= 0
            assert routed[0][7:].tolist() == [[-1] * 3] * 3
            assert torch.equal(runner.kv_cache.keys(0), before)
