"""Back ends that do not inherit from `All2All`, which was a protocol up to 0.1.0; the next release refuses them."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

from moe.all2all.base import All2All
from ubatch import ConfigError


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
