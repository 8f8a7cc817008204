"""Every error a user of `ubatch` can meet, and what each asks of them.

All derive from `UBatchError`, except `LaneAborted`: that one unwinds the *other* lanes after a lane failed, so it
is a `BaseException` that `except Exception` in a model cannot swallow, and it never reaches the caller.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

__all__ = [
    "ConcurrentCallError",
    "ConfigError",
    "ForgedValue",
    "ForkedLaneError",
    "GradientError",
    "GroupBroken",
    "LaneAborted",
    "LaunchOrderError",
    "NestedUBatchError",
    "OverlapDeclined",
    "PeerFailed",
    "SplitError",
    "TransferTimeout",
    "UBatchError",
    "UBatchTimeout",
    "UnvotedCollectiveError",
    "describe",
    "nearest",
    "note",
]


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


class OverlapDeclined(UBatchError):
    """Overlap was required (`require_overlap=True`) and the step declined it; `reason` says why."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class NestedUBatchError(UBatchError):
    """A wrapper was called from inside a lane. Wrap only the outermost module."""


class ConcurrentCallError(UBatchError):
    """Two threads called one wrapper at the same time. Use one wrapper per thread, or a lock."""


class ForkedLaneError(UBatchError):
    """The process was forked while lanes ran; the child has no other lanes to hand the baton to."""


class ForgedValue(UBatchError):
    """What stands in the rendezvous store was written by nobody who has the job's key; `name` is where."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"the value of {name!r} in the rendezvous store {what}. Start every process of the job with the same "
            f"secret; if they have it, somebody else writes into the store: make its network private."
        )
        self.name = name


class GradientError(UBatchError):
    """What requires grad would lose it: in a lane, or by `launch_*`. Use `torch.no_grad()`, or run unsplit."""


class UnvotedCollectiveError(UBatchError):
    """A collective over several ranks ran in a lane whose split the ranks did not vote on; they could dead-lock."""


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
    """Add a note to anybody's error, if it takes one: its class may shadow `add_note`, or refuse what that sets. The
    error counts, and comes out as itself."""
    with suppress(Exception):
        BaseException.add_note(error, text)


def describe(error: BaseException, how: Callable[[object], str] = repr) -> str:
    """Anybody's error, for another one's message: `how(error)`, or the name of its class where that fails."""
    try:
        return how(error)
    except Exception:
        return f"{type(error).__name__} (which cannot be printed)"


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of an "unknown name" message: `"; did you mean 'x'? Known: x, y"`.

    The question is left out where no name, or more than one, is near.

    Args:
        name: what the user wrote.
        known: every name that would have been accepted.
    """
    names = sorted(map(str, known))
    far = {other: distance for other in names if (distance := _distance(name, other)) is not None}
    close = [other for other, distance in far.items() if distance == min(far.values())]
    hint = f"; did you mean {close[0]!r}?" if len(close) == 1 else "."  # of several, none: a wrong hint misleads
    return f"{hint} Known: {', '.join(names)}"


def _distance(written: str, name: str) -> int | None:
    """How far what was written is from a name; None where that cannot be what was meant.

    It can if there are one or two slips in it, or if it leaves out some of the name's words, at most half of them. To
    share most characters is not enough: `pipeline_parallel_size` is no `tensor_parallel_size`.
    """
    one, other = (re.sub(r"[\W_]+", "_", each.lower()) for each in (written, name))
    slips = _slips(one, other)
    if slips <= (1 if len(one) < 6 and sorted(one) != sorted(other) else 2):  # two that change places are one slip
        return slips
    words, left = one.split("_"), other.split("_")
    missing = len(left) - len(words)
    among = iter(left)
    if missing > len(words) or not all(any(_is_word(word, each) for each in among) for word in words):
        return None
    return 3 + missing + len({*words} - {*left})


def _is_word(written: str, word: str) -> bool:
    """With a slip, or one is the other's beginning."""
    short, long = sorted((written, word), key=len)
    return written == word or (len(short) > 2 and (long.startswith(short) or _slips(written, word) < 2))


def _slips(one: str, other: str) -> int:
    """Characters to put in, take out or change (Levenshtein)."""
    row = list(range(len(other) + 1))
    for above, here in enumerate(one, 1):
        corner, row[0] = row[0], above
        for place, there in enumerate(other, 1):
            corner, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, corner + (here != there))
    return row[-1]
