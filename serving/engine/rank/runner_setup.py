"""What the settings and the engines ask of a checkpoint and a `ModelRunner`: dtype, progress, descriptions."""

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from model_runner import Checkpoint, CheckpointError, ModelConfig, ModelRunner, fastest_cpu_dtype
from model_runner.models import read_sizes
from model_runner.weights import open_checkpoint
from moe import All2AllTraits, traits_in
from serving.logs import log_event
from ubatch import ForwardMode

_logger = logging.getLogger(__name__)


def count_gpus() -> int:
    """Number of CUDA devices that torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_dtype(
    device: str,
    stored: Sequence[str],
    model: ModelConfig,
    experts_backend: str = "auto",
    threads: int | None = None,
    tensor_parallel_size: int = 1,
) -> tuple[str, str]:
    """The dtype that `--dtype auto` chooses, and the reason. On a CPU it may measure for some tenths of a second.

    Args:
        stored: `Checkpoint.stored_dtypes`. A CPU gets `bfloat16` only if nothing else is stored: neither float32 nor
            float16, which has more digits, is rounded without being asked for.
        experts_backend: as of `ModelRunner`.
        threads, tensor_parallel_size: as of `fastest_cpu_dtype`.
    """
    if device == "cpu":
        finer = next((dtype for dtype in stored if dtype != "bfloat16"), None if stored else "unknown")
        if finer is not None:
            why = "bfloat16 would round its weights" if finer in ("float32", "float16") else "exact"
            return "float32", f"the checkpoint is {finer}; {why}"
        return fastest_cpu_dtype(model, experts_backend, threads, tensor_parallel_size)
    known = stored[:1] and stored[0] in ("float32", "float16", "bfloat16")
    return (stored[0], "the checkpoint's") if known else ("bfloat16", "usual on a GPU")


def read_checkpoint(
    model: Path, load_format: str = "auto"
) -> tuple[ModelConfig, tuple[str, ...], CheckpointError | None]:
    """Read a checkpoint's settings and `Checkpoint.stored_dtypes`, without its weights; the third is the error for a
    tensor that is missing or not read, see `read_sizes`.

    Raises:
        CheckpointError: there is no checkpoint, its model is not supported, or its config has sizes that its files have
            not; see `model_runner.errors`.
    """
    with closing(open_checkpoint(model, load_format)) as checkpoint:
        _, config, fault = read_sizes(checkpoint)
    with closing(Checkpoint(model)) as checkpoint:
        return config, checkpoint.stored_dtypes(), fault


class WeightsBar:
    """A progress bar for `ModelRunner(on_weights=...)`, and a line in the log at the end."""

    def __init__(self, *, show: bool = True) -> None:
        self._hidden = None if show else True
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` bytes are read."""
        if self._bar is None:
            units = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
            self._bar = tqdm(total=total, desc="weights", **units, disable=self._hidden, leave=False)
            self._begun = time.monotonic()
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()
            seconds = time.monotonic() - self._begun
            log_event(_logger, "weights loaded", memory=f"{total / 2**20:.1f} MiB", seconds=seconds)


def describe_memory(runner: ModelRunner) -> str:
    """`KV cache 256.0 MiB (8192 pages of 16 tokens); attention back ends: whole/torch 0.00 MiB`."""
    cache = runner.kv_cache
    parts = [f"{name} {size / 2**20:.2f} MiB" for name, size in runner.attention.memory().items()]
    pages = f"{cache.num_blocks} pages of {cache.spec.block_size} tokens"
    states = ""
    if runner.states is not None:
        own, size = runner.states, runner.states.nbytes / 2**20
        states = f"recurrent states {size:.1f} MiB (of {own.num_slots} requests at once"
        states += f", and {own.num_snapshots} snapshots); " if own.num_snapshots else "); "
    if runner.mover is not None:
        states += f"experts on their way {runner.mover.staging_bytes / 2**20:.1f} MiB; "
        if runner.settings.kept is not None and runner.device.type == "cpu":
            moved = runner.mover.weight_bytes / 2**20
            states += f"experts that have moved up to {moved:.1f} MiB, beside the weights kept for a restart; "
    return f"KV cache {cache.nbytes / 2**20:.1f} MiB ({pages}); {states}attention back ends: {', '.join(parts)}"


def describe_transport(runner: ModelRunner) -> list[str]:
    """Properties of the runner's transport, as text: one line, or one per mode if they differ; none if dense."""
    if not runner.config.num_experts:
        return []
    name = type(runner.all2all).__name__
    modes = (ForwardMode.DECODE, ForwardMode.PREFILL)
    ways = [_describe_traits(traits_in(runner.all2all, mode, 1), runner) for mode in modes]
    if len(set(ways)) == 1:
        return [f"{name}: {ways[0]}"]
    return [f"{name}, {mode}: {way}" for mode, way in zip(modes, ways, strict=True)]


def _describe_traits(traits: All2AllTraits, runner: ModelRunner) -> str:
    config = runner.config
    lanes = "any number of lanes" if traits.max_lanes is None else f"up to {traits.max_lanes} lanes"
    sent = traits.chunk_bytes(1, config.hidden_size, config.num_experts_per_tok, runner.kv_cache.spec.dtype)
    parts = [
        "travels during compute" if traits.is_async else "complete when launched: lanes hide nothing",
        "the host waits for counts" if traits.blocks_host else "no wait on the host",
        "capturable" if traits.capturable else "eager only",
        f"{lanes}, up to {traits.max_chunks} chunks",
        "keeps to reserved SMs" if traits.obeys_sms else "takes SMs as it likes",
        f"up to {sent / 1024:.1f} KiB a token, layer and chunk",
    ]
    if traits.max_tokens is not None:
        parts.append(f"room for {traits.max_tokens} tokens of a rank")
    return "; ".join(parts)
