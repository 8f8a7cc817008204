"""Prompt lookup against a plain search from the end."""

from hypothesis import given
from hypothesis import strategies as st

from model_runner import Request, SamplingParams
from model_runner.speculation import Draft, NgramIndex, NgramProposer


def searched(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """The longest run first, the most recent place first."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                draft = list(tokens)
                for place in range(count):
                    draft.append(draft[start + length + place])
                return draft[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    steps=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    count=st.integers(0, 6),
)
def test_the_index_finds_what_a_search_finds(
    tokens: list[int], steps: list[int], shortest: int, more: int, count: int
) -> None:
    index = NgramIndex(shortest, shortest + more)
    length = 0
    for step in steps:  # the sequence grows by so many tokens between look-ups
        length += step
        seen = tokens[:length]
        assert index.draft(seen, count) == searched(seen, shortest, shortest + more, count)
    assert index.draft(tokens, count) == searched(tokens, shortest, shortest + more, count)


def test_the_proposer_keeps_an_index_per_request() -> None:
    proposer = NgramProposer(2, 4)
    first = Request(0, [1, 2, 3, 1, 2], SamplingParams())
    second = Request(1, [7, 8, 9, 7, 8], SamplingParams())
    assert proposer.propose([first, second], [2, 3]) == [Draft((3, 1)), Draft((9, 7, 8))]
    first.token_ids += [3, 1]
    assert proposer.propose([first], [2]) == [Draft((2, 3))]
    proposer.forget(first)
    proposer.forget(first)
    assert proposer.propose([second, first], [0, 1]) == [Draft(()), Draft((2,))]
