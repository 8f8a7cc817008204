"""The settings of the commands other than `serve`: those they share with `serve`, and their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from serving.arguments.fields import Flag, Group
from serving.options.flags.fields import ApiKey, Positive
from serving.options.flags.model_flags import Model
from serving.options.flags.server_flags import Attention, Cache, Parallelism, PerMode
from serving.options.flags.tables import SERVE, Table, pick
from ubatch.schedules import MAX_LANES

Mode = Literal["decode", "prefill", "verify"]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # YAML has no tuples


class Prompts(Group):
    """The prompts, and how tokens are sampled."""

    prompt: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = Field((), description="one or more prompts")
    max_tokens: Positive = Field(64, description="tokens to generate per prompt")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    top_k: int = Field(0, ge=0, description="sample from the k likeliest tokens; 0 for all")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the likeliest tokens of this mass")
    seed: int | None = Field(None, description="seed of the first prompt; prompt i gets seed + i")


class Source(Group):
    """What to look at, and where to write."""

    url: Annotated[str | None, Flag(alias="--base-url")] = Field(
        None, description="record a running server, such as http://127.0.0.1:8000"
    )
    seconds: float = Field(5.0, gt=0, description="with --url: how long; send requests meanwhile")
    api_key: Annotated[ApiKey, Flag(secret=True)] = Field(
        None, min_length=1, description="with --url: sent as a bearer token; better use UBATCH_API_KEY"
    )
    files: Annotated[tuple[Path, ...], BeforeValidator(_as_tuple), Flag(metavar="FILE [FILE ...]")] = Field(
        (), description="show what /stop_profile wrote earlier or elsewhere, one file per rank"
    )
    serial: Annotated[tuple[Path, ...], BeforeValidator(_as_tuple), Flag(metavar="FILE [FILE ...]")] = Field(
        (), description="trace.json of a run without overlap, to compare with; a run here measures one itself"
    )
    expert_loads: Annotated[Path | None, Flag(metavar="FILE")] = Field(
        None, description="show the experts' load of --expert-load-out, or of another [steps, layers, experts] array"
    )
    ranks: Positive | None = Field(None, description="with --expert-loads: ranks that share the experts")
    expert_placement: Annotated[Path | None, Flag(metavar="FILE")] = Field(
        None,
        description="with --expert-loads: where the experts are, in place of --ranks; else in the order of their ids",
    )
    out: Path = Field(
        Path("trace"),
        description="folder for trace.json, trace.html and summary.json; with --expert-loads for experts.html and .svg",
    )


def _check_lanes(lanes: tuple[int, ...]) -> tuple[int, ...]:
    if min(lanes) < 2 or max(lanes) > MAX_LANES or len(set(lanes)) < len(lanes):
        raise ValueError(f"expected different numbers from 2 to {MAX_LANES}")
    return tuple(sorted(lanes))


class Measurement(Group):
    """What to measure, and where to write the best settings."""

    out: Path = Field(Path("dbo.yaml"), description="YAML file to write; .html and .png next to it")
    data_parallel_size: Positive = Field(2, description="ranks in all; they share the experts")
    modes: Annotated[
        Annotated[tuple[Mode, ...], Field(min_length=1)],
        BeforeValidator(_as_tuple),
        AfterValidator(lambda modes: tuple(dict.fromkeys(modes))),
    ] = Field(("decode", "prefill", "verify"), description="kinds of steps")
    lanes: Annotated[
        Annotated[tuple[int, ...], Field(min_length=1)], BeforeValidator(_as_tuple), AfterValidator(_check_lanes)
    ] = Field((2, 3, 4), description="numbers of lanes to try")
    search_best: int = Field(
        2, ge=0, description="schedules that the simulator may propose for each mode, in addition to the named ones"
    )
    max_decode_tokens: int = Field(256, ge=8, description="requests of the largest decode step of a rank")
    max_prefill_tokens: int = Field(2048, ge=16, description="tokens of the largest prefill step of a rank")
    context: Positive = Field(64, description="tokens that a decoding request has in the cache")
    prompt_len: Positive = Field(128, description="tokens of a prompt")
    draft_tokens: Positive = Field(3, description="drafts of a request in verify steps")
    rounds: Positive = Field(9, description="most times that every arm is measured at every size")
    max_seconds: float = Field(240.0, gt=0, description="stop before the next size after these; finish the first round")


_EXCHANGE = ("all2all_backend", "all2all_options", "moe_backend", "emulated_link")
_MACHINES = ("nnodes", "node_rank", "master_addr", "master_port", "cluster_secret_file")
_OFFLINE: Mapping[str, type[Group]] = {
    "model": Model,
    "prompts": Prompts,
    **{title: group for title, group in SERVE.groups.items() if title not in ("model", "server", "turns")},
}
_QUIET = {"log_level": "warning"}

GENERATE = Table("ubatch generate", _OFFLINE, file_only=PerMode, implied=_QUIET)
TRACE = Table("ubatch trace", {"source": Source, **_OFFLINE}, file_only=PerMode, implied=_QUIET)
TUNE = Table(
    "ubatch tune",
    {
        "model": pick(
            Model,
            *("model", "named_model", "revision", "download_dir", "load_format", "trust_remote_code"),
            *("dtype", "device"),
        ),
        "measurement": Measurement,
        "parallelism": pick(Parallelism, "tensor_parallel_size", *_EXCHANGE, *_MACHINES),
        "attention": pick(Attention, "attention_backend"),
        "cache": pick(Cache, "block_size"),
    },
    implied={"enable_expert_parallel": True, **_QUIET},
)
COMMANDS = (SERVE, GENERATE, TRACE, TUNE)
