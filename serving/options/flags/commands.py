"""The settings of the commands other than `serve`: those they share with `serve`, and their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from serving.arguments.fields import Flag, Group
from serving.options.flags.fields import Positive
from serving.options.flags.model_flags import Model
from serving.options.flags.server_flags import (
    Attention,
    Cache,
    Parallelism,
    PerMode,
)
from serving.options.flags.tables import SERVE, Table, pick
from ubatch.schedules.vote import MAX_LANES

__all__ = ["COMMANDS", "GENERATE", "TRACE", "TUNE", "Mode"]

Mode = Literal["decode", "prefill", "verify"]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # YAML has no tuples


class Prompts(Group):
    """The prompts, and how tokens are sampled."""

    prompt: Annotated[
        tuple[str, ...],
        BeforeValidator(_as_tuple),
        Field(description="one or more prompts"),
    ] = ()
    max_tokens: Annotated[Positive, Field(description="tokens to generate per prompt")] = 64
    temperature: Annotated[float, Field(ge=0, description="0 is greedy")] = 0.0
    top_k: Annotated[int, Field(ge=0, description="sample from the k likeliest tokens; 0 for all")] = 0
    top_p: Annotated[float, Field(gt=0, le=1, description="sample from the likeliest tokens of this mass")] = 1.0
    seed: Annotated[int | None, Field(description="seed of the first prompt; prompt i gets seed + i")] = None


class Source(Group):
    """What to look at, and where to write."""

    url: Annotated[str | None, Field(description="record a running server, such as http://127.0.0.1:8000")] = None
    seconds: Annotated[float, Field(gt=0, description="with --url: how long; send requests meanwhile")] = 5.0
    api_key: Annotated[
        str | None, Field(min_length=1, description="with --url: sent as a bearer token; better use UBATCH_API_KEY")
    ] = None
    files: Annotated[
        tuple[Path, ...],
        BeforeValidator(_as_tuple),
        Flag(metavar="FILE [FILE ...]"),
        Field(description="show what /stop_profile wrote earlier or elsewhere, one file per rank"),
    ] = ()
    out: Annotated[Path, Field(description="folder for trace.json, trace.html and summary.json")] = Path("trace")


def _check_lanes(lanes: tuple[int, ...]) -> tuple[int, ...]:
    if min(lanes) < 2 or max(lanes) > MAX_LANES or len(set(lanes)) < len(lanes):
        raise ValueError(f"expected different numbers from 2 to {MAX_LANES}")
    return tuple(sorted(lanes))


class Measurement(Group):
    """What to measure, and where to write the best settings."""

    out: Annotated[Path, Field(description="YAML file to write; .html and .png beside it")] = Path("dbo.yaml")
    data_parallel_size: Annotated[int, Field(ge=2, description="ranks; they share the experts")] = 2
    modes: Annotated[
        Annotated[tuple[Mode, ...], Field(min_length=1)],
        BeforeValidator(_as_tuple),
        AfterValidator(lambda modes: tuple(dict.fromkeys(modes))),
        Field(description="kinds of steps"),
    ] = ("decode", "prefill", "verify")
    lanes: Annotated[
        Annotated[tuple[int, ...], Field(min_length=1)],
        BeforeValidator(_as_tuple),
        AfterValidator(_check_lanes),
        Field(description="numbers of lanes to try"),
    ] = (2, 3, 4)
    search_best: Annotated[
        int, Field(ge=0, description="schedules that the simulator may propose for each mode, beside the named ones")
    ] = 2
    max_decode_tokens: Annotated[int, Field(ge=8, description="requests of the largest decode step of a rank")] = 256
    max_prefill_tokens: Annotated[int, Field(ge=16, description="tokens of the largest prefill step of a rank")] = 2048
    context: Annotated[Positive, Field(description="tokens that a decoding request has in the cache")] = 64
    prompt_len: Annotated[Positive, Field(description="tokens of a prompt")] = 128
    draft_tokens: Annotated[Positive, Field(description="drafts of a request in verify steps")] = 3
    rounds: Annotated[Positive, Field(description="most times that every arm is measured at every size")] = 9
    max_seconds: Annotated[float, Field(gt=0, description="stop after the first round that ends later than this")] = (
        240.0
    )


_EXCHANGE = ("all2all_backend", "all2all_options", "moe_backend", "emulated_link")
_OFFLINE: Mapping[str, type[Group]] = {
    "model": Model,
    "prompts": Prompts,
    **{title: group for title, group in SERVE.groups.items() if title not in ("model", "server")},
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
        "parallelism": pick(Parallelism, *_EXCHANGE),
        "attention": pick(Attention, "attention_backend"),
        "cache": pick(Cache, "block_size"),
    },
    implied={"enable_expert_parallel": True},
)
COMMANDS = (SERVE, GENERATE, TRACE, TUNE)
