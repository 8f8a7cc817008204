"""Functions of torch's, replaced for as long as somebody needs it, and put back whatever interrupts."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ubatch.process.interrupts import Mark, holding

__all__ = ["Patches", "Replacement"]

Replacement = tuple[Any, str, Callable[..., Any], Callable[..., Any]]
"""Where a function is, its name, the function, and what takes its place."""


class Patches:
    """Functions that are replaced while anybody uses them.

    Args:
        find: tells what to replace; called when the first user comes.
    """

    def __init__(self, find: Callable[[], Iterable[Replacement]]) -> None:
        self._find = find
        self._lock = threading.RLock()
        self._users: weakref.WeakSet[Mark] = weakref.WeakSet()
        self._replaced: list[Replacement] = []
        _all.add(self)

    def renew_lock(self) -> None:
        """In a forked child: another thread of the parent may have held it."""
        self._lock = threading.RLock()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace them in the `with` block; may be nested, also from several threads."""
        user = Mark()
        try:
            try:
                holding(self._lock, lambda: self._enter(user))
                yield
            finally:
                holding(self._lock, lambda: self._leave(user))
        finally:  # once more, where Ctrl-C came in place of the first time
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


_all: weakref.WeakSet[Patches] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for patches in list(_all):
        patches.renew_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
