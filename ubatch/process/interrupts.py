"""What holds when Ctrl-C comes between any two lines of the caller.

Python may raise `KeyboardInterrupt` before any line, the first one of a `finally` included, and where a `with` block
ends it may skip `__exit__`. So what a call sets and takes back is not trusted to be taken back:

    is_inside   whether a thread really is in a call: its frames say so
    Claims      only one may be in a call; whoever is in the way is looked up there
    Marks       a mark that is not taken back is gone with its `with` block
    apart       context variables are set in a copy of the caller's context, which ends in C
    changing    a context variable, set for a `with` block and set back; never later than that
    holding     a lock is looked at once more after it was given back

`LanePool` does the same with its lanes: they are marked while a step runs, and replaced where the mark is found later.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar, Token
from threading import RLock, get_ident
from types import CodeType, TracebackType
from typing import Any, TypeVar
from weakref import WeakSet

__all__ = ["Claim", "Claims", "Mark", "Marks", "apart", "changing", "holding", "is_inside"]

T = TypeVar("T")
_MISSING: Any = object()
_OWN = "ubatch_"
"""What the names of this package's context variables begin with."""


def is_inside(thread: int, function: CodeType, name: str, value: object) -> bool:
    """Whether `thread` is in a call of `function` whose local variable `name` is `value`.

    It is not where the call was interrupted, and where the thread has ended, or was not forked with this one.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is function and frame.f_locals.get(name) is value:
            return True
        frame = frame.f_back
    return False


class Claim:
    """One thread's claim to be the only one.

    Attributes:
        thread: its identifier.
    """

    __slots__ = ("thread",)

    def __init__(self, thread: int) -> None:
        self.thread = thread

    def holds(self) -> bool:
        """Whether its thread is in the call."""
        return is_inside(self.thread, Claims.alone.__code__, "claim", self)


class Claims:
    """Who is in a call that only one may be in. The first claim counts; a list does by itself what needs no lock."""

    def __init__(self) -> None:
        self._claims: list[Claim] = []

    def alone(self, refuse: Callable[[Claim], Exception], work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` if nobody else is in here.

        Raises:
            What `refuse` returns: for the claim of whoever is.
        """
        claim = Claim(get_ident())
        try:
            self._claims.append(claim)
            if self._claims[0] is not claim:
                other = self._before(claim)
                if other is not None:
                    raise refuse(other)
            return work(*args)
        finally:
            if claim in self._claims:
                self._claims.remove(claim)

    def _before(self, claim: Claim) -> Claim | None:
        """Whose claim comes before this one; those that an interrupt left behind go."""
        for other in list(self._claims):
            if other is claim:
                break
            if other.holds():
                return other
            with suppress(ValueError):  # another thread has found out too
                self._claims.remove(other)
        return None


class Mark:
    """Something to be marked with, that a weak reference can refer to."""


class Marks:
    """The `with` blocks under way. One that was interrupted keeps its mark no longer than its frame lives."""

    def __init__(self) -> None:
        self._marks: WeakSet[Mark] = WeakSet()

    def __bool__(self) -> bool:
        return len(self._marks) > 0

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Be one of them in the `with` block."""
        mark = Mark()
        try:
            self._marks.add(mark)
            yield
        finally:
            self._marks.discard(mark)


def apart(work: Callable[..., T], *args: Any) -> T:
    """Run `work(*args)` in a copy of the caller's context. This package's variables end with it, others go over.

    A variable of the caller's that `work` resets by a token of the caller's cannot be: tokens belong to one context.
    """
    context = contextvars.copy_context()
    try:
        return context.run(work, *args)
    finally:
        for variable, value in context.items():
            if not variable.name.startswith(_OWN) and variable.get(_MISSING) is not value:
                variable.set(value)


class changing(AbstractContextManager[T]):  # noqa: N801 - reads like the functions of contextlib
    """Set a context variable in the `with` block. No generator: one that is collected late would set it back late."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable = variable
        self._value = value
        self._token: Token[T] | None = None

    def __enter__(self) -> T:
        self._token = self._variable.set(self._value)
        return self._value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        token, self._token = self._token, None
        if token is not None:
            self._variable.reset(token)


def holding(lock: RLock, work: Callable[[], T]) -> T:
    """Run `work` while this thread, which did not hold it before, holds `lock`; it does not afterwards."""
    try:
        with lock:
            return work()
    finally:
        if lock._is_owned():  # type: ignore[attr-defined]
            lock.release()
