"""Makes a runner and its loop from `EngineOptions`, for a rank's process and for offline use."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import torch
from tqdm import tqdm

from model_runner import ModelRunner, RunnerSettings, SamplingParams, generate
from model_runner.weights import KeptStart, describe_files
from moe import EmulatedLink
from moe.balance import part_steps
from serving.engine.kept import SharedMemory
from serving.engine.options import EngineOptions
from serving.engine.rank.core import EngineCore
from serving.engine.rank.runner_setup import WeightsBar
from serving.engine.rank.tracing import LoadReporter
from serving.engine.speculation import make_scheduler, runner_options
from serving.logs import log_event
from serving.structured.matcher import GrammarCompiler
from serving.structured.tokenizer import load_grammar_tokenizer
from ubatch import CapturedGraph, CommGroup, ConfigError, __version__
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
