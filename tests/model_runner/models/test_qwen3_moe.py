"""Qwen3-MoE against transformers: the same checkpoint, fp32, logits within 1e-4 and the same greedy tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_reference, make_checkpoint, reference_greedy, reference_logits
from model_checks import PROMPTS, admitted, all_logits, check_prefill, close
from repository import TINY_MOE
from torch import Tensor

from model_runner import ModelRunner, SamplingParams, ScheduledRequest, build_input_batch, generate
from ubatch import ConfigError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3_moe"), "Qwen3Moe")


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"mlp_only_layers": [], "decoder_sparse_step": 2, "tie_word_embeddings": True},
        {"norm_topk_prob": False, "num_experts_per_tok": 1, "num_key_value_heads": 4},
        {"attention_bias": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
        {"max_shard_size": "30KB", "dtype": torch.bfloat16, "num_experts": 6, "num_experts_per_tok": 6},
        {"use_sliding_window": True, "sliding_window": 6},
    ],
    ids=["default", "sparse_step-tied", "no_renorm-top1-mha", "bias-mqa-eps", "sharded-bf16-dense_routing", "window"],
)
def test_prefill_logits(tmp_path: Path, overrides: dict[str, Any]) -> None:
    check_prefill(make_checkpoint(tmp_path, "Qwen3Moe", **overrides))


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
    with ModelRunner(TINY_MOE, num_kv_blocks=64) as runner:
        requests = admitted(runner, prompts)
        got = all_logits(runner, [ScheduledRequest(request, request.num_tokens) for request in requests])
        close(got, torch.cat([reference_logits(reference, prompt) for prompt in prompts]))
        for request in requests:
            runner.release(request)
        outputs = generate(runner, prompts, SamplingParams(max_tokens=33, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == reference_greedy(reference, prompt, 33)[0]


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
