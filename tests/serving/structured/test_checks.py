"""Grammars are tried in bounded time and memory, whatever is in them, and the event loop goes on meanwhile."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from model_runner import RequestError
from serving.requests import QueueFull
from serving.structured import GrammarChecks, Preamble, StructuredOutputsParams, checks, grammar_text

TOKENIZER: Any = SimpleNamespace(
    added_tokens_decoder={
        7: SimpleNamespace(content="</think>", special=True),
        8: SimpleNamespace(content="<plain>", special=False),
    }
)


def pool() -> Any:
    return checks._pool()


@pytest.fixture
def grammars() -> GrammarChecks:
    return GrammarChecks(lambda: TOKENIZER)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What every trial waits for; no grammar is tried."""
    gate = threading.Event()
    monkeypatch.setattr(checks._Trial, "fault", lambda *about: None if gate.wait(60) else "the gate is closed")
    yield gate
    gate.set()


def asked(**form: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**form)


def chain(count: int) -> str:
    """A grammar whose compilation overflows the stack of the library, which ends its process."""
    return "\n".join(("start: r0", *(f"r{number}: r{number + 1}" for number in range(count)), f'r{count}: "a"'))


def doubling(levels: int) -> dict[str, Any]:
    """A schema whose references are intersected with what is beside them, twice each: time and memory double."""
    again = [{"$ref": f"#/$defs/d{number + 1}", "minItems": 1} for number in range(levels)]
    defs: dict[str, Any] = {f"d{n}": {"type": "array", "prefixItems": [inner] * 2} for n, inner in enumerate(again)}
    return {"$defs": {**defs, f"d{levels}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def references(count: int) -> dict[str, Any]:
    """A schema whose references lead from one to the next."""
    defs: dict[str, Any] = {f"d{number}": {"items": {"$ref": f"#/$defs/d{number + 1}"}} for number in range(count)}
    return {"$defs": {**defs, f"d{count}": {}}, "$ref": "#/$defs/d0"}


NAMES: dict[str, Any] = {f"prop{n}": {} for n in range(1000)}
CONST = {"type": "const_string", "value": "x"}


def repeated(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "repeat", "min": 0, "max": 1000, "content": content}


HOSTILE: dict[str, dict[str, Any]] = {
    "crashes": {"grammar": chain(12_000)},
    "takes hours": {"json": doubling(30)},
    "refers too far": {"json": references(3000)},
    "doubles": {"grammar": "start: R0\n" + "\n".join(f"R{n}: R{n + 1} R{n + 1}" for n in range(40)) + '\nR40: "a"'},
    "intersects": {"json": {"allOf": [{"anyOf": [{"required": [f"{n}{m}"]} for m in range(4)]} for n in range(12)]}},
    "has too many names": {"json": {"type": "object", "properties": NAMES}},
    "is read in many ways": {"grammar": 'start: e\ne: e e e | e e | "a" |'},
    "is read in ever more ways": {"grammar": 'start: e\ne: e e | "a" | "b"'},
    "repeats": {"regex": "(a{1,1000}){1,1000}"},
    "has huge bounds": {"regex": "a{1000000}"},
    "has bounds of bounds": {"regex": "((a{1000}){1000}){1000}"},
    "has no end": {"grammar": 'start: "a" start'},
    "repeats within repeats": {"structural_tag": {"format": repeated(repeated({"type": "star", "content": CONST}))}},
    "is empty": {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
    "never ends": {"grammar": "start: x\nx: y\ny: x"},
    "refers to itself": {"json": {"$ref": "#"}},
    "is no regex": {"regex": "("},
    "is no grammar": {"grammar": "start: nobody"},
}
FINE: dict[str, dict[str, Any]] = {
    "has unicode classes": {"regex": r"(?i)(\p{L}|\u00df){1,500}\P{Lu}{500}"},
    "nests quantifiers": {"regex": "((((a*)*)*)*)*b"},
    "doubles its states": {"regex": "(a|b)*a(a|b){200}"},
    "is left-recursive": {"grammar": 'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/'},
    "has many choices": {"choice": [f"{number:05}" for number in range(30_000)]},
    "has tags whose triggers end alike": {
        "structural_tag": {
            "format": {
                "type": "triggered_tags",
                "triggers": ["ab", "b"],
                "tags": [{"type": "tag", "begin": begin, "content": CONST, "end": "e"} for begin in ("ab=", "b=")],
            }
        }
    },
    "looks ambiguous": {"regex": "(.*a.*){20}"},
    "has long arrays": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
    "has long texts": {"json": {"type": "string", "maxLength": 10**12}},
    "has many names": {"json": {"type": "object", "properties": {f"prop{n}": {} for n in range(490)}}},
    "has many required names": {"json": {"type": "object", "properties": NAMES, "required": [*NAMES]}},
    "refers far": {"json": references(100)},
}


@pytest.mark.long
@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_hostile_is_refused_in_bounded_time(grammars: GrammarChecks, what: str) -> None:
    before = time.process_time()
    with pytest.raises(RequestError) as wrong:
        grammars.grammar_now(asked(**HOSTILE[what]))
    assert wrong.value.param == next(iter(HOSTILE[what]))
    assert time.process_time() - before < 1, "in this process"
    assert grammars.grammar_now(asked(regex="a|b")), "the next one is served"


@pytest.mark.parametrize("what", FINE)
def test_what_only_looks_so_is_taken(grammars: GrammarChecks, what: str) -> None:
    assert grammars.grammar_now(asked(**FINE[what]))


def test_verdicts_are_remembered(grammars: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = asked(regex="remembered"), asked(regex="remembered(")
    text = grammars.grammar_now(good)
    with pytest.raises(RequestError):
        grammars.grammar_now(bad)
    monkeypatch.setattr(checks._Trial, "fault", lambda *about: pytest.fail("it is tried again"))
    assert grammars.grammar_now(good) == text
    with pytest.raises(RequestError, match="unclosed group"):
        grammars.grammar_now(bad)


def test_the_oldest_verdicts_are_forgotten(grammars: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_KNOWN", len(pool()._known))
    monkeypatch.setattr(checks._Trial, "fault", lambda *about: None)
    for number in range(3):
        grammars.grammar_now(asked(regex=f"forgotten{number}"))
    assert len(pool()._known) == checks.MAX_KNOWN


def test_a_process_that_ends_is_started_again(grammars: GrammarChecks) -> None:
    grammars.grammar_now(asked(regex="started"))
    for trial in pool()._free.queue:
        if trial._process is not None:
            os.kill(trial._process.pid, signal.SIGKILL)
            trial._process.wait()
    for number in range(checks.PROCESSES):
        assert grammars.grammar_now(asked(regex=f"started again{number}"))


def test_the_loop_goes_on_and_the_queue_is_bounded(
    grammars: GrammarChecks, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "MAX_WAITING", 3)

    async def run() -> list[str]:
        waiting = [asyncio.create_task(grammars.grammar(asked(regex=f"waits{number}"))) for number in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="3 grammars wait"):
            await grammars.grammar(asked(regex="one too many"))
        assert not any(task.done() for task in waiting)
        gate.set()
        return await asyncio.gather(*waiting)

    assert asyncio.run(run()) == [grammar_text(asked(regex=f"waits{number}")) for number in range(3)]


def test_equal_ones_take_one_place(
    grammars: GrammarChecks, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"regex": "equal"}
    monkeypatch.setattr(checks, "MAX_WAITING", 1)

    async def run() -> list[str]:
        waiting = [asyncio.create_task(grammars.grammar(asked(**form))) for _ in range(200)]
        await asyncio.sleep(0)
        waiting.pop(0).cancel()  # the one that began it
        gate.set()
        return await asyncio.gather(*waiting)

    assert asyncio.run(run()) == [grammar_text(asked(**form))] * 199
    assert not grammars._making
    assert not pool()._waiting


def test_what_nobody_waits_for_leaves_the_queue(grammars: GrammarChecks, gate: threading.Event) -> None:

    async def run() -> int:
        waiting = [asyncio.create_task(grammars.grammar(asked(regex=f"left{number}"))) for number in range(5)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return int(pool()._waiting)

    assert asyncio.run(run()) <= checks.PROCESSES, "only those that were being tried"


def test_special_tokens(grammars: GrammarChecks) -> None:
    assert grammars.grammar_now(asked(grammar='start: </think> "a"'))
    for name in ("<plain>", "<|nobody|>"):
        with pytest.raises(RequestError, match=r"no special token of this model\. It has </think>"):
            grammars.grammar_now(asked(grammar=f'start: {name} "a"'))
    assert "<[7]>" in grammars.grammar_now(asked(regex="a"), Preamble("<think>", "</think>"))
    assert "<[8]>" in grammars.grammar_now(asked(regex="a"), Preamble("<x>", "<plain>")), (
        "added, and so special to llguidance"
    )
    assert "suffix=" in grammars.grammar_now(asked(regex="a"), Preamble("<x>", "<no token>"))
