"""Every error that `ubatch` raises to its users, and the remedy for each.

All derive from `UBatchError`, except `LaneAborted`: that one unwinds the *other* lanes after a lane failed, so it is a
`BaseException`, which `except Exception` in a model cannot swallow, and it never reaches the caller.
"""

import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from types import NoneType
from typing import Any

SHOWN_CHARACTERS = 80
"""Most characters of a wrong value in a message."""


class UBatchError(Exception):
    """Base of all errors raised by this package. All of them can be pickled, to cross from one process to another."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Not through __init__, which in some errors takes more than the message.
        return _remake, (type(self), self.args), self.__dict__


def _remake(kind: type[UBatchError], args: tuple[Any, ...]) -> UBatchError:
    return kind.__new__(kind, *args)


class ConfigError(UBatchError, ValueError):
    """An option has a value that cannot work. Raised before anything is launched."""


class SplitError(UBatchError, ValueError):
    """A batch, an argument or an output cannot be split into microbatches or merged again."""


class SideEffectError(UBatchError):
    """A call in lanes changed what its proof did not show, and what cannot be put back; the message names it. The
    result is not given, and later calls of this kind run unsplit."""


class OverlapDeclined(UBatchError):
    """Overlap was required (`require_overlap=True`) and the step declined it; `reason` says why."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class NestedUBatchError(UBatchError):
    """A wrapper was called from inside another one's lane. Wrap only the outermost module."""


class ConcurrentCallError(UBatchError):
    """Two threads called one wrapper with a group at the same time. Use one wrapper per thread, or a lock."""


class ForkedLaneError(UBatchError):
    """The process was forked while lanes ran; the child has no other lanes to hand the baton to."""


class ForgedValue(UBatchError):
    """A value in the rendezvous store was not written by a process that has the job's key; `name` is the store's
    key."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"the value of {name!r} in the rendezvous store {what}. Start every process of the job with the same "
            f"secret; if they have it, somebody else writes into the store: make its network private."
        )
        self.name = name


class GradientError(UBatchError):
    """A tensor that requires grad would lose its gradient, in a lane or in `launch_*`. Use `torch.no_grad()`, or run
    unsplit."""


class UnvotedCollectiveError(UBatchError):
    """A collective over several ranks ran in a lane whose split the ranks did not vote on, so they could dead-lock."""


class UBatchTimeout(UBatchError, TimeoutError):
    """A lane held the baton longer than `timeout_s`; the message has every lane's last point and stack."""


class TransferTimeout(UBatchError, TimeoutError):
    """A transfer did not complete within the group's time-out, and no peer reported a failure."""


class PeerFailed(UBatchError):
    """The global rank `rank` failed or died. Nothing more runs on the group until `reset()`."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class LaunchOrderError(UBatchError):
    """`UBATCH_CHECK_ORDER=1`: ranks launched different transfers, or in another order. The message has both orders."""


class GroupBroken(UBatchError):
    """The group is out of step after a failure. Call `reset()` on every rank before using it again."""


class LaneAborted(BaseException):
    """Another lane failed; this lane unwinds. Raised again at every later point; do not catch it."""


def note(error: BaseException, text: str) -> None:
    """Add a note to an error of any class. Does nothing if the class refuses notes: the original error must stay
    visible."""
    with suppress(Exception):
        BaseException.add_note(error, text)


def describe(error: BaseException, how: Callable[[object], str] = repr) -> str:
    """Text of an error of any class, for another error's message: `how(error)`, or its class name if that fails."""
    try:
        return how(error)
    except Exception:
        return f"{type(error).__name__} (which cannot be printed)"


def cut(text: str, most: int = 4 * SHOWN_CHARACTERS) -> str:
    """The beginning of a text that others wrote, for a message."""
    return text if len(text) <= most else text[:most] + "..."


def shown(value: object) -> str:
    """The beginning of a wrong value's `repr`, for a message; cheap even if the value is large or deeply nested."""
    return cut(_brief.repr(value), SHOWN_CHARACTERS)


class _Brief(reprlib.Repr):
    """A `reprlib.Repr` that looks at the first items of a mapping only; the original sorts the whole mapping first."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = SHOWN_CHARACTERS
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = self.maxlevel = SHOWN_CHARACTERS // 4

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), SHOWN_CHARACTERS)), level)

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 1000:  # Python refuses to write the digits of a really large one
            return f"a number of {x.bit_length() * 30103 // 100000} digits"
        return super().repr_int(x, level)


_brief = _Brief()


def named_values(values: Mapping[str, Any], known: Collection[str], what: str = "") -> dict[str, Any]:
    """A mapping that a user wrote, its keys in snake case. `what` begins the messages.

    Raises:
        ConfigError: a key is unknown (the message has the nearest known one), or is there twice.
    """
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{what}unknown key {shown(key)}{nearest(name, known)}")
        if name in named:
            raise ConfigError(f"{what}{shown(key)} is given twice, with hyphens and with underscores. Remove one.")
        named[name] = value
    return named


def check_type(name: str, value: object, *kinds: type) -> None:
    """Check the type of a setting. A bool does not count as a number; an int is accepted for a float.

    Raises:
        ConfigError: it is another one.
    """
    accepted = (*kinds, int) if float in kinds else kinds
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join("None" if each is NoneType else each.__name__ for each in kinds)
        raise ConfigError(f"{name} must be {expected}, not {shown(value)} ({type(value).__name__}).")


def check_known(kind: str, name: object, known: Collection[str], where: str = "") -> None:
    """Check that a name is known.

    Args:
        kind: kind of the name, for the message, such as "schedule".
        where: the beginning of the message.

    Raises:
        ConfigError: it is not; the message has the nearest known one.
    """
    if name not in known:
        raise ConfigError(f"{where}unknown {kind} {shown(name)}{nearest(str(name), known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of an "unknown name" message: `"; did you mean 'x'? Known: x, y"`.

    The question is left out unless exactly one name is near.

    Args:
        name: what the user wrote.
        known: every name that would have been accepted.
    """
    names = sorted(map(str, known))
    if len(name) > 2 * max(map(len, names), default=0) + 2:  # nobody meant any of them
        return f". Known: {', '.join(names)}"
    far = {other: distance for other in names if (distance := _distance(name, other)) is not None}
    close = [other for other, distance in far.items() if distance == min(far.values())]
    hint = f"; did you mean {close[0]!r}?" if len(close) == 1 else "."  # if several are near: no hint
    return f"{hint} Known: {', '.join(names)}"


def _distance(written: str, name: str) -> int | None:
    """Edit distance from what the user wrote to a known name; None if the user cannot have meant it.

    A name can be meant if there are at most two typos, or if at most half of its words are left out. Sharing most
    characters is not enough: `pipeline_parallel_size` is not `tensor_parallel_size`.
    """
    one, other = (re.sub(r"[\W_]+", "_", each.lower()) for each in (written, name))
    slips = _slips(one, other)
    if slips <= (1 if len(one) < 6 and sorted(one) != sorted(other) else 2):  # two swapped characters count as one typo
        return slips
    words, left = one.split("_"), other.split("_")
    missing = len(left) - len(words)
    among = iter(left)
    if missing > len(words) or not all(any(_is_word(word, each) for each in among) for word in words):
        return None
    return 3 + missing + len({*words} - {*left})


def _is_word(written: str, word: str) -> bool:
    """Whether the two words are equal, differ by one typo, or one is a prefix of the other."""
    short, long = sorted((written, word), key=len)
    return written == word or (len(short) > 2 and (long.startswith(short) or _slips(written, word) < 2))


def _slips(one: str, other: str) -> int:
    """Characters to insert, delete or replace (Levenshtein distance); at least 3 if the lengths alone say so."""
    if abs(len(one) - len(other)) > 2:  # no caller takes it for a typo; a name of megabytes would take minutes
        return abs(len(one) - len(other))
    row = list(range(len(other) + 1))
    for above, here in enumerate(one, 1):
        corner, row[0] = row[0], above
        for place, there in enumerate(other, 1):
            corner, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, corner + (here != there))
    return row[-1]
