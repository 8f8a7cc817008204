"""How one thread wakes another: the primitive under every hand-off.

`eventfd` is used on Linux: a write and a read of eight bytes that release the GIL by themselves, three to five
times cheaper than a `threading.Event`. Elsewhere a raw lock does the same. `ubatch bench handoff` measures both
against an `Event` ring on your machine.

A forked child gets eventfds of its own: it must never wake, or take a wake-up from, its parent's threads.
"""

import os
import select
import threading
import weakref


class EventFdWakeUp:
    """A Linux eventfd, with which another thread wakes the one that waits. A `set` before the `wait` is not lost."""

    __slots__ = ("__weakref__", "_fd", "_owner", "_poll")

    def __init__(self) -> None:
        # Closed in C with its last reference: a Python `__del__` would swallow Ctrl-C.
        self._owner = select.epoll.fromfd(os.eventfd(0, os.EFD_CLOEXEC))
        self._fd = self._owner.fileno()
        self._poll: select.poll | None = None
        _eventfds.add(self)

    def set(self) -> None:
        """Let the waiter go on."""
        os.eventfd_write(self._fd, 1)

    def wait(self) -> None:
        """Wait until `set`, then clear it."""
        while True:
            try:
                os.eventfd_read(self._fd)
                return
            except InterruptedError:  # a signal whose handler did not raise
                continue

    def wait_for(self, seconds: float) -> bool:
        """Wait at most `seconds`; False if it was not set in that time."""
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._fd, select.POLLIN)
        if not self._poll.poll(max(0.0, seconds) * 1000):
            return False
        self.wait()
        return True

    def renew(self) -> None:
        """Replace the eventfd that is shared with the parent process."""
        own = os.eventfd(0, os.EFD_CLOEXEC)
        os.dup2(own, self._fd, inheritable=False)
        os.close(own)
        self._poll = None


_eventfds: weakref.WeakSet[EventFdWakeUp] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for wakeup in list(_eventfds):
        wakeup.renew()


os.register_at_fork(after_in_child=_after_fork_in_child)


class LockWakeUp:
    """A raw lock, for the same: held until `set` releases it. Works on every platform."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        if self._lock.locked():
            self._lock.release()

    def wait(self) -> None:
        self._lock.acquire()

    def wait_for(self, seconds: float) -> bool:
        return self._lock.acquire(timeout=max(0.0, seconds))


WakeUp = EventFdWakeUp | LockWakeUp


def make_wakeup() -> WakeUp:
    """The fastest wake-up of this platform."""
    return EventFdWakeUp() if hasattr(os, "eventfd") else LockWakeUp()


class Gate:
    """A barrier that opens when `parties` threads have arrived; reused in every step."""

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self._arrived = 0
        self._lock = threading.Lock()
        self._open = make_wakeup()

    def close_again(self) -> None:
        """Close the gate for the next step. Only the waiting thread may call this, between steps."""
        self._arrived = 0

    def arrive(self) -> None:
        """Report that one thread has arrived; the last one opens the gate."""
        with self._lock:
            self._arrived += 1
            last = self._arrived == self._parties
        if last:
            self._open.set()

    def wait_for(self, seconds: float) -> bool:
        """Wait at most `seconds` for the gate to open; returns whether it opened, which clears the wake-up."""
        return self._open.wait_for(seconds)
