"""What goes over the wire comes back equal, errors come back as what they were; and what an engine reads from its
socket before a step."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import zmq
import zmq.asyncio
from engine_mains import tiny, tokens_of

from attention import KVCacheExhausted
from model_runner import CheckpointError, FinishReason, RequestError, SamplingParams, TensorMissing, TokenLogprobs
from serving.engine import EngineClient, EngineOptions
from serving.engine.kept import InStep
from serving.engine.speculation import Algorithm, SpeculationConfig
from serving.engine.wire import messages as wire
from serving.engine.wire.link import EngineLink
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
        wire.Add(RequestInput("a", [1, 2, 3], PARAMS, priority=-1), 7),
        *(wire.Abort("a"), wire.Wake(3), wire.StartProfile(), wire.StopProfile("/somewhere"), wire.Shutdown()),
        *(wire.Ready(1, 2048, 100, "KV cache"), wire.Alive(1, 900.0), wire.Finished(0, "42"), wire.NodeAlive(1)),
        wire.Outputs(
            0,
            12,
            [
                RequestOutput("a", [1, 2], logprobs=[LOGPROBS, LOGPROBS], num_cached_tokens=16),
                RequestOutput("b", [], [], [None, LOGPROBS], finish_reason=FinishReason.STOP, stop_token=2),
            ],
            EngineStatistics(num_running=1, kv_usage=0.25, steps={"decode/engaged": 3}),
        ),
        *(wire.Refused(0, "a", "RequestError", "no"), wire.Refused(0, "a", "RequestError", "no", "min_tokens")),
        wire.Failed(1, "rank 0 died", "UBatchError", "PeerFailed", "Traceback", echo=True),
        *(
            wire.ProfileWritten(0, "/somewhere", None),
            wire.NodeFound(1, {2: wire.RankFound(InStep(True, ("a",)), "S"), 3: wire.RankFound()}),
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_come_back(message: wire.ToEngine | wire.FromEngine) -> None:
    to_engine = isinstance(message, get_args(wire.ToEngine))
    assert (wire.decode_to_engine if to_engine else wire.decode_from_engine)(wire.encode(message)) == message


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_to_engine(b"\x00hello")
    with pytest.raises(msgspec.ValidationError):
        wire.decode_to_engine(wire.encode(wire.NodeAlive(1)))
    fields = msgspec.msgpack.decode(wire.encode(wire.Add(RequestInput("a", [1], SamplingParams()), 1)))
    fields[1]["params"]["top_p"] = 7.0
    with pytest.raises(msgspec.ValidationError, match=r"top_p must be above 0 and at most 1, not 7\.0"):
        wire.decode_to_engine(msgspec.msgpack.encode(fields))


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
    made = wire.make_error(wire.error_kind(error), str(error), "min_tokens")
    assert type(made) is kind
    assert str(made) == ("None" if made is None else "no")
    assert getattr(made, "param", None) == getattr(error, "param", None)


def test_speculation_runs_in_the_plain_loop() -> None:
    speculating = SpeculationConfig(Algorithm.NGRAM, 3)
    assert EngineOptions(Path("model"), overlap_schedule=True).overlaps_schedule
    assert EngineOptions(Path("model"), device="cuda").overlaps_schedule
    assert not EngineOptions(Path("model")).overlaps_schedule
    assert not EngineOptions(Path("model"), speculation=speculating, overlap_schedule=True).overlaps_schedule


@contextmanager
def connected(folder: Path) -> Iterator[tuple[Callable[..., object], EngineLink]]:
    """What sends to an engine all at once, and the engine's end."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as client:
        client.bind(f"ipc://{folder}/client")
        with closing(EngineLink(f"ipc://{folder}/client", "rank-0")) as link:
            link.send(wire.Abort("hello"))  # type: ignore[arg-type]
            client.recv_multipart()
            yield lambda *messages: client.send_multipart([b"rank-0", *map(wire.encode, messages)]), link


def slowly(messages: Iterator[wire.ToEngine]) -> list[str]:
    """Take messages in, at a millisecond each."""
    taken = []
    for message in messages:
        assert isinstance(message, wire.Abort)
        taken.append(message.request_id)
        time.sleep(0.001)
    return taken


@pytest.mark.long
def test_a_flood_of_messages_is_taken_in_over_several_steps(tmp_path: Path) -> None:
    """Those that run must not wait until all of a large body's requests are read."""
    names = [str(number) for number in range(300)]
    with connected(tmp_path) as (send, link):
        for name in names:
            send(wire.Abort(name))
        parts: list[list[str]] = []
        while sum(map(len, parts)) < 300:
            parts.append(slowly(link.receive(5.0)))
        assert 2 < len(parts) < 300
        assert [name for part in parts for name in part] == names
        assert list(link.receive()) == []
        for name in names:
            send(wire.Abort(name))
        time.sleep(1.0)  # a long step
        assert len(slowly(link.receive())) > max(map(len, parts)), "what takes no longer than the step does not wait"


def test_what_was_sent_together_is_taken_together_where_no_step_waits(tmp_path: Path) -> None:
    """So that all prompts of an offline run are in the first step, and ranks that share experts begin alike."""
    with connected(tmp_path) as (send, link):
        taken: list[int] = []
        for wait_s in (5.0, 0.0):
            send(*(wire.Abort(str(number)) for number in range(30)))
            time.sleep(0.05)
            link._received_at = time.monotonic()
            taken.append(len(slowly(link.receive(wait_s))))
        assert taken[0] == 30
        assert 0 < taken[1] < 30, "a step does not wait for all of them"
        assert taken[1] + len(slowly(link.receive(1.0))) == 30


async def test_a_request_that_is_refused_while_it_runs_is_aborted() -> None:
    """Its rank goes on with it otherwise, where only an output was too long for node 0."""
    client = EngineClient(tiny())
    client._runs.serves = True
    address = f"tcp://127.0.0.1:{client._runs.run.socket.bind_to_random_port('tcp://127.0.0.1')}"
    receiving = asyncio.create_task(client._runs.run.receive())
    context = zmq.asyncio.Context()
    rank = context.socket(zmq.DEALER)
    rank.setsockopt_string(zmq.IDENTITY, "rank-0")
    rank.connect(address)
    await rank.send(wire.encode(wire.Refused(0, "nobody", "RequestError", "no")))
    await asyncio.sleep(0.3)
    asked = asyncio.create_task(tokens_of(client, "a", [1, 2], SamplingParams()))
    assert isinstance(wire.decode_to_engine(await asyncio.wait_for(rank.recv(), 10)), wire.Add)
    await rank.send(wire.encode(wire.Refused(0, "a", "RequestError", "too long")))
    with pytest.raises(RequestError, match="too long"):
        await asked
    assert wire.decode_to_engine(await asyncio.wait_for(rank.recv(), 10)) == wire.Abort("a")
    assert client.num_outstanding == 0
    receiving.cancel()
    await client._end(0.0)
    rank.close(linger=0)
    context.term()
