"""Which transports there are, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

from moe.all2all.base import All2All
from ubatch import CommGroup, ConfigError, LazyRegistry

__all__ = ["all2all_backends", "make_all2all", "register_all2all_backend"]

_BACKENDS = LazyRegistry(
    "all2all back end",
    {
        "local": "moe.all2all.local:LocalAll2All",
        "torch_dist": "moe.all2all.torch_dist:TorchDistAll2All",
        "allgather_reducescatter": "moe.all2all.allgather_reducescatter:AllGatherReduceScatterAll2All",
        "deepep_high_throughput": "moe.all2all.deepep_high_throughput:DeepEPHighThroughputAll2All",
        "deepep_low_latency": "moe.all2all.deepep_low_latency:DeepEPLowLatencyAll2All",
        "deepep_auto": "moe.all2all.deepep_auto:DeepEPAutoAll2All",
        "deepep_v2": "moe.all2all.deepep_v2:DeepEPV2All2All",
        "host_loopback": "moe.all2all.host_loopback:HostLoopbackAll2All",
        "host_loopback_batched": "moe.all2all.host_loopback_batched:HostLoopbackBatchedAll2All",
        "emulated_link": "moe.all2all.emulated_link:EmulatedLinkAll2All",
    },
)


def register_all2all_backend(name: str, target: str) -> None:
    """Make a transport known.

    Args:
        name: what `--all2all-backend` calls it.
        target: `"package.module:Class"`, an `All2All` made with `group`, `num_experts` and its own options; imported
            on first use.

    Raises:
        ConfigError: the name is taken by another class, or the target is not of that form.
    """
    _BACKENDS.register(name, target)


def all2all_backends() -> tuple[str, ...]:
    """The known names, sorted."""
    return _BACKENDS.names()


def make_all2all(name: str, *, group: CommGroup | None, num_experts: int, **options: object) -> All2All[Any]:
    """The transport `name`. One serves all layers and lanes of a rank.

    Args:
        name: one of `all2all_backends()`; `moe.all2all` says what each does.
        group: the expert-parallel ranks; None only for `local`.
        num_experts: routed experts of a layer, over all ranks.
        options: what this one takes beside: `link` and `inner` for `emulated_link`.

    Raises:
        ConfigError: an unknown name or option, experts that do not divide by the ranks, or a group that does not fit.
    """
    make = cast("Callable[..., All2All[Any]]", _BACKENDS.load(name))
    arguments: dict[str, object] = {"group": group, "num_experts": num_experts, **options}
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        takes = ", ".join(inspect.signature(make).parameters)
        raise ConfigError(f"all2all back end {name!r}: {error}. It takes {takes}.") from None
    return make(**arguments)
