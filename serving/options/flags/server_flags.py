"""The table of settings: every flag with its type, its default and its help, in the groups that `--help` shows.

Names are vLLM's, or SGLang's where vLLM has none. A setting's name in the YAML file is its flag without the dashes.
A default of None is derived from other settings (source `derived`), or means that there is no value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from attention import attention_backends
from model_runner.parallel.transport import AUTO
from serving.arguments.fields import Flag, Group
from serving.options.flags.fields import (
    ExpertsName,
    NamedValues,
    Positive,
    TokensAutoOff,
    one_of,
    parse_bytes,
)
from serving.options.flags.model_flags import TRANSPORTS, TransportName
from ubatch import SCHEDULES, SplitBy
from ubatch.schedules.vote import MAX_LANES

__all__ = [
    "ALIASES",
    "Attention",
    "Cache",
    "Graphs",
    "Overlap",
    "Parallelism",
    "PerMode",
    "Scheduling",
    "Server",
    "Speculation",
]

ALIASES: Mapping[str, str] = {
    "enable_two_batch_overlap": "enable_dbo",
    "num_ubatches": "ubatch_size",
    "named_model": "model",
}
"""Alias -> setting: SGLang's names, names of `UBatchConfig`, and the flag form of a positional argument."""


def _read_link(value: Any) -> Any:
    """Turn a pair into a tuple, because YAML has only lists.

    Raises:
        ValueError: the value is no pair.
    """
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("expected two numbers, microseconds and MB/s")
    return tuple(value)


AttentionName = Annotated[str | None, Flag(default="the same"), one_of(attention_backends())]
ScheduleName = Annotated[str | None, Flag(default="--schedule")]
ModeMapping = Annotated[
    dict[str, Any] | None, Field(description="schedule, num_ubatches and token_threshold of such steps")
]


class Parallelism(Group):
    """Ranks, on one or more machines. A rank is one engine process, or with tensor parallelism several; it has a whole
    copy of the model, except the experts if they are shared."""

    data_parallel_size: Annotated[Positive, Field(description="ranks in all; each request runs on one of them")] = 1
    tensor_parallel_size: Annotated[
        Positive,
        Flag(short="-tp"),
        Field(description="processes of a rank; they share its attention heads and dense layers"),
    ] = 1
    enable_expert_parallel: Annotated[bool, Field(description="the ranks share the experts, and step together")] = False
    all2all_backend: Annotated[
        TransportName,
        Flag(default="VLLM_ALL2ALL_BACKEND, or auto"),
        Field(description=f"how tokens reach their experts: {', '.join((AUTO, *TRANSPORTS))}"),
    ] = None
    all2all_options: Annotated[
        NamedValues,
        Flag(metavar="NAME=VALUE ...", many=True, default="what --max-num-seqs and the other sizes of steps ask for"),
        Field(description="its options, such as max_tokens_per_rank=256 use_fp8=true worst_case=true"),
    ] = None
    moe_backend: ExpertsName = "auto"
    emulated_link: Annotated[
        tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]] | None,
        BeforeValidator(_read_link),
        Flag(metavar="US MB/S"),
        Field(description="deliver over a link of this latency and bandwidth"),
    ] = None
    nnodes: Annotated[Positive, Field(description="machines; they have equally many ranks")] = 1
    node_rank: Annotated[int, Field(ge=0, description="this machine; 0 serves, the others only compute")] = 0
    master_addr: Annotated[str, Field(description="where the others reach machine 0")] = "127.0.0.1"
    master_port: Annotated[
        int,
        Flag(default="a free one; with more machines choose one"),
        Field(ge=0, le=65535, description="its port for their rendezvous"),
    ] = 0
    cluster_secret_file: Annotated[
        Path | None,
        Flag(default="none"),
        Field(
            description="with more machines: file of at least 32 random bytes, the same on each and readable by its "
            "owner only (umask 077; openssl rand -hex 32 > FILE); authenticates and encrypts messages between "
            "machines, and signs what they write to the rendezvous store. The store itself, gloo and NCCL cannot "
            "authenticate: their network must be private"
        ),
    ] = None


class Overlap(Group):
    """When and how a step runs as two or more microbatches, one computing while the other's tokens travel."""

    enable_dbo: Annotated[bool, Field(description="overlap microbatches")] = False
    enable_two_batch_overlap: Annotated[bool, Field(description="SGLang's name of --enable-dbo")] = False
    dbo_auto: Annotated[
        bool,
        Field(description="measure when overlap pays, at the start (modes without a threshold) and while serving"),
    ] = False
    ubatch_size: Annotated[int, Field(ge=2, le=MAX_LANES, description=f"microbatches, 2 to {MAX_LANES}")] = 2
    dbo_decode_token_threshold: Annotated[int, Field(description="fewest tokens of a decode step that overlaps")] = 32
    dbo_prefill_token_threshold: Annotated[int, Field(description="fewest tokens of a step with a prefill")] = 512
    schedule: Annotated[str, Field(description=f"of the lanes: {', '.join(SCHEDULES)}, or one of the file's")] = (
        "mlp_shared_overlap"
    )
    schedule_decode: Annotated[ScheduleName, Field(description="another one for decode steps")] = None
    schedule_prefill: Annotated[ScheduleName, Field(description="another one for steps with a prefill")] = None
    schedule_verify: Annotated[ScheduleName, Field(description="another one for steps that verify drafts")] = None
    comm_sms: Annotated[
        int | None,
        Flag(default="the schedule's"),
        Field(
            ge=0, description="a GPU's streaming multiprocessors left to communication kernels; 0 shares all of them"
        ),
    ] = None
    split_by: Annotated[
        str, one_of(SplitBy), Field(description="what lanes with prefills share equally: tokens, or cost")
    ] = SplitBy.TOKENS.value
    tbo_token_distribution_threshold: Annotated[
        float,
        Field(
            ge=0,
            le=0.5,
            description="cut inside a request if a lane would get a smaller share than this; 0 never, 0.5 always",
        ),
    ] = 0.48
    timeout_s: Annotated[float, Field(gt=0, description="seconds after which a lane or a rank counts as hung")] = 60.0
    profile_ranges: Annotated[
        bool, Field(description="show the lanes' stages as ranges in torch.profiler and NVTX (Nsight Systems)")
    ] = False
    enable_single_batch_overlap: Annotated[
        bool,
        Field(
            description="overlap inside a batch: experts in two chunks, each with its own dispatch and combine; with "
            "--enable-dbo, inside each microbatch. --schedule single_batch_signalled sends what blocks of experts have "
            "completed instead: over torch_dist, on a CPU, or host_loopback_batched"
        ),
    ] = False


class PerMode(Group):
    """Settings that only a file can have: settings of one mode, and schedules of your own."""

    schedules: Annotated[
        dict[str, dict[str, Any]] | None, Field(description="name -> lanes, chunks, lead, points_off, ...")
    ] = None
    decode: ModeMapping = None
    prefill: ModeMapping = None
    verify: ModeMapping = None


class Cache(Group):
    """Keys and values of the requests, in pages."""

    block_size: Annotated[Positive, Field(description="tokens per page")] = 16
    kv_cache_memory: Annotated[
        int | str | None,
        AfterValidator(parse_bytes),
        Flag(metavar="BYTES", default="256M on a CPU"),
        Field(description="memory of a rank's cache, like 512M or 4G"),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Flag(default="0.9 on a GPU"),
        Field(gt=0, le=1, description="share of the GPU's memory that a rank may use, weights included"),
    ] = None
    kv_cache_dtype: Annotated[Literal["auto", "fp8"], Field(description="fp8 stores one byte a number")] = "auto"
    enable_prefix_caching: Annotated[bool, Field(description="keep pages for requests that begin alike")] = True


class Scheduling(Group):
    """Which requests run in a step."""

    max_num_seqs: Annotated[
        Positive | None, Flag(default="256"), Field(description="most requests of a rank that run at once")
    ] = None
    max_num_batched_tokens: Annotated[
        Positive | None, Flag(default="2048"), Field(description="most tokens of a rank's step")
    ] = None
    enable_chunked_prefill: Annotated[bool, Field(description="prompts may run in chunks, beside decodes")] = True
    max_prefill_tokens_per_mixed_step: Annotated[
        TokensAutoOff,
        Flag(metavar="INT|auto|off"),
        Field(
            description="most prompt tokens in a rank's step while requests decode, on this rank or on one that steps "
            "with it; auto follows step times, so that such a step takes about twice as long as decodes alone"
        ),
    ] = "off"
    scheduling_policy: Annotated[
        Literal["fcfs", "lpm", "priority"],
        Field(description="order of waiting requests: by arrival, longest cached prefix, or the request's priority"),
    ] = "fcfs"
    prefill_first: Annotated[bool, Field(description="a step is prefills or decodes, prefills first; else mixed")] = (
        False
    )
    overlap_schedule: Annotated[
        bool,
        Flag(default="on a GPU, without speculation"),
        Field(description="schedule the next step while this one runs"),
    ] = False


class Attention(Group):
    """Back ends that compute attention."""

    attention_backend: Annotated[
        str, one_of(attention_backends()), Field(description=f"one of {', '.join(attention_backends())}")
    ] = "auto"
    prefill_attention_backend: Annotated[AttentionName, Field(description="another one for prefills")] = None
    decode_attention_backend: Annotated[AttentionName, Field(description="another one for decodes")] = None


class Graphs(Group):
    """CUDA graphs: decode, verify and draft steps are captured at the start, and replayed with one launch."""

    cudagraph_mode: Annotated[
        Literal["auto", "none", "full"],
        Field(description="full captures whole steps; auto does so on a GPU, where all back ends can be captured"),
    ] = "auto"
    cudagraph_capture_sizes: Annotated[
        Annotated[tuple[Positive, ...], Field(min_length=1)] | None,
        BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
        Flag(default="1 2 4 8 16 ... 256 272 ..., up to --max-num-seqs"),
        Field(description="requests of the steps that are captured; others are padded to the next"),
    ] = None
    max_cudagraph_capture_size: Annotated[
        Positive | None,
        Flag(default="--max-num-seqs, at most 512"),
        Field(description="largest of them; larger steps run eagerly"),
    ] = None
    enforce_eager: Annotated[bool, Field(description="capture nothing, as --cudagraph-mode none")] = False


class Server(Group):
    """The HTTP server."""

    host: Annotated[str, Field(min_length=1, description="address to listen on; 0.0.0.0 is every one")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="0 picks a free one, and prints it")] = 8000
    api_key: Annotated[
        str | None,
        Flag(default="none"),
        Field(min_length=1, description="clients must send it; better set in UBATCH_API_KEY, which ps does not show"),
    ] = None
    served_model_name: Annotated[
        str | None, Flag(default="MODEL"), Field(min_length=1, description="what clients call the model")
    ] = None
    max_waiting_requests: Annotated[
        int | None,
        Flag(default="no limit"),
        Field(ge=1, description="requests beyond this many waiting ones get 503 and Retry-After"),
    ] = None
    max_request_bytes: Annotated[
        int | str,
        AfterValidator(parse_bytes),
        Flag(metavar="BYTES", default="8M"),
        Field(description="a larger body gets 413"),
    ] = 8 * 2**20
    max_outputs_per_request: Annotated[
        Positive, Field(description="most outputs of one body, prompts times n; more get 400")
    ] = 1024
    max_connections: Annotated[
        int | None,
        Flag(default="what the limit of open files allows"),
        Field(ge=1, description="requests on connections beyond this many open ones get 503 and Retry-After"),
    ] = None
    drain_timeout_s: Annotated[
        float, Field(ge=0, description="after SIGTERM, seconds until requests that still run are cut off")
    ] = 120.0
    profile_dir: Annotated[
        Path | None,
        Flag(default="none"),
        Field(description="folder for what /start_profile records, which is refused without it"),
    ] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Field(description="lowest level logged")] = (
        "info"
    )
    access_log: Annotated[bool, Field(description="log every HTTP request")] = False
    enable_log_requests: Annotated[
        bool, Field(description="log each request's parameters; with --log-level debug also the prompt's tokens")
    ] = False
    max_log_len: Annotated[
        int | None, Flag(default="no limit"), Field(ge=0, description="tokens of a prompt that are logged at most")
    ] = None
    enable_request_id_headers: Annotated[
        bool, Field(description="return every request's id in the X-Request-Id header: the client's, or a new one")
    ] = True


class Speculation(Group):
    """Guess tokens ahead, and verify them in one step."""

    speculative_algorithm: Annotated[
        Literal["ngram", "eagle", "mtp", "draft_model"] | None,
        Field(
            description="source of guesses: what followed the same tokens earlier, a trained head, the checkpoint's "
            "own multi-token-prediction layer, or a small model"
        ),
    ] = None
    speculative_draft_model_path: Annotated[
        Path | None,
        Flag(default="none"),
        Field(description="eagle, draft_model: the head's or the small model's checkpoint, folder or name on the hub"),
    ] = None
    speculative_num_steps: Annotated[
        Positive | None,
        Flag(default="3, or the drafts"),
        Field(description="steps of the draft network: tokens of the longest guess"),
    ] = None
    speculative_eagle_topk: Annotated[
        Positive | None,
        Flag(default="1"),
        Field(description="guesses that each draft step continues from; above 1 the drafts are a tree"),
    ] = None
    speculative_num_draft_tokens: Annotated[
        Positive | None,
        Flag(default="4 with ngram, the steps, or 8 of a tree"),
        Field(description="tokens guessed per request and step; SGLang counts one more, the last known token"),
    ] = None
    speculative_accept: Annotated[
        Literal["match", "rejection"] | None,
        Flag(default="match"),
        Field(description="a draft is right if it is the token sampled there, or by rejection sampling"),
    ] = None
    speculative_ngram_max: Annotated[
        Positive | None, Flag(default="4"), Field(description="ngram: longest run of tokens looked up")
    ] = None
    speculative_ngram_min: Annotated[
        Positive | None, Flag(default="2"), Field(description="ngram: shortest run of tokens looked up")
    ] = None
