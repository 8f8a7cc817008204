"""What vLLM has and this project has not, each with a sentence: names of its package, methods and options of `LLM`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ubatch import UBatchError

_POOLING = "models generate text; embeddings, scores and classes are not offered"
_ELSEWHERE = "keys and values are not exchanged with other servers"
_LORA = "there are no LoRA adapters; merge one into the checkpoint"
_WORKERS = "there are no workers to call; LLM.statistics and LLM.get_metrics tell what they did"
_SLEEP = "an LLM keeps its memory until it is closed; close it, and make another one"
_WEIGHTS = "weights are read from a checkpoint when an LLM is made; make another one"

NAMES: Mapping[str, str] = {
    "BeamSearchParams": "there is no beam search; sample several outputs with SamplingParams(n=...)",
    **dict.fromkeys(("PoolingParams", "PoolingRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput"), _POOLING),
    **dict.fromkeys(("ClassificationOutput", "ClassificationRequestOutput"), _POOLING),
    **dict.fromkeys(("ScoringOutput", "ScoringRequestOutput"), _POOLING),
    "GuidedDecodingParams": "it is called StructuredOutputsParams, a field of SamplingParams(structured_outputs=...)",
    "LoRARequest": _LORA,
    "AsyncLLMEngine": "it is called AsyncLLM",
    "ModelRegistry": "use model_runner.register_model",
    **dict.fromkeys(("KVTransferConfig", "ECTransferConfig"), _ELSEWHERE),
    **dict.fromkeys(("CompilationConfig", "PoolerConfig"), "an LLM's options are plain values; see EngineArgs"),
}
"""Name in vLLM's package -> why it is not here, or what to use."""

METHODS: Mapping[str, str] = {
    "beam_search": "there is no beam search; sample several outputs with SamplingParams(n=...)",
    **dict.fromkeys(("embed", "encode", "classify", "score", "reward"), _POOLING),
    **dict.fromkeys(("collective_rpc", "apply_model"), _WORKERS),
    **dict.fromkeys(("sleep", "wake_up"), _SLEEP),
    **dict.fromkeys(("init_weight_transfer_engine", "update_weights", "save_sharded_state"), _WEIGHTS),
    "reset_prefix_cache": "turn the prefix cache off with LLM(enable_prefix_caching=False)",
    "set_tokenizer": "the tokenizer is the checkpoint's",
    "llm_engine": "an LLM has get_tokenizer, get_metrics, statistics, memory and options instead",
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"), "there are no LoRA adapters"),
}
"""Method or attribute of vLLM's `LLM` or `AsyncLLM` -> why it is not here, or what to use."""


@dataclass(frozen=True)
class Refused:
    """An option or a field of vLLM that is not offered.

    Attributes:
        why: the reason, or what to do instead; completes a sentence.
        neutral: values that ask for nothing, besides the default and None.
    """

    why: str
    neutral: tuple[Any, ...] = ()

    def matters(self, value: Any) -> bool:
        """Whether a value asks for something."""
        return value is not None and not any(type(value) is type(each) and value == each for each in self.neutral)


OPTIONS: Mapping[str, Refused] = {
    "disable_log_stats": Refused("outputs always have metrics, and get_metrics works", (True, False)),
    "disable_custom_all_reduce": Refused("there is no custom all-reduce", (True, False)),
    "disable_cascade_attn": Refused("there is no cascade attention", (True, False)),
    "use_tqdm_on_load": Refused("whether there is a bar depends on the terminal", (True, False)),
    "tokenizer": Refused("the tokenizer is the checkpoint's; put that tokenizer's files into its folder"),
    "tokenizer_mode": Refused("tokenizers are transformers' fast ones", ("auto", "hf")),
    "tokenizer_revision": Refused("the tokenizer is the checkpoint's; use revision"),
    "code_revision": Refused("no code of a checkpoint is ever run"),
    "hf_token": Refused("log in with `hf auth login`, or set HF_TOKEN", (False,)),
    "hf_overrides": Refused("change the checkpoint's config.json, or a copy of it", ({},)),
    "hf_config_path": Refused("put the config.json into the checkpoint's folder"),
    "config_format": Refused("configs are Hugging Face's", ("hf",)),
    "task": Refused(_POOLING, ("auto", "generate")),
    "runner": Refused(_POOLING, ("generate",)),
    "convert": Refused(_POOLING, ("none",)),
    "model_impl": Refused("models are this project's", ("vllm",)),
    "quantization": Refused("the checkpoint's config says how it is quantized (docs/quantization.md)"),
    "swap_space": Refused("nothing is swapped out: a request that loses its pages is computed again", (0, 4, 0.0, 4.0)),
    "cpu_offload_gb": Refused("weights stay where they are computed with; use more ranks", (0, 0.0)),
    "max_seq_len_to_capture": Refused("graphs are captured by requests, not by length; use max_cudagraph_capture_size"),
    "num_gpu_blocks_override": Refused("use kv_cache_memory, in bytes"),
    "pipeline_parallel_size": Refused("use tensor_parallel_size or data_parallel_size"),
    "distributed_executor_backend": Refused(
        "LLM starts its ranks by itself: call the script once, without a launcher; data_parallel_size and "
        "tensor_parallel_size say how many",
        ("mp", "uni"),
    ),
    "data_parallel_backend": Refused("ranks are processes of this machine, or of several with nnodes"),
    **dict.fromkeys(("worker_cls", "worker_extension_cls"), Refused("ranks run this project's own workers")),
    "scheduler_cls": Refused("the scheduler is this project's; see scheduling_policy"),
    "compilation_config": Refused("nothing is compiled; use cudagraph_mode and cudagraph_capture_sizes", ({},)),
    "structured_outputs_config": Refused(
        "grammars are llguidance's; SamplingParams(structured_outputs=...) says what form an output has",
        ({}, {"backend": "auto"}, {"backend": "guidance"}),
    ),
    "reasoning_parser": Refused("an output has its whole text, reasoning too; split it at the model's marker"),
    "logprobs_mode": Refused("log-probabilities are the model's own, before temperature and penalties"),
    "logits_processors": Refused("no code runs on logits; use logit_bias, allowed_token_ids or bad_words", ([], ())),
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank"), Refused(_LORA)),
    "enable_prompt_embeds": Refused("prompts are text or token ids"),
    **dict.fromkeys(
        ("limit_mm_per_prompt", "mm_processor_kwargs", "allowed_local_media_path"),
        Refused("models read and write text only", ({},)),
    ),
    "pooler_config": Refused(_POOLING),
    "enable_sleep_mode": Refused("an LLM keeps its memory until it is closed"),
    **dict.fromkeys(("kv_transfer_config", "kv_events_config"), Refused(_ELSEWHERE)),
    "stream_interval": Refused("it is per request: SamplingParams(stream_interval=...)"),
    "additional_config": Refused("no platform's plug-in would read it", ({},)),
    "model_loader_extra_config": Refused("checkpoints are safetensors files", ({},)),
}
"""Option of vLLM's `LLM` -> why it is refused, unless its value asks for nothing."""


class NotOffered(UBatchError, AttributeError):
    """An attribute that vLLM has and this project has not; the message says why, or what to use."""


def not_offered(kind: str, name: str) -> AttributeError:
    """The error for an attribute that a class has not."""
    if name in METHODS:
        return NotOffered(f"{kind}.{name} is not offered: {METHODS[name]}.")
    return AttributeError(f"{kind!r} object has no attribute {name!r}")
