"""Messages between ranks in the rendezvous store: signed, bound to their name, and refused if not valid."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from peer_failure_cases import Told
from torch.distributed import distributed_c10d as c10d

from ranks import on_ranks, run_ranks
from ubatch import CommGroup, ForgedValue
from ubatch.process.job_store import JobStore, use_job_store
from ubatch.ranks.group import _update
from ubatch.ranks.peer_watch import PeerWatch

KEY, OTHER = b"k" * 32, b"o" * 32


def both(key: bytes | None = KEY) -> tuple[dist.HashStore, JobStore]:
    store = dist.HashStore()
    return store, JobStore(store, key, "job/")


@pytest.mark.parametrize("key", [None, KEY])
def test_what_was_said_is_read(key: bytes | None) -> None:
    _, store = both(key)
    part = store.part("group").part("7")
    assert not part.check(["a"])
    part.set("a", "1:2\nthree\0 ü")
    part.set("b", "")
    assert part.check(["a", "b"])
    assert store.get("group/7/a") == part.get("a") == "1:2\nthree\0 ü"
    assert part.get_all(["b", "a"]) == ["", "1:2\nthree\0 ü"]
    assert store.add("counter", 2) == 2


@pytest.mark.parametrize("key", [None, KEY])
def test_only_what_stands_there_is_replaced(key: bytes | None) -> None:
    _, store = both(key)
    for expected, wanted, stands in (("", "0", "0"), ("", "1", "0"), ("1", "2", "0"), ("0", "2", "2")):
        assert store.compare_set("a", expected, wanted) == stands
    assert store.get("a") == "2"


def test_without_a_key_values_stand_as_they_are() -> None:
    raw, store = both(None)
    store.set("a", "plain")
    assert raw.get("job/a") == b"plain"


def flipped(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


FORGERIES: dict[str, Any] = {
    "no hash": lambda raw: b"evil",
    "not even text": lambda raw: b"\xff\xfe",
    "empty": lambda raw: b"",
    "another value": lambda raw: flipped(raw.get("job/a")),
    "another name": lambda raw: raw.get("job/b"),
    "another key": lambda raw: _said_with(OTHER, "job/"),
    "another path": lambda raw: _said_with(KEY, "elsewhere/"),
    "no value": lambda raw: b"hmac-sha256:",
    "half a hash": lambda raw: raw.get("job/a")[:40],
}


def _said_with(key: bytes, path: str) -> bytes:
    raw = dist.HashStore()
    JobStore(raw, key, path).set("a", "said")
    value: bytes = raw.get(f"{path}a")
    return value


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_value_is_refused_and_named(forge: Any) -> None:
    raw, store = both()
    store.set("a", "said")
    store.set("b", "said")
    raw.set("job/a", forge(raw))
    for read in (
        lambda: store.get("a"),
        lambda: store.get_all(["b", "a"]),
        lambda: store.compare_set("a", "said", "new"),
    ):
        with pytest.raises(ForgedValue, match="'job/a' in the rendezvous store carries") as caught:
            read()
        assert caught.value.name == "job/a"
        assert "evil" not in str(caught.value)


def test_a_process_without_the_key_believes_nothing_signed() -> None:
    raw, store = both()
    store.set("a", "said")
    with pytest.raises(ForgedValue, match="no key to check it"):
        JobStore(raw, None, "job/").get("a")


def test_an_earlier_beat_put_back_keeps_no_peer_alive() -> None:
    raw, store = both()
    beats = []
    for number in (1, 2):
        store.set("beat/1", str(number))
        beats.append(raw.get("job/beat/1"))
    told = Told()
    watch = PeerWatch(0, (0, 1), store, 0.4, told, 0.05)
    watch.start()
    for turn in range(200):
        raw.set("job/beat/1", beats[turn % 2])
        watch._thread.join(0.02)
    watch.stop()
    assert told == Told(dead=[1])


@pytest.mark.parametrize(("name", "value"), [("beat/1", "x"), ("beat/1", ""), ("silence/1", "long")])
def test_the_watch_tells_of_a_value_that_is_no_number(name: str, value: str) -> None:
    """Its thread must not end without a word: nobody would watch any more. Without a key anybody may write so."""
    raw, store = both(None)
    if name != "beat/1":
        store.set("beat/1", "1")
    raw.set(f"job/{name}", value)
    told = Told()
    watch = PeerWatch(0, (0, 1), store, 0.2, told, 0.05)
    watch.start()
    watch._thread.join(10)
    assert not watch._thread.is_alive()
    assert not told.dead
    (forged,) = told.forged
    assert forged.startswith(f"the value of 'job/{name}' in the rendezvous store is {value!r}, which no rank says")


@on_ranks(2)
def test_what_cannot_be_read_is_forged(rank: int, group: CommGroup) -> None:
    """Under `failed`, and under `meeting`, with no key."""
    connection = group.usable_connection()
    path, says = connection._store._path, "in the rendezvous store is 'nonsense', which no rank"
    if rank == 1:
        c10d._get_default_store().set(f"{path}failed", "nonsense")
    dist.barrier()
    with pytest.raises(ForgedValue, match=rf"^the value of '{path}failed' {says}"):
        connection.adopt_failure()
    store = JobStore(dist.HashStore(), None)
    store.set("meeting", "nonsense")
    with pytest.raises(ForgedValue, match=rf"^the value of 'meeting' {says}"):
        _update(store, lambda epoch, here: (epoch, here))
    dist.barrier()


def forge_a_failure(rank: int, ranks: int, key: bytes | None) -> str:
    """Rank 1 does not come; what stands under `failed` meanwhile was written by nobody of the job."""
    use_job_store(key)
    group = CommGroup.from_process_group(timeout_s=20.0)
    connection = group.usable_connection()
    raw = c10d._get_default_store()
    if rank == 1:
        raw.set(f"{connection._store._path}failed", "0\nbecause an attacker says so")
        dist.barrier()
        return ""
    work = dist.all_reduce(torch.ones(1), group=connection.vote_pg, async_op=True)
    try:
        connection.wait_for_works([work], "vote")
    except Exception as error:
        return f"{type(error).__name__}: {error} | {connection.broken}"
    finally:
        dist.barrier()
    return "nothing"


@pytest.mark.parametrize("key", [None, KEY])
def test_a_forged_failure_blames_nobody(key: bytes | None) -> None:
    told, _ = run_ranks(forge_a_failure, 2, key)
    if key is None:
        assert "an attacker says so" in told  # without a key the network is trusted
    else:
        assert told.startswith("ForgedValue: the value of 'ubatch/0-1/1/1/failed' in the rendezvous store")
        assert "an attacker says so" not in told
        assert "ForgedValue" not in told.partition(" | ")[2]
