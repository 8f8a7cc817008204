"""Temporary replacement of torch's functions; the originals are restored even after an interrupt."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ubatch.process.interrupts import Mark, holding

Replacement = tuple[Any, str, Callable[..., Any], Callable[..., Any]]
"""The object that holds a function, the function's name, the function, and its replacement."""


class Patches:
    """Functions that are replaced while there is at least one user. Make one per module: it is never freed.

    Args:
        find: returns the replacements; called for the first user.
    """

    def __init__(self, find: Callable[[], Iterable[Replacement]]) -> None:
        self._find = find
        self._lock = threading.RLock()
        self._users: weakref.WeakSet[Mark] = weakref.WeakSet()
        self._replaced: list[Replacement] = []
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # a thread of the parent process may have held the old one

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
