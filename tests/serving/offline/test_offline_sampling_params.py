"""`serving.SamplingParams` field by field, against what vLLM's own made of the same values."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import model_runner
from model_runner import RequestError
from serving import RequestOutputKind, SamplingParams

RECORDED = json.loads(Path(__file__).with_name("vllm_sampling_params.json").read_text())
REFUSED = "refused"
NEUTRAL = ['{"guided_decoding": null}']
"""Refused there, as a name that is gone; here only a value would be."""
STRICTER = [
    # No number, and no switch: there they go on to the engine.
    *('{"n": true}', '{"presence_penalty": true}', '{"frequency_penalty": true}', '{"max_tokens": true}'),
    *('{"seed": 1.5}', '{"seed": "7"}', '{"max_tokens": 1.5}', '{"min_tokens": 1.5}', '{"logprobs": 1.5}'),
    *('{"prompt_logprobs": 1.5}', '{"truncate_prompt_tokens": 1.5}', '{"ignore_eos": "yes"}', '{"ignore_eos": null}'),
    *('{"repetition_penalty": {"float": "nan"}}', '{"repetition_penalty": {"float": "inf"}}'),
    *('{"temperature": {"float": "nan"}}', '{"temperature": {"float": "inf"}}', '{"structured_outputs": "json"}'),
    *(
        f'{{"{name}": {value}}}'
        for name in ("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
        for value in ('"no"', "null")
    ),
    # Tokens, words and biases that cannot be used: there the engine finds out, or nobody does.
    *('{"stop_token_ids": [-1]}', '{"bad_words": [""]}', '{"bad_words": 5}', '{"bad_words": [5]}'),
    *('{"logit_bias": {"dict": [[5, 101.0]]}}', '{"logit_bias": {"dict": [[5, {"float": "nan"}]]}}'),
    *('{"logit_bias": {"dict": [["5", 1.0]]}}', '{"logit_bias": {"dict": [[5, "1"]]}}', '{"logit_bias": [5]}'),
    *('{"logit_bias": {"dict": [[-1, 1.0]]}}', '{"allowed_token_ids": []}', '{"allowed_token_ids": [-1]}'),
    *('{"allowed_token_ids": ["5"]}', '{"allowed_token_ids": 5}'),
    # Beyond the limits: there the engine finds out.
    *('{"n": 16385}', '{"logprobs": -1}', '{"prompt_logprobs": -1}'),
    # Not offered.
    *('{"flat_logprobs": true}', '{"flat_logprobs": "no"}', '{"extra_args": {"dict": [["a", 1]]}}'),
    '{"skip_reading_prefix_cache": true}',
]
"""Accepted there, refused here."""
OTHER_VALUES = [
    '{"bad_words": "word"}',  # there each letter would be a word
    '{"temperature": 0.005}',  # there 0.01
    *(
        f'{{"prompt_logprobs": {value}}}' for value in ("0", "1", "20", "21", "true")
    ),  # no skip_reading_prefix_cache here
]


def decoded(value: Any) -> Any:
    if isinstance(value, dict):
        if "float" in value:
            return float(value["float"])
        if "kind" in value:
            return RequestOutputKind[value["kind"]]
        return {decoded(key): decoded(entry) for key, entry in value["dict"]}
    return [decoded(each) for each in value] if isinstance(value, list) else value


CASES = [
    pytest.param({name: decoded(value) for name, value in given.items()}, answer, id=json.dumps(given))
    for given, answer in RECORDED["cases"]
]


def test_it_has_the_fields_and_the_defaults() -> None:
    ours = SamplingParams()
    for name, value in RECORDED["fields"].items():
        assert repr(getattr(ours, name)) == repr(decoded(value)), name
    assert (ours.temperature, ours.max_tokens) == (1.0, 16)


@pytest.mark.parametrize(("given", "answer"), CASES)
def test_a_value_does_what_it_does_there(given: dict[str, Any], answer: Any, request: pytest.FixtureRequest) -> None:
    key = request.node.callspec.id
    if (answer == REFUSED and key not in NEUTRAL) or key in STRICTER:
        unknown = not set(given) <= {each.name for each in fields(SamplingParams)}
        with pytest.raises(TypeError if unknown else RequestError) as caught:
            SamplingParams(**given)
        assert any(name in str(caught.value) for name in given)
        return
    ours = SamplingParams(**given)
    got = {name: getattr(ours, name) for name in (given if answer == REFUSED else answer)}
    same = answer != REFUSED and repr(got) == repr({name: decoded(value) for name, value in answer.items()})
    assert same is (key not in (*OTHER_VALUES, *NEUTRAL))


@pytest.mark.parametrize(("given", "answer"), CASES)
def test_a_value_that_is_set_later_is_checked_when_it_is_used(given: dict[str, Any], answer: Any) -> None:
    changed = SamplingParams()
    try:
        SamplingParams(**given)
    except TypeError:
        with pytest.raises(AttributeError):
            setattr(changed, *next(iter(given.items())))
        return
    except RequestError:
        for name, value in given.items():
            setattr(changed, name, value)
        with pytest.raises(RequestError):
            changed.engine_params()
        return
    for name, value in given.items():
        setattr(changed, name, value)
    changed.engine_params()
    assert changed == SamplingParams(**given)
    assert changed.engine_params() == SamplingParams(**given).engine_params()


def test_what_the_engine_gets() -> None:
    given = {
        **{"n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "max_tokens": 9},
        **{"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "ignore_eos": True},
        **{"min_tokens": 2, "logprobs": 3, "prompt_logprobs": 1},
    }
    lists: dict[str, Any] = {"stop_token_ids": [4, 5], "logit_bias": {6: 1.5}, "allowed_token_ids": [1, 4, 6]}
    engines = SamplingParams(**given, **lists, stop="x", bad_words=["y"]).engine_params()
    del given["n"]
    assert engines == model_runner.SamplingParams(
        **given, stop_token_ids=(4, 5), logit_bias=((6, 1.5),), allowed_token_ids=(1, 4, 6)
    )
    assert SamplingParams(max_tokens=None).engine_params().max_tokens > 2**60


def test_a_clone_is_another_one() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, temperature=0.3)
    clone = params.clone()
    assert clone == params
    clone.temperature = 0.8
    assert isinstance(clone.stop, list)
    clone.stop.append("b")
    assert (params.temperature, params.stop) == (0.3, ["a"])
    shallow = SamplingParams(stop=["a"], skip_clone=True)
    assert shallow.clone().stop is shallow.stop
    assert repr(params) == "SamplingParams(temperature=0.3, stop=['a'], logit_bias={1: 2.0})"


def test_numbers_of_other_libraries_become_pythons() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        max_tokens=torch.tensor(7),  # type: ignore[arg-type]
        allowed_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
    )
    assert (params.temperature, params.max_tokens, params.allowed_token_ids) == (0.5, 7, [3, 4])
    assert type(params.max_tokens) is int


def test_from_optional_takes_none_for_the_default_and_cuts_biases() -> None:
    params = SamplingParams.from_optional(
        temperature=None, top_p=0.5, logit_bias={"5": 200, 6: -200.0}, max_tokens=None
    )
    assert params == SamplingParams(top_p=0.5, logit_bias={5: 100.0, 6: -100.0}, max_tokens=None)
    for wrong in ({"a": 1}, {5: "1"}):
        with pytest.raises(RequestError, match="logit_bias"):
            SamplingParams.from_optional(logit_bias=wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("prompt_logprob_token_ids", [1]), ("logprob_token_ids", [1]), ("prompt_logprob_start", 1)),
        *(("thinking_token_budget", 5), ("repetition_detection", object()), ("routed_experts_prompt_start", 3)),
        *(("trace_decode_token_ids", [1]), ("logits_processors", [print]), ("guided_decoding", object())),
        *(("best_of", 2), ("use_beam_search", True), ("stream_interval", 0), ("output_kind", "DELTA")),
        *(("bad_words", ["a" * 201]), ("bad_words", ["a"] * 129), ("bad_words", [" "]), ("bad_words", "\ud800")),
        *(("stop", ["a" * 1001]), ("stop", ["a"] * 65), ("stop", b"os"), ("bad_words", b"os"), ("skip_clone", 1)),
    ],
)
def test_what_is_not_offered_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match="a bad word" if value in (["a" * 201], "\ud800") else name.rstrip("s")):
        SamplingParams(**{name: value})
