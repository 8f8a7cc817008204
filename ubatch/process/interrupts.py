"""State that stays correct when Ctrl-C arrives between any two lines of the caller.

Python may raise `KeyboardInterrupt` before any line, the first one of a `finally` included, and where a `with` block
ends it may skip `__exit__`. So no code here relies on clean-up code being run:

    is_inside   whether a thread is in a call, according to its stack frames
    Claims      at most one thread is in a call; checks that a claim's thread is still in it
    Marks       a mark disappears with its `with` block, even without `__exit__`
    apart       sets context variables in a copy of the caller's context, which C code drops
    changing    sets a context variable for a `with` block; never resets it late
    holding     checks again, after releasing a lock, that it is released
    Patches     replaces torch's functions for a while; the originals are restored even after an interrupt

`LanePool` does the same with its lanes: they are marked while a step runs, and replaced if the mark is still set later.
"""

import contextvars
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass
from threading import RLock, get_ident
from types import CodeType
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")
_MISSING: Any = object()
_OWN = "ubatch_"
"""Prefix of the names of this package's context variables."""


def is_inside(thread: int, function: CodeType, name: str, value: object) -> bool:
    """Whether `thread` is in a call of `function` whose local variable `name` is `value`.

    False if the call was interrupted, the thread has ended, or the thread does not exist in this forked process.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is function and frame.f_locals.get(name) is value:
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True, eq=False)
class Claim:
    """One thread's claim to be the only one in a call.

    Attributes:
        thread: identifier of the thread.
    """

    thread: int

    def holds(self) -> bool:
        """Whether its thread is still in the call."""
        return is_inside(self.thread, Claims.alone.__code__, "claim", self)


class Claims:
    """Claims to a call that only one thread may be in. The first claim wins. Needs no lock: list operations are
    atomic."""

    def __init__(self) -> None:
        self._claims: list[Claim] = []

    def alone(self, otherwise: Callable[..., T], work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` if no other thread is in this call; else `otherwise(claim, *args)`, with the claim of the
        thread that is in the call. A claim is held meanwhile, too."""
        claim = Claim(get_ident())
        try:
            self._claims.append(claim)
            if self._claims[0] is not claim:
                other = self._before(claim)
                if other is not None:
                    return otherwise(other, *args)
            return work(*args)
        finally:
            if claim in self._claims:
                self._claims.remove(claim)

    def held(self) -> bool:
        """Whether any thread is in a call."""
        return any(claim.holds() for claim in list(self._claims))

    def _before(self, claim: Claim) -> Claim | None:
        """The valid claim before this one, or None; removes claims that an interrupt left behind."""
        for other in list(self._claims):
            if other is claim:
                break
            if other.holds():
                return other
            with suppress(ValueError):  # another thread has removed it already
                self._claims.remove(other)
        return None


class Mark:
    """A mark that can be weakly referenced."""


class Marks:
    """Marks of the active `with` blocks. The mark of an interrupted block ends with its frame."""

    def __init__(self) -> None:
        self._marks: WeakSet[Mark] = WeakSet()

    def __bool__(self) -> bool:
        return len(self._marks) > 0

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Hold a mark during the `with` block."""
        mark = Mark()
        try:
            self._marks.add(mark)
            yield
        finally:
            self._marks.discard(mark)


def apart(work: Callable[..., T], *args: Any) -> T:
    """Run `work(*args)` in a copy of the caller's context. Other packages' variables are copied back; this package's
    are not.

    `work` cannot reset a variable with a token of the caller's: tokens belong to one context.
    """
    context = contextvars.copy_context()
    try:
        return context.run(work, *args)
    finally:
        for variable, value in context.items():
            if not variable.name.startswith(_OWN) and variable.get(_MISSING) is not value:
                variable.set(value)


class changing(AbstractContextManager[T]):  # noqa: N801 - reads like the functions of contextlib
    """Set a context variable in the `with` block. Not a generator: one that is collected late would reset it late."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable = variable
        self._value = value
        self._token: Token[T] | None = None

    def __enter__(self) -> T:
        self._token = self._variable.set(self._value)
        return self._value

    def __exit__(self, *_: object) -> None:
        token, self._token = self._token, None
        if token is not None:
            self._variable.reset(token)


def holding(lock: RLock, work: Callable[[], T]) -> T:
    """Run `work` with `lock` held. The thread must not hold it before, and does not hold it afterwards."""
    try:
        with lock:
            return work()
    finally:
        if lock._is_owned():  # type: ignore[attr-defined]
            lock.release()


Replacement = tuple[Any, str, Callable[..., Any], Callable[..., Any]]
"""The object that holds a function, the function's name, the function, and its replacement."""


class Patches:
    """Functions that are replaced while there is at least one user. Make one per module: it is never freed.

    Args:
        find: returns the replacements; called for the first user.
    """

    def __init__(self, find: Callable[[], Iterable[Replacement]]) -> None:
        self._find = find
        self._lock = RLock()
        self._users: WeakSet[Mark] = WeakSet()
        self._replaced: list[Replacement] = []
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = RLock()  # a thread of the parent process may have held the old one

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the functions in the `with` block; may be nested, also from several threads."""
        user = Mark()
        try:
            try:
                holding(self._lock, lambda: self._enter(user))
                yield
            finally:
                holding(self._lock, lambda: self._leave(user))
        finally:  # again, in case Ctrl-C interrupted the first call
            holding(self._lock, lambda: self._leave(user))

    def _enter(self, user: Mark) -> None:
        self._users.add(user)
        if not self._replaced:
            self._replaced = list(self._find())
        for where, name, function, replacement in self._replaced:
            if getattr(where, name) is function:
                setattr(where, name, replacement)

    def _leave(self, user: Mark) -> None:
        self._users.discard(user)
        if not len(self._users):
            for where, name, function, _ in self._replaced:
                setattr(where, name, function)
            self._replaced = []
