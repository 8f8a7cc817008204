"""A program that tries grammars: it reads them, and answers what is wrong with each. `checks` starts it.

It is a process of its own because a grammar can take any time and memory, and can crash the library that compiles it:
the signal of its processor time ends it then, and nothing else. It imports llguidance alone, so it starts at once.

    to it:    length (8 bytes), {"grammar": text, "special": [names of special tokens that the text has]}
    from it:  length (8 bytes), {"error": what is wrong with the grammar; null if nothing is}
"""

import json
import resource
import signal
import sys
import time
from collections import deque
from statistics import median
from typing import Any, BinaryIO

import llguidance

LENGTH_BYTES = 8
SHOWN_CHARACTERS = 300
STEPS = 200
"""Bytes of a text that is begun, to see what steps cost: an object's names come after its bracket."""
MAX_STEP_S = 0.002
"""Most processor time of a step with this vocabulary, in seconds, as a median of `WINDOW` steps. Usual is 0.00002; a
real vocabulary takes some hundred times as long where a grammar is ambiguous."""
WINDOW = 8


class _Bytes:
    """A vocabulary of single bytes, an end of sequence, and some special tokens: compilation hardly depends on it."""

    bos_token_id = None

    def __init__(self, special: list[str]) -> None:
        self.tokens = [bytes([value]) for value in range(256)] + [name.encode() for name in ("<end>", *special)]
        self.eos_token_id = 256
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def fault(grammar: str, special: list[str], limits: llguidance.LLParserLimits) -> str | None:
    """What is wrong with a grammar, if anything."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(special)))
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        return _shown(matcher.get_error())
    accepting = matcher.is_accepting()
    begins = any(matcher.compute_bitmask())
    if accepting or (begins and not matcher.is_error()):
        return _walked(matcher)
    reason = _shown(matcher.get_error()) or matcher.stop_reason()
    return "no text fits it" if reason.startswith("NoExtension") else f"its first step takes too much ({reason})"


def _walked(matcher: llguidance.LLMatcher) -> str | None:
    """What is wrong after the first step, if anything: a text is begun, the same one each time."""
    took: deque[float] = deque(maxlen=WINDOW)
    for step in range(STEPS):
        begun = time.thread_time()
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(256) if mask[token // 8] >> token % 8 & 1]
        if allowed:
            matcher.consume_token(allowed[step * 7919 % len(allowed)])  # a prime: all over the range
        if matcher.is_error():
            return f"a step takes too much, after {step + 1} bytes ({_shown(matcher.get_error())})"
        if not allowed or matcher.is_stopped():
            break
        took.append(time.thread_time() - begun)
        if len(took) == WINDOW and median(took) > MAX_STEP_S:
            return f"its steps take ever longer, as a text can be read in many ways ({step + 1} bytes)"
    return None


def _shown(error: str) -> str:
    """The first lines of the library's message, on one."""
    text = " ".join(error.split("<state>")[0].split())
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def main(settings: dict[str, Any], source: BinaryIO, sink: BinaryIO) -> None:
    """Answer until the source ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (settings["bytes"], settings["bytes"]))
    limits = llguidance.LLParserLimits(**settings["limits"])
    while length := source.read(LENGTH_BYTES):
        asked = json.loads(source.read(int.from_bytes(length, "little")))
        signal.setitimer(signal.ITIMER_PROF, settings["seconds"])  # its signal ends the process
        try:
            error = fault(asked["grammar"], asked["special"], limits)
        except Exception as failure:  # a fault of the library: it is the grammar that brought it about
            error = _shown(str(failure))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = json.dumps({"error": error}).encode()
        sink.write(len(answer).to_bytes(LENGTH_BYTES, "little") + answer)
        sink.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
