"""What vLLM has and this project has not, each with a sentence: names of its package, methods of `LLM`, fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ubatch import UBatchError

POOLING = "models generate text; embeddings, scores and classes are not offered"
ELSEWHERE = "keys and values are not exchanged with other servers"
LORA = "there are no LoRA adapters; merge one into the checkpoint"
_WORKERS = "there are no workers to call; LLM.statistics and LLM.get_metrics tell what they did"
_SLEEP = "an LLM keeps its memory until it is closed; close it, and make another one"
_WEIGHTS = "weights are read from a checkpoint when an LLM is made; make another one"
LOGITS = "no code runs on logits; use logit_bias, allowed_token_ids or bad_words"

NAMES: Mapping[str, str] = {
    "BeamSearchParams": "there is no beam search; sample several outputs with SamplingParams(n=...)",
    **dict.fromkeys(("PoolingParams", "PoolingRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput"), POOLING),
    **dict.fromkeys(("ClassificationOutput", "ClassificationRequestOutput"), POOLING),
    **dict.fromkeys(("ScoringOutput", "ScoringRequestOutput"), POOLING),
    "GuidedDecodingParams": "it is called StructuredOutputsParams, a field of SamplingParams(structured_outputs=...)",
    "LoRARequest": LORA,
    "AsyncLLMEngine": "it is called AsyncLLM",
    "ModelRegistry": "use model_runner.register_model",
    **dict.fromkeys(("KVTransferConfig", "ECTransferConfig"), ELSEWHERE),
    **dict.fromkeys(("CompilationConfig", "PoolerConfig"), "an LLM's options are plain values; see EngineArgs"),
}
"""Name in vLLM's package -> why it is not here, or what to use."""

METHODS: Mapping[str, str] = {
    "beam_search": "there is no beam search; sample several outputs with SamplingParams(n=...)",
    **dict.fromkeys(("embed", "encode", "classify", "score", "reward"), POOLING),
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
        neutral: values that ask for nothing, besides None: the default, and others.
    """

    why: str
    neutral: tuple[Any, ...] = ()

    def matters(self, value: Any) -> bool:
        """Whether a value asks for something."""
        return value is not None and not any(type(value) is type(each) and value == each for each in self.neutral)


def refused(default: Any, why: str, *neutral: Any) -> Any:
    """A dataclass field of vLLM's that is refused unless its value asks for nothing; see `Refused`."""
    return field(default=default, metadata={Refused: Refused(why, (default, *neutral))})


def refusals(kind: Any) -> Mapping[str, Refused]:
    """The fields of a dataclass that are `refused`."""
    return {each.name: each.metadata[Refused] for each in fields(kind) if Refused in each.metadata}


class NotOffered(UBatchError, AttributeError):
    """An attribute that vLLM has and this project has not; the message says why, or what to use."""


def not_offered(owner: object, name: str) -> Any:
    """The `__getattr__` of a class: raises the error for an attribute that it has not."""
    kind = type(owner).__name__
    if name in METHODS:
        raise NotOffered(f"{kind}.{name} is not offered: {METHODS[name]}.")
    raise AttributeError(f"{kind!r} object has no attribute {name!r}")
