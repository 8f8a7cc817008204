"""Floor 3: models from Hugging Face checkpoints, run step by step over a paged KV cache.

weights, hf_config    a checkpoint's tensors and config, read lazily and checked
weight_pass           the files from front to back, by pinned memory to a device
memory_profile        what a step and graphs take, so that the KV cache gets the rest
models                families, one file each
step_cost             what a token and an attended pair cost, for splits by cost
request               a sequence while it is generated, and its share of one step
input_batch           requests, flattened into one step's batch
graph_sizes           which steps are captured as CUDA graphs, and which graph a step is padded to
graph_steps           captured, padded and replayed; `graph_mode`: whether at all; `runner_graphs`: of one runner
dp                    the vote with the other ranks, and this rank's lanes
sampling_params       how to generate for one request; `bad_sequences`: which tokens would complete one
penalties, sampler    from logits to tokens
logprobs              how likely tokens were
future_map            tokens that the host does not know yet
verify                drafts, and which of them were right; `speculation` makes them
pending_step          a step between its launch and its result
tensor_parallel       ranks that share a replica: who has which heads and rows
step_context          what every lane of a step knows
runner                all of it: `ModelRunner.execute` runs one step
generate              offline generation, batched and over several ranks
random_checkpoint     a large model with random weights, for measuring
"""

from model_runner.auto.dbo_auto import DboAuto
from model_runner.auto.step_cost import split_cost
from model_runner.decoder.base import check_tensor_parallel
from model_runner.errors import (
    CheckpointError,
    CheckpointFileMissing,
    RequestError,
    StepOrderError,
    TensorMissing,
    TensorParallelMismatch,
    UnknownArchitecture,
    WrongShape,
)
from model_runner.generate import FAULTS, FinishReason, GenerationOutput, check_request, generate
from model_runner.memory.host_memory import keep_freed_memory
from model_runner.memory.kv_memory import DEFAULT_KV_CACHE_MEMORY
from model_runner.models import (
    CausalLM,
    ExpertParallel,
    ModelConfig,
    known_architectures,
    model_class,
    register_model,
)
from model_runner.parallel.tensor_parallel import TensorParallel
from model_runner.pending_step import PendingStep, StepOutput
from model_runner.runner import ModelRunner
from model_runner.sampling.draws import fresh_seed
from model_runner.sampling.penalties import SamplingRow
from model_runner.sampling.sampler import sample
from model_runner.sampling.sampling_params import MAX_BAD_TOKENS, MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, SamplingParams
from model_runner.sampling.token_ids import TokenIds
from model_runner.speculation import Acceptance, Draft, Proposer, StepObserver
from model_runner.step.dp import BatchShape, Coordination, coordinate_batch_across_dp, make_offer
from model_runner.step.future_map import FutureMap
from model_runner.step.graph_sizes import GraphShape, capture_sizes
from model_runner.step.input_batch import InputBatch, build_input_batch
from model_runner.step.logprobs import TokenLogprobs
from model_runner.step.request import PENDING_TOKEN, Request, ScheduledRequest
from model_runner.weights.random_checkpoint import (
    RandomDeepseekV3,
    RandomQwen3Moe,
    make_random_checkpoint,
    make_random_qwen3_moe,
)
from model_runner.weights.weights import Checkpoint

__all__ = [
    "DEFAULT_KV_CACHE_MEMORY",
    "FAULTS",
    "MAX_BAD_TOKENS",
    "MAX_LOGIT_BIASES",
    "MAX_STOP_TOKEN_IDS",
    "PENDING_TOKEN",
    "Acceptance",
    "BatchShape",
    "CausalLM",
    "Checkpoint",
    "CheckpointError",
    "CheckpointFileMissing",
    "Coordination",
    "DboAuto",
    "Draft",
    "ExpertParallel",
    "FinishReason",
    "FutureMap",
    "GenerationOutput",
    "GraphShape",
    "InputBatch",
    "ModelConfig",
    "ModelRunner",
    "PendingStep",
    "Proposer",
    "RandomDeepseekV3",
    "RandomQwen3Moe",
    "Request",
    "RequestError",
    "SamplingParams",
    "SamplingRow",
    "ScheduledRequest",
    "StepObserver",
    "StepOrderError",
    "StepOutput",
    "TensorMissing",
    "TensorParallel",
    "TensorParallelMismatch",
    "TokenIds",
    "TokenLogprobs",
    "UnknownArchitecture",
    "WrongShape",
    "build_input_batch",
    "capture_sizes",
    "check_request",
    "check_tensor_parallel",
    "coordinate_batch_across_dp",
    "fresh_seed",
    "generate",
    "keep_freed_memory",
    "known_architectures",
    "make_offer",
    "make_random_checkpoint",
    "make_random_qwen3_moe",
    "model_class",
    "register_model",
    "sample",
    "split_cost",
]
