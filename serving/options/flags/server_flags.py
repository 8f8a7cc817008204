"""The table of settings: every flag with its type, its default and its help, in the groups that `--help` shows.

Names are vLLM's, or SGLang's where vLLM has none. A setting's name in the YAML file is its flag without the dashes.
A default of None is derived from other settings (source `derived`), or means that there is no value.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from attention import attention_backends
from model_runner import DEFAULT_KV_CACHE_MEMORY, MAX_TOP_LOGPROBS
from model_runner.parallel import AUTO
from moe.balance import PARTS, WINDOW_SIZE, part_steps
from serving.arguments.fields import Flag, Group
from serving.balance.load_book import KEEP
from serving.engine.options import RestartLimits
from serving.engine.speculation import SpeculationConfig
from serving.options.flags.fields import (
    FROM_LIST,
    TRANSPORTS,
    ApiKey,
    Balance,
    ExpertsName,
    JsonMapping,
    NamedValues,
    Names,
    Positive,
    TokensAutoOff,
    TransportName,
    Words,
    also,
    one_of,
    parse_bytes,
)
from serving.scheduler import SchedulerConfig
from ubatch import SCHEDULES, SplitBy, UBatchConfig
from ubatch.schedules import MAX_LANES

GPU_MEMORY_UTILIZATION = 0.9
MAX_ENGINE_RESTARTS = 3
NGRAM_DRAFTS, DRAFT_STEPS, TREE_DRAFTS = 4, 3, 8
"""Values of settings that nobody gave; `--help` names them."""
ALIASES: Mapping[str, str] = {
    "enable_two_batch_overlap": "enable_dbo",
    "num_ubatches": "ubatch_size",
    "named_model": "model",
    "base_url": "url",
}
"""Alias -> setting: SGLang's names, names of `UBatchConfig`, the flag form of a positional argument, and the name that
vLLM's benchmarks have for a server."""


def _read_link(value: Any) -> Any:
    """Turn a pair into a tuple, because YAML has only lists."""
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

    data_parallel_size: Annotated[Positive, Flag(alias="-dp")] = Field(
        1, description="ranks in all; each request runs on one of them"
    )
    tensor_parallel_size: Annotated[Positive, Flag(alias="-tp")] = Field(
        1, description="processes of a rank; they share its attention heads and dense layers"
    )
    enable_expert_parallel: Annotated[bool, Flag(alias="-ep")] = Field(
        False, description="the ranks share the experts, and step together"
    )
    all2all_backend: Annotated[TransportName, Flag(default="VLLM_ALL2ALL_BACKEND, or auto")] = Field(
        None, description=f"how tokens reach their experts: {', '.join((AUTO, *TRANSPORTS))}"
    )
    all2all_options: Annotated[
        NamedValues,
        Flag(metavar="NAME=VALUE ...", many=True, default="what --max-num-seqs and the other sizes of steps ask for"),
    ] = Field(None, description="its options, such as max_tokens_per_rank=256 use_fp8=true worst_case=true")
    moe_backend: ExpertsName = "auto"
    enable_eplb: bool = Field(
        False,
        description="experts move between the ranks while they serve, beside the steps, so that the ranks have equal "
        "loads",
    )
    eplb_config: Annotated[Balance, Flag(metavar="JSON", default="none", adds=True, dotted=True)] = Field(
        None,
        description="how the ranks' load of experts is balanced, or --eplb-config.KEY VALUE for each: "
        "num_redundant_experts, slots beyond one for every expert; window_size, steps whose load is looked at; and "
        "with --enable-eplb step_interval, steps from one plan to the next; balancedness_fall, by how much "
        "balancedness falls for a plan before (0: never); move_bytes_per_step, most bytes that a rank sends in a step; "
        "move_checksums; log_balancedness, and log_balancedness_interval, in steps",
    )
    init_expert_location: Annotated[
        str | None, Flag(metavar="FILE|trivial", default="trivial: in the order of their ids")
    ] = Field(None, min_length=1, description="YAML or JSON file with the expert in each slot of every MoE layer")
    emulated_link: Annotated[
        tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]] | None,
        BeforeValidator(_read_link),
        Flag(metavar="US MB/S"),
    ] = Field(None, description="deliver over a link of this latency and bandwidth")
    nnodes: Annotated[Positive, Flag(alias="-n")] = Field(1, description="machines; they have equally many ranks")
    node_rank: Annotated[int, Flag(alias="-r")] = Field(
        0, ge=0, description="this machine; 0 serves or writes, the others only compute"
    )
    master_addr: str = Field("127.0.0.1", description="where the others reach machine 0")
    master_port: Annotated[int, Flag(default="a free one; with more machines choose one")] = Field(
        0, ge=0, le=65535, description="its port for their rendezvous"
    )
    cluster_secret_file: Annotated[Path | None, Flag(default="none")] = Field(
        None,
        description="with more machines: file of at least 32 random bytes, the same on each and readable by its "
        "owner only (umask 077; openssl rand -hex 32 > FILE); authenticates and encrypts messages between "
        "machines, and signs what they write to the rendezvous store. The store itself, gloo and NCCL cannot "
        "authenticate: their network must be private",
    )


class Overlap(Group):
    """When and how a step runs as two or more microbatches, one computing while the other's tokens travel."""

    enable_dbo: bool = Field(
        False, description="overlap microbatches: from a given threshold on, else where steps show a gain"
    )
    enable_two_batch_overlap: bool = Field(False, description="SGLang's name of --enable-dbo")
    dbo_auto: bool = Field(False, description="deprecated, without effect: --enable-dbo decides so without it")
    ubatch_size: int = Field(
        UBatchConfig.num_ubatches, ge=2, le=MAX_LANES, description=f"microbatches, 2 to {MAX_LANES}"
    )
    dbo_decode_token_threshold: Annotated[int, Flag(default="measured")] = Field(
        UBatchConfig.dbo_decode_token_threshold, description="overlap decode steps from so many tokens on"
    )
    dbo_prefill_token_threshold: Annotated[int, Flag(default="measured")] = Field(
        UBatchConfig.dbo_prefill_token_threshold, description="overlap steps with a prefill from so many tokens on"
    )
    schedule: str = Field(
        str(UBatchConfig.schedule), description=f"of the lanes: {', '.join(SCHEDULES)}, or one of the file's"
    )
    schedule_decode: ScheduleName = Field(None, description="another one for decode steps")
    schedule_prefill: ScheduleName = Field(None, description="another one for steps with a prefill")
    schedule_verify: ScheduleName = Field(None, description="another one for steps that verify drafts")
    comm_sms: Annotated[int | None, Flag(default="the schedule's")] = Field(
        None, ge=0, description="a GPU's streaming multiprocessors left to communication kernels; 0 shares all of them"
    )
    split_by: Annotated[str, one_of(SplitBy)] = Field(
        UBatchConfig.split_by, description="what lanes with prefills share equally: tokens, or cost"
    )
    tbo_token_distribution_threshold: float = Field(
        UBatchConfig.tbo_token_distribution_threshold,
        ge=0,
        le=0.5,
        description="cut inside a request if a lane would get a smaller share than this; 0 never, 0.5 always",
    )
    timeout_s: float = Field(
        UBatchConfig.timeout_s, gt=0, description="seconds after which a lane or a rank counts as hung"
    )
    profile_ranges: bool = Field(
        False, description="show the lanes' stages as ranges in torch.profiler and NVTX (Nsight Systems)"
    )
    enable_single_batch_overlap: bool = Field(
        False,
        description="overlap inside a batch: experts in two chunks, each with its own dispatch and combine; with "
        "--enable-dbo, inside each microbatch. --schedule single_batch_signalled sends what blocks of experts have "
        "completed instead: over torch_dist, on a CPU, or host_loopback_batched",
    )


class PerMode(Group):
    """Settings that only a file can have: settings of one mode, and schedules of your own."""

    schedules: dict[str, dict[str, Any]] | None = Field(
        None, description="name -> lanes, chunks, lead, points_off, ..."
    )
    decode: ModeMapping = None
    prefill: ModeMapping = None
    verify: ModeMapping = None


class Cache(Group):
    """Keys and values of the requests, in pages."""

    block_size: Positive = Field(16, description="tokens per page")
    kv_cache_memory: Annotated[
        int | str | None,
        AfterValidator(parse_bytes),
        Flag(metavar="BYTES", default=f"{DEFAULT_KV_CACHE_MEMORY >> 20}M on a CPU"),
    ] = Field(None, description="memory of a rank's cache, like 512M or 4G")
    gpu_memory_utilization: Annotated[float | None, Flag(default=f"{GPU_MEMORY_UTILIZATION} on a GPU")] = Field(
        None, gt=0, le=1, description="share of the GPU's memory that a rank may use, weights included"
    )
    kv_cache_dtype: Annotated[Literal["auto", "fp8"], also(fp8_e4m3="fp8")] = Field(
        "auto", description="fp8 stores one byte a number"
    )
    enable_prefix_caching: bool = Field(True, description="keep pages for requests that begin alike")
    num_state_snapshots: int = Field(
        64,
        ge=0,
        description="recurrent states kept for requests that begin alike, by a model with linear attention; each as "
        "large as those of a running request; 0 turns the prefix cache off for such a model",
    )


class Scheduling(Group):
    """Which requests run in a step."""

    max_num_seqs: Annotated[Positive | None, Flag(default=str(SchedulerConfig.max_num_seqs))] = Field(
        None, description="most requests of a rank that run at once"
    )
    max_num_batched_tokens: Annotated[Positive | None, Flag(default=str(SchedulerConfig.max_num_batched_tokens))] = (
        Field(None, description="most tokens of a rank's step")
    )
    enable_chunked_prefill: bool = Field(True, description="prompts may run in chunks, together with decodes")
    max_prefill_tokens_per_mixed_step: Annotated[TokensAutoOff, Flag(metavar="INT|auto|off")] = Field(
        "off",
        description="most prompt tokens in a rank's step while requests decode, on this rank or on one that steps "
        "with it; auto follows step times, so that such a step takes about twice as long as decodes alone",
    )
    scheduling_policy: Literal["fcfs", "lpm", "priority"] = Field(
        "fcfs", description="order of waiting requests: by arrival, longest cached prefix, or the request's priority"
    )
    prefill_first: bool = Field(False, description="a step is prefills or decodes, prefills first; else mixed")
    overlap_schedule: Annotated[bool, Flag(default="on a GPU, without speculation")] = Field(
        False, description="schedule the next step while this one runs"
    )


class Attention(Group):
    """Back ends that compute attention."""

    attention_backend: Annotated[str, one_of(attention_backends())] = Field(
        "auto", description=f"one of {', '.join(attention_backends())}"
    )
    prefill_attention_backend: AttentionName = Field(None, description="another one for prefills")
    decode_attention_backend: AttentionName = Field(None, description="another one for decodes")


class Graphs(Group):
    """CUDA graphs: decode, verify and draft steps are captured at the start, and replayed with one launch."""

    cudagraph_mode: Literal["auto", "none", "full"] = Field(
        "auto", description="full captures whole steps; auto does so on a GPU, where all back ends can be captured"
    )
    cudagraph_capture_sizes: Annotated[
        Annotated[tuple[Positive, ...], Field(min_length=1)] | None,
        FROM_LIST,
        Flag(default="1 2 4 8 16 ... 256 272 ..., up to --max-num-seqs"),
    ] = Field(None, description="requests of the steps that are captured; others are padded to the next")
    max_cudagraph_capture_size: Annotated[Positive | None, Flag(default="--max-num-seqs, at most 512")] = Field(
        None, description="largest of them; larger steps run eagerly"
    )
    enforce_eager: bool = Field(False, description="capture nothing, as --cudagraph-mode none")


class Experts(Group):
    """Which rank computes which experts, and their load: `/metrics` has it without any of these."""

    expert_load_out: Annotated[Path | None, Flag(metavar="FILE", default="none")] = Field(
        None,
        description="write the load of every expert to this .npy or .json, now and then and at the end: "
        f"[{PARTS * KEEP} parts, layers, experts], each part {part_steps(WINDOW_SIZE)} steps; machine 0 writes it",
    )


class Restarts(Group):
    """Engines that have failed are started again, and their requests go on."""

    max_engine_restarts: Annotated[int | None, Flag(default=f"{MAX_ENGINE_RESTARTS} of a server, else 0")] = Field(
        None, ge=0, description="most restarts in a time; one more failure ends the command, and with 0 the first one"
    )
    engine_restart_window_s: float = Field(
        RestartLimits.engine_restart_window_s, gt=0, description="that time, in seconds"
    )


class Server(Group):
    """The HTTP server."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 is every one")
    port: int = Field(8000, ge=0, le=65535, description="0 picks a free one, and prints it")
    api_key: Annotated[ApiKey, Flag(default="none", secret=True)] = Field(
        None, min_length=1, description="clients must send it; better set in UBATCH_API_KEY, which ps does not show"
    )
    served_model_name: Annotated[Names, Flag(metavar="NAME", default="MODEL", adds=True)] = Field(
        None, description="what clients call the model; given again, one more name for it. Metrics have the first"
    )
    max_waiting_requests: Annotated[int | None, Flag(default="no limit")] = Field(
        None, ge=1, description="requests beyond this many waiting ones get 503 and Retry-After"
    )
    max_request_bytes: Annotated[int | str, AfterValidator(parse_bytes), Flag(metavar="BYTES", default="8M")] = Field(
        8 * 2**20, description="a larger body gets 413"
    )
    max_outputs_per_request: Positive = Field(
        1024, description="most outputs of one body, prompts times n; more get 400"
    )
    max_connections: Annotated[int | None, Flag(default="what the limit of open files allows")] = Field(
        None, ge=1, description="requests on connections beyond this many open ones get 503 and Retry-After"
    )
    drain_timeout_s: float = Field(
        120.0, ge=0, description="after SIGTERM, seconds until requests that still run are cut off"
    )
    resume_timeout_s: float = Field(
        RestartLimits.resume_timeout_s,
        ge=0,
        description="seconds that a new request waits for engines that are started again; then it gets 503 and "
        "Retry-After",
    )
    profile_dir: Annotated[Path | None, Flag(default="none")] = Field(
        None, description="folder for what /start_profile records, which is refused without it"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level logged")
    access_log: bool = Field(False, description="log every HTTP request")
    enable_log_requests: bool = Field(
        False, description="log each request's parameters; with --log-level debug also the prompt's tokens"
    )
    max_log_len: Annotated[int | None, Flag(default="no limit")] = Field(
        None, ge=0, description="tokens of a prompt that are logged at most"
    )
    enable_request_id_headers: bool = Field(
        True, description="return every request's id in the X-Request-Id header: the client's, or a new one"
    )
    root_path: Annotated[str | None, Flag(default="none")] = Field(
        None, pattern="^/.*[^/]$", description="path in front of all others, where a proxy puts the server"
    )
    disable_fastapi_docs: bool = Field(False, description="do not serve /docs, /redoc and /openapi.json")
    allowed_origins: Annotated[Words, Flag(metavar="ORIGIN ...", default="none")] = Field(
        None, description="sites whose pages may call the server from a browser (CORS); '*' is every one"
    )
    allowed_methods: Annotated[Words, Flag(metavar="METHOD ...", default="all")] = Field(
        None, description="with --allowed-origins: methods of such calls"
    )
    allowed_headers: Annotated[Words, Flag(metavar="HEADER ...", default="all")] = Field(
        None, description="with --allowed-origins: headers of such calls"
    )
    allow_credentials: bool = Field(False, description="with --allowed-origins: browsers may send cookies")
    max_logprobs: int = Field(
        20, ge=0, le=MAX_TOP_LOGPROBS, description="most likely tokens that a request may ask for at each position"
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="logprobs name tokens as `token_id:5`, unless a request says otherwise"
    )
    enable_force_include_usage: bool = Field(False, description="end every stream with the token usage, asked or not")
    response_role: str = Field("assistant", min_length=1, description="role of a chat's answers")
    chat_template: Annotated[str | None, Flag(metavar="FILE", default="the checkpoint's")] = Field(
        None, description="file of another chat template, or the template itself"
    )
    default_chat_template_kwargs: Annotated[JsonMapping, Flag(metavar="JSON", default="none")] = Field(
        None, description='variables of the chat template that requests may override, like {"enable_thinking": false}'
    )
    generation_config: Annotated[str, Flag(metavar="auto|vllm|FOLDER")] = Field(
        "auto",
        min_length=1,
        description="whose generation_config.json has the defaults of requests: the checkpoint's, no one's (OpenAI's "
        "defaults), or a folder's",
    )
    override_generation_config: Annotated[JsonMapping, Flag(metavar="JSON", default="none")] = Field(
        None, description='defaults of requests that go before those, like {"temperature": 0.5}'
    )
    seed: Annotated[int | None, Flag(default="none")] = Field(
        None, description="requests without a seed get theirs from this one, in the order of their arrival"
    )


class Speculation(Group):
    """Guess tokens ahead, and verify them in one step."""

    speculative_algorithm: Literal["ngram", "eagle", "mtp", "draft_model"] | None = Field(
        None,
        description="source of guesses: what followed the same tokens earlier, a trained head, the checkpoint's "
        "own multi-token-prediction layer, or a small model",
    )
    speculative_draft_model_path: Annotated[Path | None, Flag(default="none")] = Field(
        None, description="eagle, draft_model: the head's or the small model's checkpoint, folder or name on the hub"
    )
    speculative_num_steps: Annotated[Positive | None, Flag(default=f"{DRAFT_STEPS}, or the drafts")] = Field(
        None, description="steps of the draft network: tokens of the longest guess"
    )
    speculative_eagle_topk: Annotated[Positive | None, Flag(default="1")] = Field(
        None, description="guesses that each draft step continues from; above 1 the drafts are a tree"
    )
    speculative_num_draft_tokens: Annotated[
        Positive | None, Flag(default=f"{NGRAM_DRAFTS} with ngram, the steps, or {TREE_DRAFTS} of a tree")
    ] = Field(None, description="tokens guessed per request and step; SGLang counts one more, the last known token")
    speculative_accept: Annotated[Literal["match", "rejection"] | None, Flag(default="match")] = Field(
        None, description="a draft is right if it is the token sampled there, or by rejection sampling"
    )
    speculative_ngram_max: Annotated[Positive | None, Flag(default=str(SpeculationConfig.ngram_max))] = Field(
        None, description="ngram: longest run of tokens looked up"
    )
    speculative_ngram_min: Annotated[Positive | None, Flag(default=str(SpeculationConfig.ngram_min))] = Field(
        None, description="ngram: shortest run of tokens looked up"
    )
