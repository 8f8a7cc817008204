"""Floor 3: models from Hugging Face checkpoints, run step by step over a paged KV cache.

weights, hf_config    a checkpoint's tensors and config, read lazily and checked
models                families, one file each
step_cost             what a token and an attended pair cost, for splits by cost
input_batch           requests, flattened into one step's batch
dp                    the vote with the other ranks, and this rank's lanes
sampler               from logits to tokens
runner                all of it: `ModelRunner.execute` runs one step
generate              offline generation, batched and over several ranks
random_checkpoint     a large model with random weights, for measuring
"""

from model_runner.dp import BatchShape, Coordination, coordinate_batch_across_dp, make_offer
from model_runner.errors import (
    CheckpointError,
    CheckpointFileMissing,
    RequestError,
    TensorMissing,
    UnknownArchitecture,
    WrongShape,
)
from model_runner.generate import FinishReason, GenerationOutput, check_request, generate
from model_runner.host_memory import keep_freed_memory
from model_runner.input_batch import InputBatch, Request, ScheduledRequest, build_input_batch
from model_runner.models import (
    CausalLM,
    ExpertParallel,
    ModelConfig,
    known_architectures,
    model_class,
    register_model,
)
from model_runner.random_checkpoint import RandomQwen3Moe, make_random_qwen3_moe
from model_runner.runner import ModelRunner, StepOutput
from model_runner.sampler import SamplingParams, TokenLogprobs, sample
from model_runner.step_cost import split_cost
from model_runner.weights import Checkpoint

__all__ = [
    "BatchShape",
    "CausalLM",
    "Checkpoint",
    "CheckpointError",
    "CheckpointFileMissing",
    "Coordination",
    "ExpertParallel",
    "FinishReason",
    "GenerationOutput",
    "InputBatch",
    "ModelConfig",
    "ModelRunner",
    "RandomQwen3Moe",
    "Request",
    "RequestError",
    "SamplingParams",
    "ScheduledRequest",
    "StepOutput",
    "TensorMissing",
    "TokenLogprobs",
    "UnknownArchitecture",
    "WrongShape",
    "build_input_batch",
    "check_request",
    "coordinate_batch_across_dp",
    "generate",
    "keep_freed_memory",
    "known_architectures",
    "make_offer",
    "make_random_qwen3_moe",
    "model_class",
    "register_model",
    "sample",
    "split_cost",
]
