"""Find settings that contradict each other, before anything starts; each message names both in one sentence."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

from model_runner import ModelConfig, check_tensor_parallel
from model_runner.parallel import LOCAL, check_schedules_by_name, make_placement, read_placement
from model_runner.settings import beyond_full_attention
from moe import check_all2all_options, experts_class
from moe.balance import EplbConfig
from serving.balance import check_load_out
from serving.engine.wire.secret import read_secret
from serving.options.flags.server_flags import Parallelism, PerMode, Server
from serving.options.flags.tables import Turns
from serving.options.overlap import overlap_config
from serving.options.sources import API_KEY_VARIABLE, Settings, Source
from serving.options.speculation import check_speculation
from ubatch import ConfigError
from ubatch.process import num_cores
from ubatch.schedules import MODE_KEYS

_MOST_PROCESSES = max(64, 4 * num_cores())
"""Most processes of ours on this machine; more would only take each other's time and memory."""
_MOST_NODES = 4096


@contextmanager
def _behind(begin: str) -> Iterator[None]:
    """What is refused inside is told behind the names of the settings that it is about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{begin}{error}") from error


def check_alone(settings: Settings) -> None:
    """Check the settings that need neither the checkpoint nor the machine."""
    checks = (_model, _overlap, _parallelism, _nodes, _memory, _graphs, check_speculation)
    for message in chain.from_iterable(check(settings) for check in checks):
        raise ConfigError(message)
    _check_load_out(settings)


def check_sizes(settings: Settings, model: ModelConfig) -> None:
    """Check the numbers of ranks against the checkpoint, before anything of their share of it is measured.

    Raises:
        ConfigError: the checkpoint cannot be divided like this.
    """
    for message in _shares(settings, model):
        raise ConfigError(message)


def place_experts(settings: Settings, model: ModelConfig) -> Settings:
    """Settings with the placement that `init_expert_location` names.

    Raises:
        ConfigError: the file cannot be read, or is for other experts or ranks; or there are too many redundant experts.
    """
    path = settings["init_expert_location"]
    if not model.num_experts or (path is None and not model.moe_layers):
        return settings
    redundant = EplbConfig.of(settings["eplb_config"] or {}).num_redundant_experts
    ranks = _num_processes(settings)
    with _behind(f"{settings.spell('init_expert_location' if path else 'eplb_config')}: "):
        if path is None:
            make_placement(model.num_experts, model.moe_layers, ranks, redundant)
            return settings
        placement = read_placement(path, model.num_experts, model.num_layers, model.moe_layers, ranks, redundant)
        return replace(settings, placement=placement)


def check_with_model(settings: Settings, model: ModelConfig, gpus: int) -> None:
    """Check the settings against the checkpoint and this machine's GPUs, once all values are derived.

    Raises:
        ConfigError: a setting exceeds what the checkpoint or the machine has, or contradicts another.
    """
    checks = (_checkpoint(settings, model), _device(settings, gpus), _steps(settings), _graph_sizes(settings))
    for message in chain.from_iterable(checks):
        raise ConfigError(message)
    _check_transport(settings, model)


def notes(settings: Settings) -> Iterator[str]:
    """Notes on settings that are allowed but may be mistakes, one sentence each."""
    yield from settings.notes
    if settings["trust_remote_code"]:
        yield (
            f"{settings.spell('trust_remote_code')} has no effect: no remote code is ever run; models are "
            "this project's, and tokenizers are transformers'"
        )
    flags = [name for name in ("enable_dbo", "enable_single_batch_overlap") if settings[name]]
    if flags and not settings["enable_expert_parallel"] and settings["tensor_parallel_size"] == 1:
        yield (
            f"{settings.spell(flags[0])} has no communication to hide: the ranks share no experts "
            "(--enable-expert-parallel)"
        )
    if flags == ["enable_dbo"] and settings["schedule"] == "serial":
        yield f"{settings.spell('schedule')} serial overlaps nothing"
    if settings.all["api_key"].source is Source.COMMAND_LINE:
        yield f"{settings.spell('api_key')} is visible to all who list this machine's processes; set {API_KEY_VARIABLE}"
    if settings["enforce_eager"] and settings["device"] == "cpu":
        yield f"{settings.spell('enforce_eager')} on a CPU: nothing would be captured anyway"
    if settings["dtype"] == "float16" and settings["device"] == "cpu":
        yield (
            f"{settings.spell('dtype')} float16 on a CPU: no kernel here is made for it. float32 is faster, and finer; "
            "bfloat16 may be faster still"
        )
    for names, why in _idle(settings):
        given = [settings.spell(name) for name in names if settings.given(name) and settings[name] is not None]
        if given:
            yield f"{', '.join(given)} without {why}"


def _idle(s: Settings) -> Iterator[tuple[Sequence[str], str]]:
    """Settings that have no effect, each with the setting that it needs."""
    if not s["enable_dbo"] and s["enable_single_batch_overlap"]:
        yield _ONLY_SPLIT, "--enable-dbo: one batch is not split"
    elif not s["enable_dbo"]:
        yield _ONLY_OVERLAPPED, "--enable-dbo: no step overlaps"
    elif s["speculative_algorithm"] is None:
        yield ("schedule_verify", "verify"), "--speculative-algorithm: no step verifies drafts"
    if not s["enable_log_requests"] or s["log_level"] != "debug":
        yield ("max_log_len",), "--enable-log-requests and --log-level debug: no prompt is logged"
    if not s["enable_auto_tool_choice"]:
        yield ("tool_call_parser",), "--enable-auto-tool-choice: the model does not decide to call tools"
    if s["max_engine_restarts"] == 0:
        yield ("engine_restart_window_s", "resume_timeout_s"), "--max-engine-restarts: no engine is started again"
    if not s["enable_prefix_caching"]:
        yield ("num_state_snapshots",), "--enable-prefix-caching: nothing is kept"
    if s["allowed_origins"] is None:
        yield ("allowed_methods", "allowed_headers", "allow_credentials"), "--allowed-origins: no browser may call"
    if s["node_rank"] > 0:
        yield ("expert_load_out",), "the client: machine 0 (--node-rank 0) has it, and writes the load of all ranks"
        yield (
            [name for name in (*Server.model_fields, *Turns.model_fields) if name != "log_level"],
            "a server: machine 0 (--node-rank 0) has it",
        )


_ONLY_SPLIT = ("ubatch_size", "split_by", "tbo_token_distribution_threshold")
_ONLY_OVERLAPPED = (
    *_ONLY_SPLIT,
    *("dbo_decode_token_threshold", "dbo_prefill_token_threshold", "schedule"),
    *(f"schedule_{key}" for key in MODE_KEYS),
    *("comm_sms", "profile_ranges"),
    *PerMode.model_fields,
)


def _model(s: Settings) -> Iterator[str]:
    if s["model"] is None:
        yield (
            "MODEL is missing: give the folder of a checkpoint, or its name on the Hugging Face hub, as MODEL, with "
            "--model, or as `model` in the file."
        )


def _overlap(s: Settings) -> Iterator[str]:
    one_lane = s["enable_single_batch_overlap"] and not s["enable_dbo"]
    for name in ("dbo_decode_token_threshold", "dbo_prefill_token_threshold"):
        if s[name] < s["ubatch_size"] and not one_lane:
            yield (
                f"{s.spell(name)} is {s[name]}, below {s.spell('ubatch_size')} ({s['ubatch_size']}): "
                f"a microbatch would be empty. Set it to at least {s['ubatch_size']}."
            )
    overlap_config(s)


_NO_EXCHANGE = {
    "local": "local exchanges nothing, but the ranks share experts. Use torch_dist.",
    "emulated_link": "emulated_link is chosen by --emulated-link US MB/S, which also says how fast it is.",
}

_WITHOUT_MOVES = {"num_redundant_experts", "window_size"}
"""Keys of `eplb_config` that count even if experts do not move."""


def _parallelism(s: Settings) -> Iterator[str]:
    if s["enable_expert_parallel"]:
        if _num_processes(s) == 1:
            yield (
                f"{s.spell('enable_expert_parallel')} needs --data-parallel-size 2 or more, or --tensor-parallel-size; "
                "one rank has all experts."
            )
        if s["all2all_backend"] in _NO_EXCHANGE:
            yield f"{s.spell('all2all_backend')} {_NO_EXCHANGE[s['all2all_backend']]}"
        idle = set(s["eplb_config"] or ()) - _WITHOUT_MOVES
        if idle and not s["enable_eplb"]:
            names = ", ".join(f"{s.spell('eplb_config')}.{name}" for name in sorted(idle))
            yield f"{names}: only experts that move look at it. Add {s.spell('enable_eplb')}."
        if s["enable_eplb"] and s["moe_backend"] != "auto":
            with _behind(f"{s.spell('moe_backend')}, {s.spell('enable_eplb')}: "):
                experts_class(s["moe_backend"]).check_movable()
        return
    for name in ("all2all_backend", "all2all_options", "enable_eplb", "eplb_config", "init_expert_location"):
        if s[name]:
            why = "no token travels" if name.startswith("all2all") else "every rank has all experts"
            yield f"{s.spell(name)} needs --enable-expert-parallel; without it {why}."
    if s["emulated_link"] is not None and s["tensor_parallel_size"] == 1:
        yield (
            f"{s.spell('emulated_link')} needs --enable-expert-parallel, or --tensor-parallel-size 2 or more; without "
            "them nothing travels."
        )


def _num_processes(s: Settings) -> int:
    size: int = s["data_parallel_size"] * s["tensor_parallel_size"]
    return size


def _processes(s: Settings) -> str:
    """How the user set the number of processes."""
    names = ("data_parallel_size", "tensor_parallel_size")
    return " times ".join(s.spell(name) for name in names if s[name] > 1)


def _nodes(s: Settings) -> Iterator[str]:
    nnodes, ranks = s["nnodes"], s["data_parallel_size"]
    if nnodes > _MOST_NODES:
        yield f"{s.spell('nnodes')} is {nnodes}; at most {_MOST_NODES} machines can work together."
    if s["node_rank"] >= nnodes:
        yield f"{s.spell('node_rank')} is {s['node_rank']}, but --nnodes is {nnodes}: machines are 0 to {nnodes - 1}."
    if ranks % nnodes:
        whole = ": the processes of a rank stay on one machine" if s["tensor_parallel_size"] > 1 else ""
        yield f"{s.spell('data_parallel_size')} ({ranks}) does not divide by {s.spell('nnodes')} ({nnodes}){whole}."
    here = _num_processes(s) // nnodes
    if here > _MOST_PROCESSES:
        yield (
            f"{_processes(s)}: {here} processes on this machine with {num_cores()} cores; at most "
            f"{_MOST_PROCESSES} may run here. Use fewer."
        )
    if nnodes == 1:
        if s["master_addr"] != Parallelism.model_fields["master_addr"].default:
            yield f"{s.spell('master_addr')} needs --nnodes 2 or more; one machine needs no rendezvous address."
        if s["cluster_secret_file"] is not None:
            yield f"{s.spell('cluster_secret_file')} needs --nnodes 2 or more; one machine sends no messages to others."
        return
    try:
        secret = read_secret(s["cluster_secret_file"])
        if secret is not None:
            secret.curve("")
    except ConfigError as error:
        yield str(error).replace("cluster_secret_file", s.spell("cluster_secret_file"), 1)
    if s["master_addr"] in _EVERY_ADDRESS:
        yield f"{s.spell('master_addr')} {s['master_addr']!r} is every address of a machine. Give the one of machine 0."
    if not s.given("master_addr"):
        yield f"{s.spell('nnodes')} {nnodes} needs --master-addr: where the others reach machine 0."
    if s["master_port"] == 0:
        yield f"{s.spell('nnodes')} {nnodes} needs --master-port: the others cannot know one that was picked."


_EVERY_ADDRESS = ("", "0", "0.0.0.0", "::", "*")


def _memory(s: Settings) -> Iterator[str]:
    if s["kv_cache_memory"] is not None and s["gpu_memory_utilization"] is not None:
        yield (
            f"{s.spell('kv_cache_memory')} and {s.spell('gpu_memory_utilization')} both size the KV cache. Remove one."
        )


def _graphs(s: Settings) -> Iterator[str]:
    if s["enforce_eager"] and s["cudagraph_mode"] == "full":
        yield f"{s.spell('enforce_eager')} and {s.spell('cudagraph_mode')} full contradict each other. Remove one."
    off = s.spell("enforce_eager") if s["enforce_eager"] else f"{s.spell('cudagraph_mode')} none"
    for name in _SIZES:
        if s[name] is not None and (s["enforce_eager"] or s["cudagraph_mode"] == "none"):
            yield f"{s.spell(name)} has no effect with {off}: nothing is captured. Remove one."
    sizes, largest = s["cudagraph_capture_sizes"], s["max_cudagraph_capture_size"]
    if sizes is not None and largest is not None and max(sizes) > largest:
        yield (
            f"{s.spell('cudagraph_capture_sizes')} has {max(sizes)}, above {s.spell('max_cudagraph_capture_size')} "
            f"({largest}). Change one."
        )


_SIZES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")


def _check_load_out(s: Settings) -> None:
    if s["expert_load_out"] is not None and s["node_rank"] == 0:
        with _behind(f"{s.spell('expert_load_out')} "):
            check_load_out(s["expert_load_out"])


def _shares(s: Settings, model: ModelConfig) -> Iterator[str]:
    size, flag = s["tensor_parallel_size"], s.spell("tensor_parallel_size")
    with _behind(f"{flag}: "):
        check_tensor_parallel(model, size)
    if not s["enable_expert_parallel"]:
        if size > 1 and model.num_experts:
            yield (
                f"{flag} {size} shares attention and dense layers, and this model has {model.num_experts} experts. Add "
                "--enable-expert-parallel to share those too."
            )
        return
    ranks = _num_processes(s)
    if model.num_experts == 0:
        yield f"the checkpoint is a dense model, without experts that {s.spell('enable_expert_parallel')} could share."
    elif model.num_experts % ranks and not model.moe_layers:
        yield (
            f"{_processes(s)}: {ranks} ranks, but {model.num_experts} experts do not divide by that, and the model's "
            "family cannot place them otherwise (ModelConfig.moe_layers). Use a number of ranks that divides them."
        )


def _checkpoint(s: Settings, model: ModelConfig) -> Iterator[str]:
    if s["max_model_len"] > model.max_position_embeddings and not s["allow_long_max_model_len"]:
        yield (
            f"{s.spell('max_model_len')} is {s['max_model_len']}, but the checkpoint has "
            f"{model.max_position_embeddings} positions. Lower it, or allow it with "
            f"{s.spell('allow_long_max_model_len')}: outputs beyond may be nonsense."
        )
    if model.full_attention_length is not None and s["max_model_len"] > model.full_attention_length:
        why = beyond_full_attention(model.full_attention_length)
        yield f"{s.spell('max_model_len')} is {s['max_model_len']}, but {why}"
    if model.linear_layers and (s["speculative_eagle_topk"] or 1) > 1:
        topk = f"{s.spell('speculative_eagle_topk')} is {s['speculative_eagle_topk']}"
        yield (
            f"{topk}, but {len(model.linear_layers)} layers have linear attention, whose states cannot follow a tree. "
            "Use 1."
        )
    for name in ("moe_backend", "expert_load_out"):
        if model.num_experts == 0 and s[name] not in (None, "auto"):
            yield f"{s.spell(name)} {s[name]}: the checkpoint is a dense model. Remove it."


def _device(s: Settings, gpus: int) -> Iterator[str]:
    local = _num_processes(s) // s["nnodes"]
    if s["device"] == "cpu":
        for name, why in _ON_A_GPU.items():
            if s[name] not in (None, 0, "none"):
                instead = "Use --kv-cache-memory" if name == "gpu_memory_utilization" else "Remove it"
                yield f"{s.spell(name)} {why}, and the ranks run on a CPU. {instead}."
    elif gpus == 0:
        yield f"{s.spell('device')} cuda: there is no GPU here that torch can use. Use --device cpu."
    elif local > gpus:
        yield (
            f"{_processes(s)}: {local} processes on this machine, which has {gpus} GPUs. Use fewer, or --device cpu."
        )


_ON_A_GPU = {
    "gpu_memory_utilization": "is for GPUs",
    "cudagraph_mode": "full needs a GPU",
    **dict.fromkeys(_SIZES, "is for CUDA graphs"),
    "comm_sms": "shares out a GPU's SMs",
}


def _below(s: Settings, name: str, least: str, why: str) -> Iterator[str]:
    if s[name] < s[least]:
        yield (
            f"{s.spell(name)} is {s[name]}, below {s.spell(least)} ({s[least]}): {why}. Raise the one or lower the "
            "other."
        )


def _steps(s: Settings) -> Iterator[str]:
    if "max_num_batched_tokens" not in s.table.settings:
        return  # a command that fills its steps without the scheduler
    tokens = s["max_num_batched_tokens"]
    if s["enable_chunked_prefill"]:
        yield from _below(s, "max_num_batched_tokens", "block_size", "prompts are cut between pages")
    why = "not every running request could decode in a step"
    yield from _below(s, "max_num_batched_tokens", "max_num_seqs", why)
    if not s["enable_chunked_prefill"] and tokens < s["max_model_len"]:
        yield (
            f"{s.spell('enable_chunked_prefill')}: a prompt then runs in one step, so "
            f"{s.spell('max_num_batched_tokens')} ({tokens}) must be at least "
            f"{s.spell('max_model_len')} ({s['max_model_len']})."
        )
    yield from _mixed_steps(s)


def _mixed_steps(s: Settings) -> Iterator[str]:
    limit, name = s["max_prefill_tokens_per_mixed_step"], s.spell("max_prefill_tokens_per_mixed_step")
    if limit == "off":
        return
    if s["prefill_first"]:
        yield f"{name} has no effect with {s.spell('prefill_first')}: no step is mixed. Remove one."
    if not s["enable_chunked_prefill"]:
        yield f"{name} cuts prompts, and {s.spell('enable_chunked_prefill')} forbids that. Remove one."
    if limit == "auto":
        return
    yield from _below(s, "max_prefill_tokens_per_mixed_step", "block_size", "prompts are cut between pages")
    if limit >= s["max_num_batched_tokens"]:
        yield (
            f"{name} is {limit}, and no step has more than {s.spell('max_num_batched_tokens')} "
            f"({s['max_num_batched_tokens']}) anyway. Lower the one or raise the other."
        )


def _graph_sizes(s: Settings) -> Iterator[str]:
    for name in _SIZES:
        largest = max(s[name]) if isinstance(s[name], tuple) else s[name]
        if largest is not None and largest > s["max_num_seqs"]:
            yield (
                f"{s.spell(name)} has {largest}, above {s.spell('max_num_seqs')} ({s['max_num_seqs']}): no step has so "
                "many requests. Lower the one or raise the other."
            )


def _check_transport(s: Settings, model: ModelConfig) -> None:
    if s["all2all_backend"] is not None:
        with _behind(f"{s.spell('all2all_backend')}, {s.spell('all2all_options')}: "):
            check_all2all_options(s["all2all_backend"], s["all2all_options"] or {}, _num_processes(s))
    if model.num_experts:
        verifies = s["speculative_algorithm"] is not None
        check_schedules_by_name(overlap_config(s), s["all2all_backend"] or LOCAL, verifies=verifies)
