"""Tries grammars before a request runs, in bounded time and memory: in processes that can be ended.

A grammar of a few bytes can take hours, gigabytes, or crash the library that compiles it, and no thread can be stopped.
So each new grammar is compiled by a small program first (`trial`), with limits on its processor time and memory. What
passes there is compiled again by the engine, in about the same time. Verdicts are remembered.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import LifoQueue
from typing import TYPE_CHECKING

from model_runner import RequestError
from serving.requests import QueueFull
from serving.structured.grammar import After, grammar_text
from serving.structured.limits import LIMITS, MAX_COMPILE_BYTES, MAX_COMPILE_S, MAX_KNOWN, MAX_WAIT_S, MAX_WAITING
from serving.structured.params import StructuredOutputsParams
from serving.structured.writing import special_tokens
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
        self._making: dict[Hashable, _Making] = {}

    async def grammar(self, params: StructuredOutputsParams, after: After | None = None) -> str:
        """As `grammar_now`, while the event loop goes on. Equal ones that are asked for meanwhile are one.

        Raises:
            QueueFull: too many grammars wait to be tried.
        """
        key = _key(params, after)
        making = self._making.get(key)
        if making is None:
            making = _Making(_pool().submit(lambda: self.grammar_now(params, after)))
            self._making[key] = making
        making.num_waiting += 1
        try:
            return await asyncio.shield(asyncio.wrap_future(making.grammar))
        finally:
            making.num_waiting -= 1
            if making.num_waiting == 0:
                making.grammar.cancel()  # nothing, once it is made
                del self._making[key]

    def grammar_now(self, params: StructuredOutputsParams, after: After | None = None) -> str:
        """The text for `SamplingParams.grammar`, once it was tried.

        Args:
            after: what the output may begin with; see `grammar_text`.

        Raises:
            RequestError: it is not valid, or cannot be enforced within the limits; `param` is the field of `params`.
        """
        text = grammar_text(params)
        special = special_tokens(params.grammar) if params.grammar is not None else []
        self._check_special(special)
        fault = _pool().fault(text, special)
        if fault is not None and params.whitespace_pattern is not None:
            # it may be to blame itself
            alone = grammar_text(StructuredOutputsParams(regex=params.whitespace_pattern))
            if (own := _pool().fault(alone, ())) is not None:
                raise RequestError(own, param="whitespace_pattern")
        if fault is not None:
            raise RequestError(fault, param=params.kind)
        if after is None:
            return text
        # The library takes an added token that looks like a mark for a special one, whatever the tokenizer says.
        added = {token.content: number for number, token in self._tokenizer().added_tokens_decoder.items()}
        return grammar_text(params, after, special=added)

    def _check_special(self, names: Sequence[str]) -> None:
        added = self._tokenizer().added_tokens_decoder.values() if names else ()
        known = [token.content for token in added if token.special]
        for name in names:
            if name not in known:
                message = f"the grammar names {shown(name)}, which is no special token of this model. It has "
                raise RequestError(f"{message}{', '.join(known) or 'none'}.", param="grammar")


@dataclass
class _Making:
    """A grammar that is made for some requests with the same form."""

    grammar: Future[str]
    num_waiting: int = 0


def _key(params: StructuredOutputsParams, after: After | None) -> Hashable:
    """Equal for what gives the same grammar."""
    try:
        return hashlib.sha256(repr((params, after)).encode("utf-8", "surrogatepass")).digest()
    except RecursionError:  # nested too deeply; it will be refused
        return object()


class _Pool:
    """The processes that try grammars, for all of this process's checks, and what they found."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(PROCESSES, "grammars")
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, str | None] = OrderedDict()  # by the hash of a text, which may be long
        self._free: LifoQueue[_Trial] = LifoQueue()  # the last one that was used has its process
        for _ in range(PROCESSES):
            self._free.put(_Trial())
        self._waiting = 0

    def submit(self, make: Callable[[], str]) -> Future[str]:
        """Make a grammar in a thread; it has a place in the queue until then.

        Raises:
            QueueFull: `MAX_WAITING` places are in use.
        """
        with self._lock:
            if self._waiting >= MAX_WAITING:
                raise QueueFull(f"{self._waiting} grammars wait to be compiled already. Try again later.")
            self._waiting += 1
        made = self.threads.submit(make)
        made.add_done_callback(self._leave)
        return made

    def _leave(self, made: Future[str]) -> None:
        with self._lock:
            self._waiting -= 1

    def fault(self, grammar: str, special: Sequence[str]) -> str | None:
        """What is wrong with a grammar, if anything."""
        key = hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        trial = self._free.get()
        try:
            fault = trial.fault(grammar, special)
        finally:
            self._free.put(trial)
        with self._lock:
            self._known[key] = fault
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return fault

    def close(self) -> None:
        """End the processes that try nothing; another one ends after what it tries."""
        while not self._free.empty():
            self._free.get().end()


class _Trial:
    """One process that tries grammars; it is started for the first one, and again if one has ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def fault(self, grammar: str, special: Sequence[str]) -> str | None:
        """What is wrong with a grammar; called by one thread at a time."""
        if self._process is not None and self._process.poll() is not None:
            self.end()  # somebody else ended it
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
        # A session of its own: what interrupts the server must not make a grammar seem wrong.
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
        )
        return self._process

    def end(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(OSError), process:  # which closes its pipes, and waits for it
                process.kill()


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
