"""Makes a runner and its loop from `EngineOptions`, for a rank's process and for offline use.

And what the settings and the engines ask of a checkpoint and a `ModelRunner`: dtype, progress, descriptions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from model_runner import (
    Checkpoint,
    CheckpointError,
    ModelConfig,
    ModelRunner,
    RunnerSettings,
    SamplingParams,
    fastest_cpu_dtype,
    generate,
)
from model_runner.models import read_sizes
from model_runner.weights import KeptStart, describe_files, open_checkpoint
from moe import All2AllTraits, EmulatedLink, traits_in
from moe.balance import part_steps
from serving.engine.kept import SharedMemory
from serving.engine.options import EngineOptions
from serving.engine.rank.core import EngineCore
from serving.engine.rank.tracing import LoadReporter
from serving.engine.speculation import make_scheduler, runner_options
from serving.logs import log_event
from serving.structured.matcher import GrammarCompiler, load_grammar_tokenizer
from ubatch import CapturedGraph, CommGroup, ConfigError, ForwardMode, __version__
from ubatch.kernels import remember_choices

_logger = logging.getLogger(__name__)

_WARM_UP_TOKENS = 16
_MIB = 2**20


def make_runner(
    options: EngineOptions,
    group: CommGroup | None = None,
    *,
    device_index: int = 0,
    num_kv_blocks: int | None = None,
    kept: SharedMemory | None = None,
) -> ModelRunner:
    """Load the model on this rank.

    Args:
        num_kv_blocks: size of the KV cache; overrides the options' memory settings.
        kept: what an earlier process of this rank has left; choices that it has measured are taken over in this one.

    Raises:
        CheckpointError, ConfigError: see `ModelRunner`.
    """
    if num_kv_blocks is not None:
        options = replace(options, kv_cache_memory=None, gpu_memory_utilization=None)
    scheduler, link = options.scheduler, None
    if options.emulated_link is not None:
        latency_us, megabytes_per_s = options.emulated_link
        link = EmulatedLink(latency_us * 1e-6, megabytes_per_s * 1e6)
    settings = RunnerSettings(
        **options.shared(),
        group=group,
        experts_backend=options.moe_backend,
        link=link,
        num_kv_blocks=num_kv_blocks,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        num_state_snapshots=scheduler.num_state_snapshots if scheduler.enable_prefix_caching else 0,
        max_model_len=scheduler.max_model_len,
        **runner_options(options.speculation),
        dtype=getattr(torch, options.dtype),
        device=f"cuda:{device_index}" if options.device == "cuda" else options.device,
        on_weights=WeightsBar(show=group is None or group.rank == 0),
        kept=None if kept is None else _kept_start(options, 0 if group is None else group.rank, kept),
    )
    return ModelRunner(options.model, settings)


def _kept_start(options: EngineOptions, rank: int, memory: SharedMemory) -> KeptStart:
    draft = None if options.speculation is None else options.speculation.draft_model_path
    options = replace(options, master_addr="", master_port=0)  # the next run of ranks may have another
    files = describe_files(options.model, draft)
    start = KeptStart(
        memory.fd, f"{__version__} rank {rank} of {options} on {torch.get_num_threads()} threads: {files}"
    )
    remember_choices(start.measured)
    return start


def make_core(options: EngineOptions, runner: ModelRunner) -> EngineCore:
    """Make the scheduler over the runner's KV cache, with its proposer, and the loop."""
    if options.speculation is not None and options.overlap_schedule:
        log_event(_logger, "plain loop", reason="speculation needs a step's tokens before it can draft the next")
    return EngineCore(
        runner,
        make_scheduler(options.scheduler, options.speculation, runner),
        overlap_schedule=options.overlaps_schedule,
        measure_overlap=not runner.streams.asynchronous,  # on a GPU, host times do not show the overlap
        decided=runner.step_settings.reasons,
        grammars=GrammarCompiler(
            partial(load_grammar_tokenizer, options.model, runner.config.vocab_size, runner.config.eos_token_ids)
        ),
        loads=_load_reporter(options, runner),
        mover=runner.mover,
    )


def _load_reporter(options: EngineOptions, runner: ModelRunner) -> LoadReporter | None:
    if runner.expert_loads is not None and runner.placement is not None:
        every = part_steps(options.eplb_config.window_size)
        return LoadReporter(runner.copy_expert_loads, runner.placement, every)
    if options.expert_load_out is not None:
        raise ConfigError("expert_load_out: the load of this kind of model is not counted. Remove it.")
    return None


def warm_up(options: EngineOptions, runner: ModelRunner) -> None:
    """Capture CUDA graphs, then run prompts and decode steps, so that buffers and kernels are made before the first
    request.

    On a CPU one short prompt is enough. On a GPU, kernels are tuned for every power of two of tokens, some seconds each
    if they are not in the cache of `ubatch.kernels.autotuner`. All ranks must call it.

    Raises:
        CaptureFailed: see `ModelRunner.capture_graphs`.
    """
    first = runner.group is None or runner.group.rank == 0
    capture_graphs(runner, show=first)
    room = min(runner.free_kv_tokens, options.scheduler.max_model_len) - 2  # two tokens are generated
    for length in warm_up_lengths(options):
        tokens = [0] * min(length, room)
        generate(runner, [tokens] if tokens else [], SamplingParams(max_tokens=2, ignore_eos=True))
    runner.clear_expert_loads()


def capture_graphs(runner: ModelRunner, *, show: bool = True) -> list[CapturedGraph]:
    """Capture the runner's graphs; none if it runs eagerly. All ranks of a group must call it.

    Args:
        show: show a progress bar if standard error is a terminal.

    Raises:
        CaptureFailed: see `ModelRunner.capture_graphs`.
    """
    total = len(runner.graph_shapes)
    if not total:
        return []
    with tqdm(total=total, desc="capture", unit="graph", disable=None if show else True, leave=False) as bar:

        def progress(graph: CapturedGraph) -> None:
            size = f"{graph.nbytes / _MIB:.1f} MiB"
            bar.set_postfix_str(f"{graph.key}: {size}")
            bar.update()
            log_event(_logger, "graph captured", level=logging.DEBUG, key=graph.key, memory=size, seconds=graph.seconds)

        graphs = runner.capture_graphs(progress)
    log_event(
        _logger,
        "graphs captured",
        graphs=len(graphs),
        overlapped=sum(graph.key.overlapped for graph in graphs),
        memory=f"{sum(graph.nbytes for graph in graphs) / _MIB:.1f} MiB",
        seconds=sum(graph.seconds for graph in graphs),
    )
    return graphs


def warm_up_lengths(options: EngineOptions) -> list[int]:
    """Lengths of the prompts of `warm_up`, the longest first, so that a lack of memory shows at once.

    Every rank has the same number, whatever its memory: all ranks run each step together.
    """
    lengths = [_WARM_UP_TOKENS]
    if options.device == "cuda":
        longest = max(_WARM_UP_TOKENS, min(options.scheduler.max_num_batched_tokens, options.scheduler.max_model_len))
        while lengths[-1] < longest:
            lengths.append(min(2 * lengths[-1], longest))
    return lengths[::-1]


# -- checkpoints and descriptions --------------------------------------------------------------------------------------


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
