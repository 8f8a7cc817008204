"""Which transports there are, by name, and what options they take.

`All2All` was a protocol up to 0.1.0. Back ends that do not inherit from it are adopted; the next release refuses them.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, get_args, get_type_hints

from moe.all2all.base import All2All, StepSizes
from ubatch import CommGroup, ConfigError, LazyRegistry, nearest
from ubatch.errors import shown


@lru_cache(None)
def inheriting(found: type) -> type[All2All[Any]]:
    """The class itself if it inherits from `All2All`; else one that does, with what `found` lacks by default.

    Raises:
        ConfigError: it has no `dispatch` or `combine`.
    """
    if issubclass(found, All2All):
        return found
    if not (hasattr(found, "dispatch") and hasattr(found, "combine")):
        raise ConfigError(
            f"{found.__name__} is no subclass of moe.All2All. Inherit from it: dispatch, combine and 3 attributes are "
            "enough."
        )
    warnings.warn(
        f"{found.__name__} is a transport that does not inherit from moe.All2All. The next release refuses it.",
        DeprecationWarning,
        stacklevel=4,
    )
    return type(found.__name__, (found, All2All), {"__module__": found.__module__})


def adopt(transport: Any) -> All2All[Any]:
    """The transport itself, which becomes an instance of `inheriting(type(transport))`.

    Raises:
        ConfigError: it is no transport, or of a class with a layout of its own, such as one in C.
    """
    if isinstance(transport, All2All):
        return transport
    own: Any = type(transport)
    kind = inheriting(own)
    try:
        transport.__class__ = kind
    except TypeError as error:
        raise ConfigError(
            f"{kind.__name__} does not inherit from moe.All2All, and cannot be made to: {error}."
        ) from None
    return transport


_BACKENDS = LazyRegistry(
    "all2all back end",
    {
        "local": "moe.all2all.local:LocalAll2All",
        "torch_dist": "moe.all2all.torch_dist.torch_dist:TorchDistAll2All",
        "allgather_reducescatter": "moe.all2all.allgather_reducescatter:AllGatherReduceScatterAll2All",
        "deepep_high_throughput": "moe.all2all.deepep.high_throughput:DeepEPHighThroughputAll2All",
        "deepep_low_latency": "moe.all2all.deepep.low_latency:DeepEPLowLatencyAll2All",
        "deepep_auto": "moe.all2all.deepep.auto:DeepEPAutoAll2All",
        "deepep_v2": "moe.all2all.deepep.v2:DeepEPV2All2All",
        "host_loopback": "moe.all2all.host_loopback:HostLoopbackAll2All",
        "host_loopback_batched": "moe.all2all.host_loopback_batched:HostLoopbackBatchedAll2All",
        "emulated_link": "moe.all2all.emulated_link:EmulatedLinkAll2All",
    },
)
_PLACE = ("self", "group", "num_experts")
"""The arguments of every back end; all others are its options."""


def register_all2all_backend(name: str, target: str) -> None:
    """Register a transport.

    Args:
        target: `"package.module:Class"`, an `All2All` made with `group`, `num_experts` and its own options; imported
            on first use.

    Raises:
        ConfigError: the name is taken by another class, or the target is not of that form.
    """
    _BACKENDS.register(name, target)


def all2all_backends() -> tuple[str, ...]:
    """The known names, sorted."""
    return _BACKENDS.names()


def all2all_class(name: str) -> type[All2All[Any]]:
    """The class that `make_all2all` makes for that name.

    Args:
        name: one of `all2all_backends()`, or the place of a class that nobody has registered, `"package.module:Class"`.

    Raises:
        ConfigError: an unknown name, or what it leads to is no subclass of `All2All`.
    """
    if ":" in name:
        register_all2all_backend(name, name)
    try:
        found = _BACKENDS.load(name)
    except AttributeError as error:
        raise ConfigError(f"all2all back end {shown(name)}: {error}.") from None
    if not isinstance(found, type):
        raise ConfigError(f"all2all back end {shown(name)} is {found!r}, which is no subclass of moe.All2All.")
    return inheriting(found)


def check_all2all_options(name: str, options: Mapping[str, object], num_ranks: int) -> None:
    """Refuse options that a back end does not take, and ranks that it does not serve, before anything is made.

    Args:
        options: what would be given to `make_all2all` in addition to group and experts.

    Raises:
        ConfigError: an unknown back end or option, a value of another type or out of range, or a number of ranks that
            it does not serve.
    """
    make = all2all_class(name)
    parameters = inspect.signature(make).parameters
    known = [option for option in parameters if option not in _PLACE]
    types: Mapping[str, object] = {}
    with suppress(NameError):  # a type that is imported for type checkers only: the class checks its values itself
        types = get_type_hints(make.__init__)
    for option, value in options.items():
        if option not in known:
            takes = nearest(option, known) if known else "; it takes none."
            raise ConfigError(f"all2all back end {shown(name)} has no option {shown(option)}{takes}")
        wanted = types.get(option)
        kinds = get_args(wanted) or (wanted,)
        accepted = {bool, int, float, str} & set(kinds)
        if type(value) is int and float in accepted:
            continue
        if accepted and type(value) not in kinds:
            names = " or ".join(sorted(kind.__name__ for kind in accepted))
            raise ConfigError(f"all2all back end {shown(name)}: option {option} must be {names}, not {shown(value)}.")
    make.check_options(options, num_ranks)


def default_all2all_options(name: str, sizes: StepSizes, num_ranks: int) -> dict[str, object]:
    """The options of a back end that follow from the steps that there will be.

    Raises:
        ConfigError: an unknown back end.
    """
    return dict(all2all_class(name).default_options(sizes, num_ranks))


def make_all2all(name: str, *, group: CommGroup | None, num_experts: int, **options: object) -> All2All[Any]:
    """The transport `name`. One serves all layers and lanes of a rank.

    Args:
        name: one of `all2all_backends()`; `moe.all2all` says what each does.
        group: the expert-parallel ranks; None only for `local`.
        num_experts: routed experts of a layer, over all ranks.
        options: further options of this back end, such as `link` and `inner` for `emulated_link`.

    Raises:
        ConfigError: an unknown name or option, experts that do not divide by the ranks, or a group that does not fit.
    """
    make: Callable[..., All2All[Any]] = all2all_class(name)
    arguments: dict[str, object] = {"group": group, "num_experts": num_experts, **options}
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        takes = ", ".join(inspect.signature(make).parameters)
        raise ConfigError(f"all2all back end {shown(name)}: {error}. It takes {takes}.") from None
    return make(**arguments)
