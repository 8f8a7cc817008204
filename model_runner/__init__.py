"""Floor 3: models from Hugging Face checkpoints, run step by step over a paged KV cache.

generate          offline generation, batched and over several ranks
random_checkpoint a large model with random weights, for measuring
runner            the whole: `ModelRunner` loads a model and makes what its steps need
memory/           memory that a step and graphs take; the KV cache gets the rest
step_runner       its steps: `ModelRunner.execute` runs one
pending_step      a step between its launch and its result
drafting/         draft networks, with a KV cache of their own
graphs/           steps captured as CUDA graphs, and replayed
auto/             learns from running steps when to overlap; the cost of a token and of an attended pair; a CPU's dtype
backend_choice    resolves `auto` to an attention back end and an experts back end
models/           model families, each by what its config says, and the registry
decoder/          the decoder that all families share
settings          all settings of a runner, checked once
speculation       proposers of draft tokens, and the test that accepts drafts
step/             requests flattened into a batch, the vote of all ranks on it, and its streams
sampling/         sampling parameters of a request; from logits to tokens
balance/          moves experts between ranks while steps run
parallel/         tensor parallelism, and how tokens reach their experts
weights/          a checkpoint's tensors and config, or random ones
kernels/          Triton kernels of this package
errors            errors of a checkpoint, a request or a step

The order is from the user's view down: a module imports only modules listed below it.
"""

import typing
import warnings

# isort: off
from ubatch.process import foreign as _foreign

_foreign.check_packages()  # before anything imports `moe` or `attention`
# isort: on

from model_runner.auto.cpu_dtype import fastest_cpu_dtype
from model_runner.auto.step_cost import split_cost
from model_runner.auto.step_settings import StepSettings
from model_runner.decoder.base import check_tensor_parallel, read_model_config
from model_runner.errors import (
    CheckpointError,
    CheckpointFileMissing,
    RequestError,
    StepOrderError,
    TensorMissing,
    TensorParallelMismatch,
    TensorsUnread,
    UnknownArchitecture,
    WrongShape,
)
from model_runner.generate import FAULTS, FinishReason, GenerationOutput, check_request, generate
from model_runner.memory.host_memory import keep_freed_memory
from model_runner.models import CausalLM, ExpertParallel, ModelConfig, known_architectures, model_class, register_model
from model_runner.parallel.tensor_parallel import TensorParallel
from model_runner.pending_step import PendingStep, StepOutput
from model_runner.random_checkpoint import (
    RandomDeepseekV3,
    RandomQwen3Moe,
    make_random_checkpoint,
    make_random_qwen3_moe,
)
from model_runner.runner import ModelRunner
from model_runner.sampling.rows import GrammarRows, MaskFiller, SamplingRow, StepMasks, TokenGrammar, fresh_seed
from model_runner.sampling.sampler import sample
from model_runner.sampling.sampling_params import (
    MAX_BAD_TOKENS,
    MAX_GRAMMAR_LENGTH,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)
from model_runner.sampling.token_ids import TokenIds
from model_runner.settings import DEFAULT_KV_CACHE_MEMORY, RunnerSettings
from model_runner.speculation import Acceptance, Draft, Proposer, StepObserver
from model_runner.step.batch import build_input_batch
from model_runner.step.dp import coordinate_batch_across_dp, make_offer
from model_runner.step.future_map import FutureMap
from model_runner.step.graph_sizes import GraphShape, capture_sizes
from model_runner.step.logprobs import TokenLogprobs
from model_runner.step.request import PENDING_TOKEN, Request, ScheduledRequest
from model_runner.step.step import Step
from model_runner.weights.weights import Checkpoint

__all__ = [
    "DEFAULT_KV_CACHE_MEMORY",
    "FAULTS",
    "MAX_BAD_TOKENS",
    "MAX_GRAMMAR_LENGTH",
    "MAX_LOGIT_BIASES",
    "MAX_STOP_TOKEN_IDS",
    "MAX_TOP_LOGPROBS",
    "PENDING_TOKEN",
    "Acceptance",
    "CausalLM",
    "Checkpoint",
    "CheckpointError",
    "CheckpointFileMissing",
    "Draft",
    "ExpertParallel",
    "FinishReason",
    "FutureMap",
    "GenerationOutput",
    "GrammarRows",
    "GraphShape",
    "MaskFiller",
    "ModelConfig",
    "ModelRunner",
    "PendingStep",
    "Proposer",
    "RandomDeepseekV3",
    "RandomQwen3Moe",
    "Request",
    "RequestError",
    "RunnerSettings",
    "SamplingParams",
    "SamplingRow",
    "ScheduledRequest",
    "Step",
    "StepMasks",
    "StepObserver",
    "StepOrderError",
    "StepOutput",
    "StepSettings",
    "TensorMissing",
    "TensorParallel",
    "TensorParallelMismatch",
    "TensorsUnread",
    "TokenGrammar",
    "TokenIds",
    "TokenLogprobs",
    "UnknownArchitecture",
    "WrongShape",
    "build_input_batch",
    "capture_sizes",
    "check_request",
    "check_tensor_parallel",
    "coordinate_batch_across_dp",
    "fastest_cpu_dtype",
    "fresh_seed",
    "generate",
    "keep_freed_memory",
    "known_architectures",
    "make_offer",
    "make_random_checkpoint",
    "make_random_qwen3_moe",
    "model_class",
    "read_model_config",
    "register_model",
    "sample",
    "split_cost",
]


def __getattr__(name: str) -> typing.Any:
    kind = _RENAMED.get(name)
    if kind is None:
        raise AttributeError(f"module 'model_runner' has no attribute {name!r}")
    message = f"model_runner.{name} is gone in the next release. It is model_runner.{kind.__name__}."
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return kind


_RENAMED = {"DboAuto": StepSettings, "InputBatch": Step, "BatchShape": Step, "Coordination": Step}
