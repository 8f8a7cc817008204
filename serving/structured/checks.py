"""Tries grammars before a request runs, in bounded time and memory: in processes that can be ended.

A grammar of a few bytes can take hours, gigabytes, or crash the library that compiles it, and no thread can be stopped.
So each new grammar is compiled by a small program first (`trial`), with limits on its processor time and memory. What
passes there is compiled again by the engine, in about the same time. Verdicts are remembered.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from model_runner import RequestError
from serving.requests import QueueFull
from serving.structured.grammar import grammar_text
from serving.structured.lark import special_tokens
from serving.structured.limits import (
    LIMITS,
    MAX_COMPILE_BYTES,
    MAX_COMPILE_S,
    MAX_KNOWN,
    MAX_WAIT_S,
    MAX_WAITING,
)
from serving.structured.params import StructuredOutputsParams
from ubatch.errors import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROCESSES = 2
"""Grammars that are tried at once: one that takes long does not hold up all others."""
_LENGTH_BYTES = 8
_COSTS = f"it takes more than {MAX_COMPILE_S:g} s or {MAX_COMPILE_BYTES >> 20} MiB to compile. Make it smaller."


class GrammarChecks:
    """From what users ask for to grammars that compile.

    Args:
        tokenizer: gives the tokenizer whose special tokens grammars may name.
    """

    def __init__(self, tokenizer: Callable[[], PreTrainedTokenizerBase]) -> None:
        self._tokenizer = tokenizer
        self.refused = 0
        self.taken = 0

    async def grammar(self, params: StructuredOutputsParams, after: str | None = None) -> str:
        """As `grammar_now`, while the event loop goes on.

        Raises:
            QueueFull: too many grammars wait to be tried.
        """
        pool = _pool()
        with pool.place():
            return await asyncio.wrap_future(pool.threads.submit(self.grammar_now, params, after))

    def grammar_now(self, params: StructuredOutputsParams, after: str | None = None) -> str:
        """The text for `SamplingParams.grammar`, once it was tried.

        Args:
            after: the output begins with any text up to this one; what is asked for comes then.

        Raises:
            RequestError: it is not valid, or cannot be enforced within the limits; `param` is the field of `params`.
        """
        try:
            text = grammar_text(params)
            special = special_tokens(params.grammar) if params.grammar is not None else []
            self._check_special(special)
            fault = _pool().fault(text, special)
            if fault is not None:
                raise RequestError(fault, param=params.kind)
        except RequestError:
            self.refused += 1
            raise
        self.taken += 1
        return text if after is None else grammar_text(params, after, after_id=self._special().get(after))

    def _special(self) -> dict[str, int]:
        added = self._tokenizer().added_tokens_decoder
        return {token.content: number for number, token in added.items() if token.special}

    def _check_special(self, names: Sequence[str]) -> None:
        known = self._special() if names else {}
        for name in names:
            if name not in known:
                message = f"the grammar names {shown(name)}, which is no special token of this model. It has "
                raise RequestError(f"{message}{', '.join(known) or 'none'}.", param="grammar")


class _Pool:
    """The processes that try grammars, for all of this process's checks, and what they found."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(PROCESSES, "grammars")
        self._lock = threading.Lock()
        self._known: OrderedDict[str, str | None] = OrderedDict()
        self._free = [_Trial() for _ in range(PROCESSES)]
        self._is_free = threading.Condition(self._lock)
        self._waiting = 0

    def place(self) -> _Place:
        """A place in the queue, as a context.

        Raises:
            QueueFull: at its entry, if `MAX_WAITING` are in use.
        """
        return _Place(self._wait)

    def _wait(self, count: int) -> None:
        with self._lock:
            if count > 0 and self._waiting >= MAX_WAITING:
                raise QueueFull(f"{self._waiting} grammars wait to be compiled already. Try again later.")
            self._waiting += count

    def fault(self, grammar: str, special: Sequence[str]) -> str | None:
        """What is wrong with a grammar, if anything."""
        with self._lock:
            if grammar in self._known:
                self._known.move_to_end(grammar)
                return self._known[grammar]
            while not self._free:
                self._is_free.wait()
            trial = self._free.pop()
        try:
            fault = trial.fault(grammar, special)
        finally:
            with self._lock:
                self._free.append(trial)
                self._is_free.notify()
        with self._lock:
            self._known[grammar] = fault
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return fault

    def close(self) -> None:
        """End the processes."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for trial in self._free:
            trial.end()


class _Place:
    def __init__(self, wait: Callable[[int], None]) -> None:
        self._wait = wait

    def __enter__(self) -> None:
        self._wait(1)

    def __exit__(self, *about: object) -> None:
        self._wait(-1)


class _Trial:
    """One process that tries grammars; it is started for the first one, and again if one has ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def fault(self, grammar: str, special: Sequence[str]) -> str | None:
        """What is wrong with a grammar; called by one thread at a time."""
        process = self._process or self._start()
        timer = threading.Timer(MAX_WAIT_S, process.kill)
        timer.start()
        try:
            answer = _ask(process, json.dumps({"grammar": grammar, "special": list(special)}).encode())
        finally:
            timer.cancel()
        if answer is None:
            self.end()
            return _COSTS
        error: str | None = json.loads(answer)["error"]
        return None if error is None else f"{error}."

    def _start(self) -> subprocess.Popen[bytes]:
        settings = {"limits": LIMITS, "seconds": MAX_COMPILE_S, "bytes": MAX_COMPILE_BYTES}
        program = str(Path(__file__).with_name("trial.py"))
        # -P: the program's own folder is no place to import from
        command = [sys.executable, "-P", program, json.dumps(settings)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        return self._process

    def end(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            process.wait()


def _ask(process: subprocess.Popen[bytes], question: bytes) -> bytes | None:
    """The answer of a process; None if it ended."""
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        return None
    try:
        stdin.write(len(question).to_bytes(_LENGTH_BYTES, "little") + question)
        stdin.flush()
        length = stdout.read(_LENGTH_BYTES)
        return stdout.read(int.from_bytes(length, "little")) if len(length) == _LENGTH_BYTES else None
    except OSError:
        return None


@cache
def _pool() -> _Pool:
    pool = _Pool()
    atexit.register(pool.close)
    return pool
