"""Sampling parameters: what cannot be is refused where it is made, by name; what is meant is taken.

Allowed tokens are kept and sent in few bytes: they stay the same set, which reads like a tuple.
"""

import enum
import pickle
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_runner import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, RequestError, SamplingParams, TokenIds
from serving.engine.wire.messages import Add, Turn, decode_to_engine, decode_turn, encode
from serving.requests import RequestInput


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -2}, "top_k must be at least 1, or 0 or -1 for all tokens, not -2"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, not 1.1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1, not -0.1"),
        ({"min_p": float("nan")}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty must be from -2 to 2, not 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"repetition_penalty": 10**400}, "repetition_penalty must be positive"),
        ({"logit_bias": ((-1, 1.0),)}, "a token of logit_bias must be 0 or more, not -1"),
        ({"logit_bias": ((3, 101.0),)}, "logit_bias of token 3 must be from -100 to 100, not 101.0"),
        ({"stop_token_ids": (2, -1)}, "a token of stop_token_ids must be 0 or more, not -1"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, r"min_tokens must be from 0 to max_tokens \(16\), not 17"),
        ({"logprobs": 1025}, "logprobs must be from 0 to 1024, not 1025"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 1025}, "prompt_logprobs"),
        ({"seed": 2**64}, "seed must be within 64 bits, not 18446744073709551616"),
        ({"seed": 10**5000}, "seed must be within 64 bits"),
        ({"allowed_token_ids": ()}, "allowed_token_ids is empty; give at least one token"),
        ({"allowed_token_ids": (3, -1)}, "a token of allowed_token_ids must be 0 or more, not -1"),
        ({"allowed_token_ids": (2**63,)}, "a token of allowed_token_ids must be 0 or more, not 92233"),
        ({"allowed_token_ids": (3, 3), "stop_token_ids": (3, 4), "min_tokens": 1}, "leaves no token: .*min_tokens"),
        (
            {
                "allowed_token_ids": (3, 4, 5),
                "stop_token_ids": (3,),
                "min_tokens": 2,
                "bad_token_sequences": ((4,), (5,)),
            },
            r"leaves no token: each is a bad one, or would end the output before min_tokens \(2\)\.$",
        ),
        ({"allowed_token_ids": (4,), "bad_token_sequences": ((4,),)}, r"leaves no token: each is a bad one\.$"),
        ({"bad_token_sequences": ((),)}, "a sequence of bad_token_sequences is empty"),
        ({"bad_token_sequences": ((3, -1),)}, "a token of a sequence of bad_token_sequences must be 0 or more"),
        ({"bad_token_sequences": ((3,),) * 257}, "bad_token_sequences has 257 entries; at most 256"),
        ({"bad_token_sequences": ((3,) * 4097,)}, "bad_token_sequences has 4097 tokens in all; at most 4096"),
    ],
)
def test_values_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


INTEGERS = ("top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
NO_INTEGERS = (2.5, 2.0, "2", True, [2], np.float32(2), torch.tensor(2.0), torch.tensor([2]), np.array([2]), 2j)
NO_NUMBERS = ("0.5", True, None, [0.5], np.True_, np.array([0.5]), torch.tensor([0.5]), torch.tensor(True), 0.5j)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        *((name, value, "an integer") for name in INTEGERS for value in NO_INTEGERS),
        *((name, value, "a number") for name in NUMBERS for value in NO_NUMBERS),
        *((name, None, "an integer") for name in ("top_k", "max_tokens", "min_tokens")),
        *(("ignore_eos", value, "True or False") for value in (1, 0.0, "yes", None)),
        *(("stop_token_ids", value, "token ids") for value in (3, None, "34", b"34", torch.tensor(3))),
        *(("stop_token_ids", [value], "an integer") for value in (3.0, "3", True, None)),
        *(("allowed_token_ids", value, "token ids") for value in (3, "34", b"34", torch.tensor(3))),
        *(("allowed_token_ids", [0, value], "an integer") for value in (3.0, "3", True, None, np.float32(3))),
        *(("bad_token_sequences", value, "sequences of token ids") for value in (3, None, "34")),
        *(("bad_token_sequences", [value], "token ids") for value in (3, None, "34")),
        *(("bad_token_sequences", [[1, value]], "an integer") for value in (3.0, "3", True, None)),
        *(("logit_bias", value, "logit_bias must be pairs") for value in (3, None, "3")),
        *(("logit_bias", value, "must be a token and a number") for value in ([3], [(3,)], ["31"], {1, 2})),
        ("logit_bias", [(3, 1.0, 2.0)], "an entry of logit_bias has 3 entries"),
        *(("logit_bias", {token: 1.0}, "an integer") for token in ("3", 3.0, True)),
        *(("logit_bias", {3: bias}, "logit_bias of token 3 must be a number") for bias in ("1", True, None)),
    ],
    ids=repr,
)
def test_wrong_types_are_refused_by_name(name: str, value: object, wanted: str) -> None:
    with pytest.raises(RequestError, match=wanted) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)


def test_the_message_has_the_field_the_value_and_what_is_allowed() -> None:
    with pytest.raises(RequestError, match=r"^max_tokens must be an integer, at least 1, not 2\.5 \(float\)\.$"):
        SamplingParams(max_tokens=2.5)  # type: ignore[arg-type]


class Few(enum.IntEnum):
    TWO = 2


@pytest.mark.parametrize("two", [2, np.int64(2), np.uint8(2), torch.tensor(2), Few.TWO], ids=repr)
def test_numbers_of_the_right_kind_become_pythons(two: Any) -> None:
    values: dict[str, Any] = dict.fromkeys((*INTEGERS, "temperature", "presence_penalty", "repetition_penalty"), two)
    params = SamplingParams(**values, stop_token_ids=[two], logit_bias={two: two})  # type: ignore[arg-type]
    assert all(type(getattr(params, name)) is int for name in INTEGERS)
    assert type(params.temperature) is type(params.repetition_penalty) is float
    assert (params.stop_token_ids, params.logit_bias) == ((2,), ((2, 2.0),))
    assert [type(number) for number in (*params.stop_token_ids, *params.logit_bias[0])] == [int, int, float]
    for half in (np.float32(0.5), np.float16(0.5), torch.tensor(0.5)):
        assert SamplingParams(top_p=half) == SamplingParams(top_p=0.5)  # type: ignore[arg-type]
    assert SamplingParams(ignore_eos=np.True_).ignore_eos is True  # type: ignore[arg-type]


def test_a_temperature_below_1e5_is_greedy() -> None:
    assert SamplingParams(temperature=9e-6).greedy
    assert SamplingParams(temperature=9e-6).plain
    assert not SamplingParams(temperature=1e-5).greedy


def test_allowed_and_bad_tokens_are_kept_once_and_checked_once() -> None:
    tokens = [5, np.int64(3), torch.tensor(5), Few.TWO]
    params = SamplingParams(allowed_token_ids=tokens, bad_token_sequences=([4, 4], (4, 4), np.array([4])))  # type: ignore[arg-type]
    assert (params.allowed_token_ids, params.bad_token_sequences) == ((5, 3, 2), ((4, 4), (4,)))
    assert {type(token) for token in params.allowed_token_ids or ()} == {int}
    assert replace(params, seed=1).allowed_token_ids is params.allowed_token_ids
    device = torch.device("cpu")
    assert params.never_mask(7, device).tolist() == [True, True, False, False, True, False, True]
    assert params.never_mask(7, device) is params.never_mask(7, device), "made once"
    assert SamplingParams(bad_token_sequences=((1,), (2, 0))).never_mask(3, device).tolist() == [False, True, False]
    with pytest.raises(RequestError, match="allowed_token_ids has token 5; the vocabulary is 0 to 4"):
        params.check_vocabulary(5)
    with pytest.raises(RequestError, match="bad_token_sequences has token 4"):
        SamplingParams(bad_token_sequences=((1, 4),)).check_vocabulary(4)
    assert repr(params.allowed_token_ids) == "(5, 3, 2)"
    many = SamplingParams(allowed_token_ids=tuple(range(100_000)))
    assert "14, 15, ... 100000 tokens)" in repr(many)
    assert len(repr(many)) < 1000
    # What ends the output matters only where it must not come yet.
    SamplingParams(allowed_token_ids=(3,), stop_token_ids=(3,))
    for ignore_eos in (False, True):
        early = SamplingParams(allowed_token_ids=(3, 4), min_tokens=1, ignore_eos=ignore_eos, stop_token_ids=(4,))
        early.check_choice(())
        with pytest.raises(
            RequestError, match=r"no token: each would end the output before min_tokens \(1\)\.$"
        ) as caught:
            early.check_choice((3,))
        assert caught.value.param == "allowed_token_ids"
    with pytest.raises(RequestError, match="leaves no token"):
        SamplingParams(allowed_token_ids=(3,), min_tokens=1).check_choice((3,))


def test_what_needs_the_tokens_before() -> None:
    """Sampling waits for them in the overlap loop; it does not for masks that never change."""
    assert not SamplingParams(allowed_token_ids=(1, 2), bad_token_sequences=((3,),)).needs_history
    assert SamplingParams(bad_token_sequences=((3, 4),)).needs_history
    for params in ({"allowed_token_ids": (1,)}, {"bad_token_sequences": ((3,),)}, {"bad_token_sequences": ((3, 4),)}):
        assert SamplingParams(**params).adjusts  # type: ignore[arg-type]
        assert not SamplingParams(**params).plain  # type: ignore[arg-type]


def test_tokens_are_kept_once_and_are_not_many() -> None:
    params = SamplingParams(stop_token_ids=(5, 3, 5), logit_bias=((7, 1.0), (2, 3.0), (7, -4.0)))
    assert params.stop_token_ids == (5, 3)
    assert params.logit_bias == ((7, -4.0), (2, 3.0)), "the last one of a token counts"
    SamplingParams(stop_token_ids=range(MAX_STOP_TOKEN_IDS))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="stop_token_ids has 129 entries; at most 128 are allowed"):
        SamplingParams(stop_token_ids=(1,) * (MAX_STOP_TOKEN_IDS + 1))
    with pytest.raises(RequestError, match="logit_bias has 1025 entries; at most 1024 are allowed"):
        SamplingParams(logit_bias=tuple((token, 1.0) for token in range(MAX_LOGIT_BIASES + 1)))


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
