"""From `EngineOptions` to a runner and the loop that drives it: the same for a rank's process and for offline use."""

from __future__ import annotations

import logging

import torch

from model_runner import ModelRunner, SamplingParams, generate
from serving.engine.core import EngineCore
from serving.engine.options import EngineOptions
from serving.logs import log_event
from serving.runner_setup import make_link
from serving.scheduler import Scheduler
from ubatch import CommGroup, ConfigError

__all__ = ["make_core", "make_runner", "warm_up"]

_logger = logging.getLogger(__name__)

_WARM_UP_TOKENS = 16


def make_runner(options: EngineOptions, group: CommGroup | None = None, *, device_index: int = 0) -> ModelRunner:
    """Load the model on this rank.

    Args:
        options: of the engine.
        group: the ranks that share the experts; None for one alone.
        device_index: which GPU, where `options.device` is `cuda`.

    Raises:
        CheckpointError, ConfigError: see `ModelRunner`.
    """
    return ModelRunner(
        options.model,
        group=group,
        all2all_backend=options.all2all_backend,
        link=make_link(options.emulated_link),
        dbo=options.dbo,
        attention_backend=options.attention_backend,
        prefill_attention_backend=options.prefill_attention_backend,
        decode_attention_backend=options.decode_attention_backend,
        block_size=options.block_size,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_cache_memory=options.kv_cache_memory,
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_num_seqs=options.scheduler.max_num_seqs,
        max_model_len=options.scheduler.max_model_len,
        dtype=_dtype(options.dtype),
        device=f"cuda:{device_index}" if options.device == "cuda" else options.device,
    )


def make_core(options: EngineOptions, runner: ModelRunner) -> EngineCore:
    """The scheduler over the runner's KV cache, and the loop."""
    if options.speculates and options.overlap_schedule:
        log_event(_logger, "plain loop", reason="speculation needs a step's tokens before it can draft the next")
    scheduler = Scheduler(
        options.scheduler,
        runner.allocator,
        runner.request_table,
        eos_token_ids=runner.config.eos_token_ids,
        vocab_size=runner.config.vocab_size,
    )
    return EngineCore(runner, scheduler, overlap_schedule=options.overlaps_schedule)


def warm_up(options: EngineOptions, runner: ModelRunner) -> None:
    """A short prompt and a decode step, so that what is made at the first use is made. All ranks must call it."""
    room = min(runner.free_kv_tokens, options.scheduler.max_model_len)
    tokens = [0] * min(_WARM_UP_TOKENS, room - 2)
    generate(runner, [tokens] if tokens else [], SamplingParams(max_tokens=2, ignore_eos=True))


def _dtype(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ConfigError(f"unknown dtype {name!r}. Known: {', '.join(known)}")
    return known[name]
