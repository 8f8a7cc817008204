"""Triton's interpreter as a device on which programs run at once, and some of them never start.

The interpreter runs program after program, so that the first one would take all that a counter gives out. Here every
program that starts has a thread; one runs at a time, and at each of its atomic operations hands on to the next.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any
from unittest import mock

from triton.runtime import interpreter


class Programs:
    """What `GridExecutor` calls for every program of a grid: it begins when the last one is called.

    Args:
        kernel: the interpreted function.
        count: programs of the grid.
        absent: those that never start.

    Attributes:
        atomics: what each program's atomic additions returned.
    """

    def __init__(self, kernel: FunctionType, count: int, absent: Collection[int]) -> None:
        self.kernel, self.count = kernel, count
        # What the interpreter looks at.
        self.__name__, self.__globals__ = kernel.__name__, kernel.__globals__
        self.__signature__ = inspect.signature(kernel)
        self.atomics: dict[int, list[int]] = {program: [] for program in range(count) if program not in absent}
        self._called = 0
        self._turns = {program: threading.Event() for program in self.atomics}
        self._alive = list(self.atomics)
        self._running = -1
        self._error: BaseException | None = None

    def __call__(self, **arguments: Any) -> None:
        self._called += 1
        if self._called < self.count:
            return
        threads = [threading.Thread(target=self._run, args=(program, arguments)) for program in self.atomics]
        for thread in threads:
            thread.start()
        if threads:
            self._give(self._alive[0])
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, program: int, arguments: dict[str, Any]) -> None:
        self._turns[program].wait()
        self._turns[program].clear()
        try:
            if self._error is None:
                self.kernel(**arguments)
        except BaseException as error:
            self._error = error
        place = self._alive.index(program)
        self._alive.remove(program)
        if self._alive:
            self._give(self._alive[place % len(self._alive)])

    def _give(self, program: int) -> None:
        interpreter.interpreter_builder.set_grid_idx(program, 0, 0)
        self._running = program
        self._turns[program].set()

    def pause(self, returned: int | None = None) -> None:
        """The program that runs is at an atomic operation, which returns this: the next one's turn."""
        program = self._running
        if returned is not None:
            self.atomics[program].append(returned)
        self._give(self._alive[(self._alive.index(program) + 1) % len(self._alive)])
        self._turns[program].wait()
        self._turns[program].clear()


class Device:
    """Kernels of one name run like that, in a `with` block.

    Args:
        kernel: the name.
        absent: of a grid's number of programs, those that never start.

    Attributes:
        launches: of that kernel.
    """

    def __init__(self, kernel: str, absent: Callable[[int], Collection[int]]) -> None:
        self.launches: list[Programs] = []
        self._kernel, self._absent = kernel, absent
        self._inside: Programs | None = None

    def __enter__(self) -> Device:
        run, add = interpreter.GridExecutor.__call__, interpreter.interpreter_builder.create_atomic_rmw

        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            if executor.fn.__name__ != self._kernel:
                run(executor, *args, **kwargs)
                return
            kernel = executor.fn
            self._inside = Programs(kernel, executor.grid[0], self._absent(executor.grid[0]))
            self.launches.append(self._inside)
            try:
                executor.fn = self._inside
                run(executor, *args, **kwargs)
            finally:
                executor.fn, self._inside = kernel, None

        def atomic(op: Any, *operands: Any) -> Any:
            result = add(op, *operands)
            if self._inside is not None:
                self._inside.pause(int(result.data.item()) if "ADD" in str(op) else None)
            return result

        self._patches = (
            mock.patch.object(interpreter.GridExecutor, "__call__", launch),
            mock.patch.object(interpreter.interpreter_builder, "create_atomic_rmw", atomic),
        )
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        for patch in self._patches:
            patch.stop()
