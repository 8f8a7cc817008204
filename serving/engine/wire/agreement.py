"""Settings that must be the same on all nodes; each node posts its own in the store, and both sides compare them.

Nodes with different settings would wait forever: for ranks that no node starts, or in collectives that do not match.
This module also checks which ranks and nodes belong to a run.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import msgspec

from moe import ExpertPlacement
from serving.engine.options import AUTO_DTYPE, EngineOptions
from serving.engine.wire import messages as wire
from ubatch import ConfigError

_MAY_DIFFER = frozenset(
    {
        *("node_rank", "master_addr", "master_port", "cluster_secret_file", "log_level", "profile_folder"),
        "expert_load_out",  # node 0 writes it
        *("model", "kv_cache_memory", "gpu_memory_utilization"),  # folders, and memory, are a machine's own
        *("attention_backend", "prefill_attention_backend", "decode_attention_backend", "moe_backend"),
        *("group", "profile_ranges", "draft_model_path", "resume_timeout_s"),
    }
)
_NESTED = {"dbo": "", "scheduler": "", "restarts": "", "speculation": "speculative_"}
_FLAGS = {
    "num_ubatches": "ubatch_size",
    "placement": "init_expert_location",
    "policy": "scheduling_policy",
    "speculative_topk": "speculative_eagle_topk",
    "speculative_acceptance": "speculative_accept",
}
"""Setting -> name of its flag, where they differ."""
_CHECKPOINT = "config.json of MODEL (SHA-256)"
_DTYPE = "--dtype"


def describe_shape(options: EngineOptions) -> str:
    """The settings that must agree, as JSON: flag -> value. All options are included, except those in `_MAY_DIFFER`."""
    shape = {f"--{_FLAGS.get(name, name).replace('_', '-')}": value for name, value in _settings(options)}
    try:
        contents = (options.model / "config.json").read_bytes()
    except OSError as error:
        shape[_CHECKPOINT] = f"unreadable ({error.strerror})"
    else:
        shape[_CHECKPOINT] = hashlib.sha256(contents).hexdigest()[:16]
    return _encoder.encode(shape).decode()


def require_same_shape(options: EngineOptions, theirs: str, other_node: int) -> None:
    """Compare this node's settings with another node's.

    Args:
        theirs: the result of `describe_shape` on the other node.

    Raises:
        ConfigError: the settings differ; the message names the flags and both values.
    """
    here, there = f"node {options.node_rank}", f"node {other_node}"
    try:
        other = _shape.decode(theirs)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{here} cannot read the settings of {there}. Install the same version on every node."
        ) from error
    own = _shape.decode(describe_shape(options))
    names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
    if AUTO_DTYPE in (own.get(_DTYPE), other.get(_DTYPE)):
        names = [name for name in names if name != _DTYPE]
    if names:
        wrong = "; ".join(
            f"{name} is {_text(own, name)} on {here} and {_text(other, name)} on {there}" for name in names
        )
        raise ConfigError(
            f"{here} and {there} cannot work together: {wrong}. Start every node with the same command, except "
            f"for --node-rank."
        )


def settle_dtype(options: EngineOptions, shape: str) -> EngineOptions:
    """The options with node 0's dtype in place of `AUTO_DTYPE`.

    Args:
        shape: the result of `describe_shape` on node 0.
    """
    return replace(options, dtype=str(_shape.decode(shape)[_DTYPE])) if options.dtype == AUTO_DTYPE else options


def rank_identity(rank: int) -> bytes:
    """The zmq identity of a rank's socket."""
    return f"rank-{rank}".encode()


def node_identity(node_rank: int) -> bytes:
    """The zmq identity of a node's socket."""
    return f"node-{node_rank}".encode()


def is_of_this_run(options: EngineOptions, sender: bytes, message: wire.FromEngine) -> bool:
    """Whether a message comes from a rank or node of this run. `Failed` may come from a rank or from its node."""
    match message:
        case wire.Outputs(rank) | wire.Refused(rank):
            return rank in range(options.data_parallel_size)
        case wire.NodeAlive(node_rank) | wire.NodeFound(node_rank):
            return node_rank in range(1, options.nnodes) and sender == node_identity(node_rank)
        case wire.Failed(rank):
            return rank in range(options.world_size)
        case wire.Finished(rank) | wire.Moved(rank):
            return rank == 0 and sender == rank_identity(rank)
        case wire.Ready(rank) | wire.Alive(rank) | wire.Loads(rank) | wire.ProfileWritten(rank):
            return rank in range(options.world_size) and sender == rank_identity(rank)


def _settings(options: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    for each in fields(options):
        value = getattr(options, each.name)
        if each.name in _NESTED:
            yield from _settings(value, _NESTED[each.name]) if value is not None else ()
        elif each.name == "job":
            yield from value.items()
        elif each.name not in _MAY_DIFFER:
            yield prefix + each.name, str(value) if isinstance(value, ExpertPlacement) else value


def _text(shape: Mapping[str, object], name: str) -> str:
    return _encoder.encode(shape[name]).decode() if name in shape else "not set"


def _plain(value: object) -> object:
    """Converts types that msgspec cannot encode."""
    return dict(value) if isinstance(value, Mapping) else str(value)


_encoder = msgspec.json.Encoder(enc_hook=_plain, order="deterministic")
_shape = msgspec.json.Decoder(dict[str, object])
