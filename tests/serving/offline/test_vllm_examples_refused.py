"""The offline examples of vLLM 0.13.0 that ask for what is not offered: each is refused with a sentence."""

from __future__ import annotations

import random

import pytest
from repository import TINY_MOE

from serving import LLM
from ubatch import ConfigError

OPTIONS = {
    "basic/embed": ({"runner": "pooling"}, "embeddings, scores and classes are not offered"),
    "basic/classify": ({"task": "classify"}, "embeddings, scores and classes are not offered"),
    "torchrun_example": ({"distributed_executor_backend": "external_launcher"}, "without a launcher"),
    "disaggregated_prefill": ({"kv_transfer_config": {"kv_role": "kv_producer"}}, "not exchanged with other servers"),
    "lora_with_quantization_inference": ({"enable_lora": True}, "no LoRA adapters"),
    "prompt_embed_inference": ({"enable_prompt_embeds": True}, "text or token ids"),
    "load_sharded_state": (
        {"load_format": "sharded_state"},
        "load_format: it should be 'auto', 'safetensors' or 'dummy'",
    ),
    "context_extension": ({"hf_overrides": {"rope_theta": 1e6}}, "change the checkpoint's config.json"),
    "logits_processor/custom": ({"logits_processors": [random.Random]}, "no code runs on logits"),
    "vision_language": ({"limit_mm_per_prompt": {"image": 1}}, "text only"),
    "rlhf": ({"worker_extension_cls": "rlhf.Worker"}, "this project's own workers"),
    "mistral-small": ({"config_format": "mistral"}, "configs are Hugging Face's"),
}


@pytest.mark.parametrize("example", OPTIONS)
def test_an_example_is_refused_by_its_option(example: str) -> None:
    option, why = OPTIONS[example]
    with pytest.raises(ConfigError, match=why) as caught:
        LLM(model=str(TINY_MOE), **option)
    assert next(iter(option)) in str(caught.value)


METHODS = {
    "basic/embed": ("embed", "not offered"),
    "basic/classify": ("classify", "not offered"),
    "basic/score": ("score", "not offered"),
    "basic/reward": ("reward", "not offered"),
    "llm_engine_reset_kv": ("reset_prefix_cache", "enable_prefix_caching=False"),
    "skip_loading_weights_in_engine_init": ("collective_rpc", "no workers"),
    "rlhf_colocate": ("sleep", "until it is closed"),
    "save_sharded_state": ("llm_engine", "get_tokenizer"),
    "beam search": ("beam_search", r"SamplingParams\(n="),
}


@pytest.mark.parametrize("example", METHODS)
def test_an_example_is_refused_by_its_method(example: str) -> None:
    name, why = METHODS[example]
    llm = LLM.__new__(LLM)
    with pytest.raises(AttributeError, match=rf"^LLM\.{name} is not offered: .*{why}"):
        getattr(llm, name)
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        llm.generat  # noqa: B018


@pytest.mark.parametrize("name", ["BeamSearchParams", "PoolingParams", "LoRARequest", "KVTransferConfig"])
def test_a_name_that_is_not_offered_says_why(name: str) -> None:
    with pytest.raises(ImportError, match=rf"^serving\.{name} is not offered: "):
        exec(f"from serving import {name}")
