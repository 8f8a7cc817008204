"""Allowed tokens, kept and sent in few bytes: they stay the same set, which reads like a tuple."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_runner import SamplingParams, TokenIds
from serving.engine.wire.messages import Add, Turn, decode_to_engine, decode_turn, encode
from serving.requests import RequestInput

VOCAB = 151_936


def params(ids: tuple[int, ...]) -> SamplingParams:
    return SamplingParams(allowed_token_ids=ids)


def sent(given: SamplingParams) -> SamplingParams:
    add = decode_to_engine(encode(Add(RequestInput("a", [1], given), 1)))
    assert isinstance(add, Add)
    return add.request.params


@given(st.lists(st.integers(0, 3000) | st.sampled_from([2**31, 2**62]), min_size=1, max_size=400))
def test_what_arrives_is_the_same_set(ids: list[int]) -> None:
    own, once = params(tuple(ids)), tuple(dict.fromkeys(ids))
    assert own.allowed_token_ids is not None
    assert (own.allowed_token_ids, tuple(own.allowed_token_ids)) == (once, once)
    got = sent(own)
    assert (got, hash(got)) == (own, hash(own))
    assert set(got.allowed_token_ids or ()) == set(ids)
    assert pickle.loads(pickle.dumps(own)) == own
    other = params((*ids, 7)) if 7 not in ids else params((8,))
    assert (own == other) is (set(ids) == set(other.allowed_token_ids or ()))


def test_it_reads_like_a_tuple() -> None:
    ids = params((5, 3, 5, 9)).allowed_token_ids
    assert ids is not None
    assert (len(ids), ids[1], ids[-1], ids[:2], list(ids)) == (3, 3, 9, (5, 3), [5, 3, 9])
    assert {type(token) for token in ids} == {int}
    assert (3 in ids, 4 in ids, "3" in ids) == (True, False, False)
    assert ids == (3, 5, 9)
    assert ids != (3, 5)
    assert repr(ids) == "(5, 3, 9)"


@pytest.mark.parametrize("count", [1, 2000, 3000, VOCAB])
def test_a_message_is_never_longer_than_a_bit_per_token(count: int) -> None:
    ids = tuple(np.random.default_rng(count).permutation(VOCAB)[:count].tolist())
    size = len(encode(Add(RequestInput("a", [1], params(ids)), 1)))
    assert size < 700 + min(8 * count, VOCAB // 8)
    assert sent(params(ids)) == params(ids)


def test_outputs_of_a_body_share_what_was_sent() -> None:
    own = params(tuple(range(VOCAB)))
    first, second = sent(replace(own, seed=1)), sent(replace(own, seed=2))
    assert first.allowed_token_ids is second.allowed_token_ids
    add = Add(RequestInput("a", [1], own), 1)
    (turned,) = decode_turn(encode(Turn(0, 0, [add]))).messages
    assert turned == add


def test_an_engine_takes_a_whole_vocabulary_in_little_time() -> None:
    """Between two steps: read, checked and made a mask. Some 1 ms; thousands of integers took 50."""
    taken = []
    for number in range(7):
        data = encode(Add(RequestInput("a", [1], params(tuple(range(number, VOCAB)))), 1))
        begin = time.process_time()
        add = decode_to_engine(data)
        assert isinstance(add, Add)
        own = add.request.params
        own.check_vocabulary(VOCAB)
        own.check_choice((1, 2))
        mask = own.never_mask(VOCAB, torch.device("cpu"))
        taken.append(time.process_time() - begin)
        assert int(mask.sum()) == number
    assert min(taken) < 0.005


def test_what_is_not_packed_is_refused() -> None:
    import msgspec

    fields = msgspec.msgpack.decode(encode(Add(RequestInput("a", [1], params((3,))), 1)))
    fields[1]["params"]["allowed_token_ids"] = [3]
    with pytest.raises(msgspec.ValidationError, match="TokenIds"):
        decode_to_engine(msgspec.msgpack.encode(fields))
    assert TokenIds.unpack(params((3,)).allowed_token_ids.packed) == (3,)  # type: ignore[union-attr]
