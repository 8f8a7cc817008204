"""Stop strings against the plain reference: the first end of any of them in the whole text."""

import tracemalloc
from typing import Any

import pytest
from api_clients import tokenizer
from hypothesis import example, given
from hypothesis import strategies as st

from model_runner import RequestError
from serving.text.detokenizer import TextStream
from serving.text.words import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, StopMatcher

CHARACTERS = "abé🎉"
STRINGS = st.lists(st.text(alphabet=CHARACTERS, min_size=1, max_size=6), max_size=5)


def first_end(text: str, stop: list[str], after: int = 0) -> tuple[int, str] | None:
    """(end, stop string) of the first that ends after some characters; the longest of those that end there."""
    for end in range(after + 1, len(text) + 1):
        ending = [each for each in stop if text[:end].endswith(each)]
        if ending:
            return end, max(ending, key=len)
    return None


def held(text: str, stop: list[str]) -> int:
    """The longest end of the text that is a proper beginning of a stop string."""
    sizes = range(len(text) + 1)
    return max(
        size
        for size in sizes
        if any(each.startswith(text[len(text) - size :]) for each in ["x", *stop] if size < len(each))
    )


@given(
    stop=STRINGS,
    passed=st.lists(st.text(alphabet=CHARACTERS, max_size=6), max_size=6),
    parts=st.lists(st.text(alphabet=CHARACTERS, max_size=6), max_size=8),
)
@example(stop=["abab"], passed=["abab"], parts=["ab"])
@example(stop=["aab", "ab"], passed=[], parts=["aa", "ab"])
def test_the_first_complete_one_is_found(stop: list[str], passed: list[str], parts: list[str]) -> None:
    """Also one that began in what was passed over; and no more is held than may still become one."""
    matcher = StopMatcher(stop)
    text = ""
    for part in passed:
        assert matcher.feed(part, counts=False) is None
        text += part
        assert matcher.held == held(text, stop)
    for part in parts:
        expected = first_end(text + part, stop, len(text))
        assert matcher.feed(part) == (None if expected is None else (expected[0] - len(text), expected[1]))
        if expected is not None:
            return
        text += part
        assert matcher.held == held(text, stop)


@given(
    written=st.lists(st.text(alphabet=CHARACTERS, min_size=1, max_size=6), max_size=6),
    cut=st.integers(0, 3),
    stop=STRINGS,
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
    sizes=st.lists(st.integers(0, 4), max_size=12),
)
@example(written=["Hello"], cut=0, stop=["o", "lo", "elo", "xlo"], include=False, min_tokens=0, sizes=[9])
@example(written=["Hello"], cut=0, stop=["lo", "ell"], include=False, min_tokens=0, sizes=[])
def test_a_stream_ends_where_the_whole_text_says(
    written: list[str], cut: int, stop: list[str], include: bool, min_tokens: int, sizes: list[int]
) -> None:
    """However the tokens come in: of several characters, or several of them a character, the last maybe incomplete."""
    tiny: Any = tokenizer()
    ids = [token for part in written for token in tiny.encode(part)]
    ids = ids[: len(ids) - cut]
    plain = TextStream(tiny)
    ends = [0]  # of the text, after each token
    for token in ids:
        plain.push([token])
        ends.append(len(plain.text))
    plain.push([], finished=True)
    uncounted = ends[min(min_tokens, len(ids))] if min_tokens < len(ids) else len(plain.text)
    found = first_end(plain.text, stop, uncounted)
    expected = plain.text
    if found is not None:
        expected = plain.text[: found[0] if include else found[0] - len(found[1])]
    stream = TextStream(tiny, stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    given_out, place = "", 0
    for size in [*sizes, *[1] * len(ids)]:
        given_out += stream.push(ids[place : place + size])
        place += size
        assert expected.startswith(given_out)
    given_out += stream.push([], finished=True)
    assert (given_out, stream.text) == (expected, expected)
    assert stream.stopped == (None if found is None else found[1])
    if found is not None:
        assert stream.num_tokens == next((place for place, end in enumerate(ends) if end >= found[0]), len(ids))
    assert stream.push([], finished=True) == ""


def test_memory_is_linear_in_the_strings() -> None:
    """As many and as long ones as are taken, for several outputs; each would cost 500 kB as all its beginnings."""
    stop = [chr(97 + place % 26) * place + "b" * (MAX_STOP_CHARACTERS - place) for place in range(MAX_STOP_STRINGS)]
    tiny = tokenizer()
    TextStream(tiny, stop=["a"])
    tracemalloc.start()
    try:
        streams = [TextStream(tiny, stop=stop) for _ in range(8)]
        streams[0].push(tiny.encode("aaab" * 100))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(
    ("stop", "why"),
    [
        (["a", ""], "empty"),
        (["a" * (MAX_STOP_CHARACTERS + 1)], "1001 characters"),
        (["a"] * (MAX_STOP_STRINGS + 1), "65 strings"),
        ([5], "must be strings, not 5"),
    ],
)
def test_what_cannot_work_is_refused(stop: list[Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        TextStream(tokenizer(), stop=stop)
