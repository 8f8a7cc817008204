"""What goes over the wire comes back equal; errors come back as what they were."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from attention import KVCacheExhausted
from model_runner import CheckpointError, FinishReason, RequestError, SamplingParams, TensorMissing, TokenLogprobs
from serving.engine import EngineOptions
from serving.engine.speculation import Algorithm, SpeculationConfig
from serving.engine.wire import messages
from serving.engine.wire.messages import (
    Abort,
    Add,
    Alive,
    Failed,
    Finished,
    NodeAlive,
    Outputs,
    ProfileWritten,
    Ready,
    Refused,
    Shutdown,
    StartProfile,
    StopProfile,
    Wake,
    decode_from_engine,
    decode_to_engine,
    encode,
    error_kind,
    make_error,
)
from serving.requests import EngineStatistics, RequestInput, RequestOutput
from ubatch import ConfigError

PARAMS = SamplingParams(
    temperature=0.5,
    top_k=3,
    seed=2**62,
    stop_token_ids=(1, 2),
    logit_bias=((5, -1.5),),
    logprobs=2,
    frequency_penalty=0.1,
    max_tokens=9,
    min_tokens=3,
    allowed_token_ids=(4, 1, 7),
    bad_token_sequences=((8,), (7, 4)),
)
LOGPROBS = TokenLogprobs(3, -0.5, 1, ((3, -0.5), (4, -1.0)))


@pytest.mark.parametrize(
    "message",
    [
        Add(RequestInput("a", [1, 2, 3], PARAMS, priority=-1), 7),
        *(Abort("a"), Wake(3), StartProfile(), StopProfile("/somewhere"), Shutdown()),
        *(Ready(1, 2048, 100, "KV cache"), Alive(1, 900.0), Finished(0, "42"), NodeAlive(1)),
        Outputs(
            0,
            12,
            [
                RequestOutput("a", [1, 2], logprobs=[LOGPROBS, LOGPROBS], num_cached_tokens=16),
                RequestOutput("b", [], [], [None, LOGPROBS], finish_reason=FinishReason.STOP, stop_token=2),
            ],
            EngineStatistics(num_running=1, kv_usage=0.25, steps={"decode/engaged": 3}),
        ),
        *(Refused(0, "a", "RequestError", "no"), Refused(0, "a", "RequestError", "no", "min_tokens")),
        Failed(1, "rank 0 died", "UBatchError", "PeerFailed", "Traceback", echo=True),
        ProfileWritten(0, "/somewhere", None),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_come_back(message: messages.ToEngine | messages.FromEngine) -> None:
    to_engine = isinstance(message, get_args(messages.ToEngine))
    assert (decode_to_engine if to_engine else decode_from_engine)(encode(message)) == message


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_to_engine(b"\x00hello")
    with pytest.raises(msgspec.ValidationError):
        decode_to_engine(encode(NodeAlive(1)))
    fields = msgspec.msgpack.decode(encode(Add(RequestInput("a", [1], SamplingParams()), 1)))
    fields[1]["params"]["top_p"] = 7.0
    with pytest.raises(msgspec.ValidationError, match=r"top_p must be above 0 and at most 1, not 7\.0"):
        decode_to_engine(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("no", param="min_tokens"), RequestError),
        (KVCacheExhausted("no"), KVCacheExhausted),
        (ConfigError("no"), ConfigError),
        (TensorMissing("w", "no"), CheckpointError),
        (ZeroDivisionError("no"), type(None)),  # of others: it does not become ours
    ],
)
def test_errors_keep_their_kind(error: Exception, kind: type[Exception]) -> None:
    made = make_error(error_kind(error), str(error), "min_tokens")
    assert type(made) is kind
    assert str(made) == ("None" if made is None else "no")
    assert getattr(made, "param", None) == getattr(error, "param", None)


def test_speculation_runs_in_the_plain_loop() -> None:
    speculating = SpeculationConfig(Algorithm.NGRAM, 3)
    assert EngineOptions(Path("model"), overlap_schedule=True).overlaps_schedule
    assert EngineOptions(Path("model"), device="cuda").overlaps_schedule
    assert not EngineOptions(Path("model")).overlaps_schedule
    assert not EngineOptions(Path("model"), speculation=speculating, overlap_schedule=True).overlaps_schedule
