"""A table lists the settings that a command takes on its command line and in its file; those of every command.

A setting that two commands share has the same name, type, default and help in both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model
from pydantic.fields import FieldInfo

from serving.arguments.fields import Flag, Group
from serving.options.flags.fields import FROM_LIST, ApiKey, Positive, also, one_of
from serving.options.flags.server_flags import (
    ALIASES,
    Attention,
    Cache,
    Experts,
    Graphs,
    Overlap,
    Parallelism,
    PerMode,
    Restarts,
    Scheduling,
    Server,
    Speculation,
)
from serving.turns.parsers import REASONING_PARSERS, TOOL_PARSERS
from ubatch.schedules import MAX_LANES

_FLAG_NAMES = {"named_model": "model"}
"""Flag -> setting, where their names differ."""


class Model(Group):
    """The checkpoint, its data type and its device."""

    model: Annotated[
        str | None, Flag(metavar="MODEL", default="here, with --model, or in the file", positional=True)
    ] = Field(None, description="folder of a Hugging Face checkpoint, or its name on the hub, like Qwen/Qwen3-30B-A3B")
    named_model: Annotated[str | None, Flag(name="model", metavar="MODEL", default="")] = Field(
        None, description="the same, instead of MODEL"
    )
    revision: Annotated[str | None, Flag(default="main")] = Field(
        None, min_length=1, description="branch, tag or commit on the hub"
    )
    download_dir: Annotated[Path | None, Flag(default="the hub's cache, HF_HUB_CACHE")] = Field(
        None, description="folder that keeps what is downloaded from the hub"
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto", description="dummy makes random weights, so that a config and a tokenizer are enough"
    )
    trust_remote_code: bool = Field(
        False, description="no effect, accepted as vLLM has it: no code of a checkpoint is ever run"
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], also(half="float16", float="float32")] = Field(
        "auto",
        description="data type; auto is the checkpoint's on a GPU, and on a CPU float32, or bfloat16 if the checkpoint "
        "is bfloat16, too, and it is measured to be faster here",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto is a GPU where there is one")
    max_model_len: Annotated[Positive | None, Flag(default="the checkpoint's")] = Field(
        None, description="longest sequence, prompt and output together"
    )
    allow_long_max_model_len: bool = Field(
        False, description="--max-model-len may exceed the checkpoint's, beyond which outputs may be nonsense"
    )


class Turns(Group):
    """Tool calls and reasoning in the answers of chats."""

    enable_auto_tool_choice: bool = Field(
        False, description="the model decides whether to call tools, where a request leaves it to it (tool_choice auto)"
    )
    tool_call_parser: Annotated[
        str | None, one_of(TOOL_PARSERS), Flag(default="with --enable-auto-tool-choice, what the chat template shows")
    ] = Field(None, description=f"the form of the model's calls: {', '.join(TOOL_PARSERS)}")
    reasoning_parser: Annotated[
        str | None, one_of(REASONING_PARSERS), Flag(default="none; openai_gptoss where the chat template is harmony's")
    ] = Field(None, description=f"separate reasoning from content: {', '.join(REASONING_PARSERS)}")
    exclude_tools_when_tool_choice_none: bool = Field(
        False, description="do not show tools to the model where it may not call them (tool_choice none)"
    )


class Own(Group):
    """Flags that are no settings."""

    config: Annotated[Path | None, Flag(metavar="FILE", default="none")] = Field(
        None, description="YAML file of settings, named as the flags without dashes in front; flags beat it"
    )
    print_config: Annotated[bool, Flag(default="", has_off=False)] = Field(
        False, description="print the settings in force and where each came from, and exit"
    )


@dataclass(frozen=True)
class Table:
    """The settings of a command.

    Attributes:
        program: the command, as in `ubatch serve`.
        groups: title in `--help` -> group of settings, in the order of `--help`.
        file_only: a group of settings without flags; None for none.
        implied: fixed values of settings that the command has no flag for.
    """

    program: str
    groups: Mapping[str, type[Group]]
    file_only: type[Group] | None = None
    implied: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def owners(self) -> Mapping[str, type[Group]]:
        """Setting -> the group that checks its values."""
        groups = (*self.groups.values(), *(() if self.file_only is None else (self.file_only,)))
        return {name: group for group in groups for name in group.model_fields}

    @cached_property
    def settings(self) -> Mapping[str, FieldInfo]:
        """Every setting by name, aliases left out, in the order of `--help`."""
        fields = {name: group.model_fields[name] for name, group in self.owners.items()}
        return {name: field for name, field in fields.items() if name not in ALIASES}

    @cached_property
    def flags(self) -> Mapping[str, str]:
        """Flag, in snake case and without dashes -> the setting or alias that it sets."""
        names = [name for group in self.groups.values() for name in group.model_fields if name != "model"]
        return {_FLAG_NAMES.get(name, name): name for name in names}

    def setting(self, key: str) -> str | None:
        """The setting that a key of a file or of Python names; None if there is none."""
        name = ALIASES.get(key, key)
        return name if name in self.settings and key not in _FLAG_NAMES else None

    def is_switch(self, name: str) -> bool:
        """Whether the setting is a switch, with one flag for true and one for false."""
        return self.owners[name].model_fields[name].annotation is bool


def pick(group: type[Group], *names: str) -> type[Group]:
    """A group with only the named settings of `group`."""
    known = group.model_fields
    fields: dict[str, Any] = {name: (known[name].annotation, known[name]) for name in names}
    return create_model(group.__name__, __base__=Group, __doc__=group.__doc__, **fields)


SERVE = Table(
    "ubatch serve",
    {
        "model": Model,
        "parallelism": Parallelism,
        "overlap": Overlap,
        "cache": Cache,
        "scheduling": Scheduling,
        "attention": Attention,
        "graphs": Graphs,
        "experts": Experts,
        "restarts": Restarts,
        "server": Server,
        "turns": Turns,
        "speculation": Speculation,
    },
    file_only=PerMode,
)


# -- the other commands: what they share with `serve`, and their own ---------------------------------------------------

Mode = Literal["decode", "prefill", "verify"]


class Prompts(Group):
    """The prompts, and how tokens are sampled."""

    prompt: Annotated[tuple[str, ...], FROM_LIST] = Field((), description="one or more prompts")
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
    files: Annotated[tuple[Path, ...], FROM_LIST, Flag(metavar="FILE [FILE ...]")] = Field(
        (), description="show what /stop_profile wrote earlier or elsewhere, one file per rank"
    )
    serial: Annotated[tuple[Path, ...], FROM_LIST, Flag(metavar="FILE [FILE ...]")] = Field(
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
        FROM_LIST,
        AfterValidator(lambda modes: tuple(dict.fromkeys(modes))),
    ] = Field(("decode", "prefill", "verify"), description="kinds of steps")
    lanes: Annotated[Annotated[tuple[int, ...], Field(min_length=1)], FROM_LIST, AfterValidator(_check_lanes)] = Field(
        (2, 3, 4), description="numbers of lanes to try"
    )
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
