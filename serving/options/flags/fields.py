"""The kinds of values that settings have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from model_runner.parallel import AUTO
from moe import all2all_backends, experts_backends
from moe.balance import EplbConfig
from serving.arguments.fields import whole
from ubatch import ConfigError, nearest
from ubatch.errors import cut, shown

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_TOO_MANY_BYTES = 2**63


def parse_bytes(value: int | str | None) -> int | None:
    """`512M` and `512MiB` are 512 * 2**20 bytes, `512m` is 512 * 10**6, as in vLLM; a number is bytes."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgtKMGT]?)(?:i?B)?", value.strip())
        if match is None:
            raise ValueError("expected bytes, like 1073741824, 512M or 1.5GiB")
        value = int(Decimal(match[1]) * _UNITS[match[2]])
    if value is not None and not 1 <= value < _TOO_MANY_BYTES:
        raise ValueError("expected at least one byte, and less than 8 EiB")
    return value


def one_of(names: Iterable[str]) -> AfterValidator:
    """A validator that accepts these names only."""
    known = tuple(map(str, names))

    def check(value: str | None) -> str | None:
        if value is not None and value not in known:
            raise ValueError(f"unknown name{nearest(value, known)}")
        return value

    return AfterValidator(check)


def also(**names: str) -> BeforeValidator:
    """A validator that takes other systems' names of values for ours."""
    return BeforeValidator(lambda value: names.get(value, value) if isinstance(value, str) else value)


def _check_key(key: str | None) -> str | None:
    """Refuse a key that no client could send: HTTP loses white space around a header's value."""
    if key is not None and key != key.strip():
        raise ValueError("it should not begin or end with white space, such as the line end of a file it was read from")
    if key is not None and not key.isprintable():
        raise ValueError("it should have printable characters only, as no HTTP header has others")
    return key


ApiKey = Annotated[str | None, AfterValidator(_check_key)]
"""A key that clients send as `Authorization: Bearer`, in UTF-8."""

Positive = Annotated[int, Field(ge=1)]
FROM_LIST = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Takes a list for a tuple, as YAML has no tuples."""


def _read_off(value: Any, info: ValidationInfo) -> Any:
    """Turn false back into `off`, because YAML reads `off` as false.

    Raises:
        ValueError: neither a number nor one of the words. Digits are a number on the command line only: in a file they
            were in quotes. True is none: YAML reads `on` as true, and pydantic would read that as 1.
    """
    if value is False:
        return "off"
    number = isinstance(value, int) or (info.mode == "python" and isinstance(value, str) and value.isdecimal())
    if value is True or not (number or value in ("auto", "off")):
        raise ValueError("expected a number of tokens, auto or off")
    return value


TokensAutoOff = Annotated[Positive | Literal["auto", "off"], BeforeValidator(_read_off)]


def _read_values(words: list[str]) -> dict[str, Any]:
    """Parse `name=value` words; true, false and numbers are converted, any other value is text."""
    pairs = []
    for word in words:
        name, equals, text = word.partition("=")
        if not (name and equals and text):
            raise whole(f"expected name=value, not {shown(word)}")
        pairs.append((name, _read_value(text)))
    return _in_snake_case(pairs)


def _read_value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _in_snake_case(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Convert the names from kebab to snake case."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        known = name.replace("-", "_")
        if known in values:
            raise whole(f"{cut(known)} is given twice")
        values[known] = value
    return values


def _check_values(values: Any) -> Any:
    """Check a mapping's values, and convert its names to snake case."""
    if isinstance(values, list) and all(isinstance(word, str) for word in values):
        return _read_values(values)
    if not isinstance(values, dict):
        return values
    for name, value in values.items():
        if not isinstance(value, bool | int | float | str):
            raise ValueError(f"expected true, false, a number or text for {cut(name)}")
    return _in_snake_case(values.items())


ExpertsName = Annotated[
    str,
    one_of(("auto", *experts_backends())),
    Field(description=f"back end of the experts: auto, the fastest here, or {', '.join(experts_backends())}"),
]


def _read_json(value: Any) -> Any:
    """A mapping: JSON on the command line, a mapping in a file."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"""expected JSON, like {{"temperature": 0.5}} ({error})""") from None


JsonMapping = Annotated[dict[str, Any] | None, BeforeValidator(_read_json)]
"""A mapping of anything; on the command line it is JSON."""


def _read_balance(value: Any) -> Any:
    """The given keys of an `EplbConfig`, checked; on the command line one JSON mapping, or one for every key."""
    if value is None:
        return None
    given: dict[str, Any] = {}
    for each in map(_read_json, value) if isinstance(value, list) else (value,):
        if not isinstance(each, dict):
            raise ValueError("it should be a mapping")
        try:
            EplbConfig.of(each)
        except ConfigError as error:
            raise whole(str(error).removesuffix(".")) from None
        given = _in_snake_case([*given.items(), *each.items()])
    return given


Balance = Annotated[dict[str, Any] | None, BeforeValidator(_read_balance)]
"""Keys of an `EplbConfig`."""


def _read_list(value: Any) -> Any:
    """Words; or one with a list in JSON, as vLLM has it."""
    words = [value] if isinstance(value, str) else value
    if isinstance(words, list) and len(words) == 1 and isinstance(words[0], str) and words[0].startswith("["):
        words = _read_json(words[0])
    return tuple(words) if isinstance(words, list) else words


Words = Annotated[Annotated[tuple[str, ...], Field(min_length=1)] | None, BeforeValidator(_read_list)]
"""Several words, or a list in JSON; in a file a list."""


def _read_names(value: Any) -> Any:
    """Each name once; a single one without a list around it."""
    names = [value] if isinstance(value, str) else value
    if names is None:
        return None
    if not isinstance(names, list | tuple) or not names or not all(isinstance(each, str) and each for each in names):
        raise ValueError("expected a name, or a list of names, none of them empty")
    first, *more = dict.fromkeys(names)
    return (first, *more) if more else first


Names = Annotated[str | tuple[str, ...] | None, BeforeValidator(_read_names)]
"""A name, or several: the flag's values on the command line, a string or a list in a file."""

NamedValues = Annotated[dict[str, bool | int | float | str] | None, BeforeValidator(_check_values)]
"""A mapping in a file, words on the command line; names in kebab or snake case."""

TRANSPORTS = tuple(name for name in all2all_backends() if name != "emulated_link")  # its flag is --emulated-link
_OTHER_NAMES = {"naive": "allgather_reducescatter"}
"""vLLM's name -> the name here; both send every token to every rank."""
_NOT_HERE = {
    "pplx": "deepep_low_latency",
    "flashinfer_all2allv": "torch_dist",
    "mori": "deepep_high_throughput",
    "mori_high_throughput": "deepep_high_throughput",
    "mori_low_latency": "deepep_low_latency",
}
"""vLLM's name of a transport that is not here -> the one to use instead."""


def _transport(name: str | None) -> str | None:
    """The transport's name here, from that name or vLLM's."""
    if name in _NOT_HERE:
        raise ValueError(f"{name} is not here; use {_NOT_HERE[name]}")
    known = (AUTO, *all2all_backends())
    if name is None or ":" in name:  # "package.module:Class", which need not be registered
        return name
    if name not in known and name not in _OTHER_NAMES:
        raise ValueError(f"unknown all2all back end {shown(name)}{nearest(name, known)}")
    return _OTHER_NAMES.get(name, name)


TransportName = Annotated[str | None, AfterValidator(_transport)]
"""Name of the transport that carries tokens to their experts; vLLM's names are accepted, too."""
