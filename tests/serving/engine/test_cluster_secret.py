"""The private folder of a run, and the store in it. The cluster's secret: its file, the keys made of it, and what they
sign; `test_cluster_gate` has the socket.
"""

import hashlib
import hmac
import logging
import os
import pickle
import secrets
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
import zmq
import zmq.asyncio
from children import exit_code, in_child
from repository import TINY_MOE

from serving.engine import EngineOptions
from serving.engine.wire.rendezvous import Run, announce_network, check_node, join_run, post_node
from serving.engine.wire.secret import ClusterSecret, read_secret
from serving.engine.wire.stores import FolderStore, RunFolder, SignedStore
from serving.network import listening_store
from serving.options import describe_settings, read_serve_command
from ubatch import ConfigError, ForgedValue, UBatchError
from ubatch.process.job_store import JobStore

# -- the folder --------------------------------------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_path_too_long_for_sockets_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Binding the socket gave a traceback."""
    longest = temporary / ("x" * (107 - len(f"{temporary}//ubatch-run-12345678/turns-9999")))
    for folder, fits in ((longest, True), (longest.with_name(longest.name + "x"), False)):
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        if fits:
            RunFolder().remove()
        else:
            with pytest.raises(ConfigError, match=r"is 1 bytes too long for a socket in it\. Set TMPDIR"):
                RunFolder()
        assert not list(folder.iterdir())


def test_without_a_folder_for_temporary_files_nothing_starts(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    with pytest.raises(ConfigError, match=r"^no folder can be made .* \(No such file or directory\)\. Set TMPDIR"):
        RunFolder()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make another user's folder")
def test_another_users_folder_is_left_alone(temporary: Path) -> None:
    """A server of root's opened what another user's `lock` led to, and removed his folder."""
    theirs = temporary / "ubatch-run-theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    os.utime(theirs, (0, 0))
    RunFolder().remove()
    assert theirs.exists()


def test_names_may_be_longer_than_those_of_files(tmp_path: Path) -> None:
    """A group's name lists its ranks: from some 70 on they were too long."""
    store = JobStore(FolderStore(tmp_path / "store", timedelta(seconds=0.1)))
    names = [f"ubatch/{'-'.join(map(str, range(128)))}/{end}" for end in ("failed", "made")]
    assert not store.check(names)
    for name in names:
        store.set(name, name)
    assert store.get_all(names) == names
    assert store.part(names[0]).add("count", 2) == 2


def test_no_count_is_lost_between_processes(tmp_path: Path) -> None:
    def body() -> None:
        store = FolderStore(tmp_path / "store", timedelta(seconds=10))
        for _ in range(200):
            store.add("count", 1)

    assert [exit_code(each) for each in (in_child(body), in_child(body))] == [0, 0]
    assert FolderStore(tmp_path / "store", timedelta(seconds=1)).add("count", 0) == 400


# -- the secret --------------------------------------------------------------------------------------------------------


TIMEOUT = timedelta(seconds=5)
TWO_NODES = ("--nnodes", "2", "--data-parallel-size", "2", "--master-addr", "127.0.0.1", "--master-port", "29500")


def make(path: Path, contents: bytes | None = None, mode: int = 0o600) -> Path:
    path.write_bytes(secrets.token_hex(32).encode() + b"\n" if contents is None else contents)
    path.chmod(mode)
    return path


def two_nodes(secret: Path | None, node_rank: int = 0) -> EngineOptions:
    return EngineOptions(
        TINY_MOE, data_parallel_size=2, nnodes=2, node_rank=node_rank, master_port=1, cluster_secret_file=secret
    )


# --------------------------------------------------------------------------------------------------------- the file


def a_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


WRONG_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, r"cannot be read \(No such file"),
    "a folder": (Path.mkdir, "is no regular file"),
    "a pipe": (a_pipe, "is no regular file"),
    "empty": (lambda path: make(path, b""), "holds nothing; a secret has at least 32"),
    "blank": (lambda path: make(path, b" \n" * 40), "holds nothing"),
    "short": (lambda path: make(path, bytes(range(64, 95))), "holds 31 bytes"),
    "short, and lines": (lambda path: make(path, b"a" + b"\n" * 60), "holds 1 bytes before the white space"),
    "one letter": (lambda path: make(path, b"a" * 40), "holds 1 different bytes only"),
    "seven letters": (lambda path: make(path, b"abcdefg" * 9 + b"\n"), "holds 7 different bytes only"),
    "a letter behind lines": (lambda path: make(path, b"\n" * 60 + b"a"), "holds 2 different bytes only"),
    "too long": (lambda path: make(path, b"x" * 5000), "more than 4096 bytes"),
    "read by the group": (lambda path: make(path, mode=0o640), r"mode 0640\). Run: chmod 600"),
    "read by all": (lambda path: make(path, mode=0o604), r"mode 0604"),
    "written by all": (lambda path: make(path, mode=0o602), r"mode 0602"),
}


@pytest.mark.parametrize(("prepare", "why"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_file_that_is_no_secret_is_refused(prepare: Callable[[Path], object], why: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    prepare(path)
    with pytest.raises(ConfigError, match=why):
        read_secret(path)
    flags = [*TWO_NODES, "--cluster-secret-file", str(path)]
    with pytest.raises(ConfigError, match=f"^--cluster-secret-file {path}: .*{why}"):
        read_serve_command("ubatch serve", "", [str(TINY_MOE), *flags])


def test_settings_that_do_not_go_together(tmp_path: Path) -> None:
    path = str(make(tmp_path / "secret"))
    with pytest.raises(ConfigError, match="--cluster-secret-file needs --nnodes 2 or more"):
        read_serve_command("ubatch serve", "", [str(TINY_MOE), "--cluster-secret-file", path])
    for address in ("0.0.0.0", "0"):
        flags = [*TWO_NODES, "--master-addr", address]
        with pytest.raises(ConfigError, match="is every address of a machine"):
            read_serve_command("ubatch serve", "", [str(TINY_MOE), *flags])
        with pytest.raises(ConfigError, match="is every address of this machine"):
            listening_store(address, 0, TIMEOUT)


def test_the_secret_is_shown_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "secret")
    text = path.read_text().strip()
    command = read_serve_command("ubatch serve", "", [str(TINY_MOE), *TWO_NODES, "--cluster-secret-file", str(path)])
    assert command.engine.cluster_secret_file == path
    assert f"cluster-secret-file: {path}" in describe_settings(command.settings).replace('"', "")
    secret = read_secret(path)
    curve = secret.curve("run")
    for shown in (repr(secret), str(secret), repr(curve), repr(command.engine), describe_settings(command.settings)):
        assert text not in shown
        assert curve.server_secret.decode() not in shown
    assert text.encode() not in pickle.dumps(command.engine)  # what the ranks' processes are sent
    with pytest.raises(TypeError, match="reads the file by itself"):
        pickle.dumps(secret)
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(ConfigError, match="needs CURVE, and this libzmq was built without it"):
        secret.curve("run")


def test_white_space_at_its_end_is_none_of_the_secret(tmp_path: Path) -> None:
    text = secrets.token_hex(32).encode()
    found = [read_secret(make(tmp_path / "secret", text + end)) for end in (b"", b"\n", b"\r\n", b" \n\n")]
    assert len({secret.key("x") for secret in found if secret is not None}) == 1
    other = read_secret(make(tmp_path / "secret", b" " + text))
    assert other.key("x") != found[0].key("x")


# --------------------------------------------------------------------------------------------------------- the keys


def test_keys_are_the_same_from_the_same_secret_only() -> None:
    one, again, other = ClusterSecret(b"s" * 32), ClusterSecret(b"s" * 32), ClusterSecret(b"t" * 32)
    assert one.key("a", "run") == again.key("a", "run")
    keys = [one.key("a", "run"), one.key("b", "run"), one.key("a", "run 2"), one.key("a"), other.key("a", "run")]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}
    curves = [one.curve("run"), one.curve("run 2"), other.curve("run")]
    assert len({key for curve in curves for key in (curve.server_secret, curve.client_secret)}) == 6
    assert vars(one.curve("run")) == vars(again.curve("run"))
    assert zmq.curve_public(curves[0].server_secret) == curves[0].server_public


def test_keys_are_those_of_rfc_5869() -> None:
    """Its test case 1 begins so; ours has another `info`, so only the first half, the extraction, can be compared."""
    extracted = hmac.digest(bytes(range(13)), b"\x0b" * 22, hashlib.sha256)
    assert extracted.hex().startswith("077709362c2e32df0ddc3f0dc47bba63")
    assert hmac.digest(extracted, bytes(range(0xF0, 0xFA)) + b"\x01", hashlib.sha256).hex().startswith("3cb25f25faacd5")
    own = ClusterSecret(b"\x0b" * 22).key("x", bytes(range(13)).decode())
    assert own == hmac.digest(extracted, b"ubatch x\x01", hashlib.sha256)


# ------------------------------------------------------------------------------------------------------ the meeting


PAIRS = {"another": (1, 2), "only node 0": (1, 0), "only node 1": (0, 1)}


@pytest.mark.parametrize(("here", "there"), PAIRS.values(), ids=PAIRS)
def test_nodes_of_different_secrets_both_say_so(here: int, there: int, tmp_path: Path) -> None:
    files = [None, make(tmp_path / "1"), make(tmp_path / "2")]
    store = dist.HashStore()
    secret = read_secret(files[here])
    Run.open(store, secret).post_client_address("tcp://127.0.0.1:5", two_nodes(None))
    post_node(store, two_nodes(files[there], 1))
    with pytest.raises(ConfigError, match=r"^node 0 and node 1 do not have the same cluster secret.*'nodes/1'"):
        check_node(store, secret, two_nodes(None), 1)
    with pytest.raises(ConfigError, match=r"^node 1 and node 0 do not have the same cluster secret.*'client'"):
        join_run(store, two_nodes(files[there], 1))


@pytest.mark.parametrize("signed", [True, False])
def test_nodes_of_one_secret_meet(signed: bool, tmp_path: Path) -> None:
    path = make(tmp_path / "secret") if signed else None
    store = dist.HashStore()
    secret = read_secret(path)
    first = Run.open(store, secret)
    first.post_client_address("tcp://127.0.0.1:5", two_nodes(None))
    assert not check_node(store, secret, two_nodes(None), 1)
    post_node(store, two_nodes(path, 1))
    assert check_node(store, secret, two_nodes(None), 1)
    other, _ = join_run(store, two_nodes(path, 1))
    assert other.address == "tcp://127.0.0.1:5"
    other.said.set("turns/1", "tcp://127.0.0.1:6")
    assert first.said.get("turns/1") == "tcp://127.0.0.1:6"
    assert (first.curve is not None) == signed
    assert first.key("ranks/0") == other.key("ranks/0")

    # What an earlier run said, under the same name and with the same secret, counts for nothing in the next one.
    later = Run.open(store, secret)
    if signed:
        assert later.key("ranks/0") != first.key("ranks/0") != first.key("ranks/1")
        with pytest.raises(ForgedValue, match="'turns/1'"):
            later.said.get("turns/1")


def test_a_node_0_that_does_not_begin_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(UBatchError, match=r"^node 0 at 127\.0\.0\.1 has not begun its run .*--node-rank 0"):
        join_run(store, two_nodes(None, 1))
    store, listener = listening_store("127.0.0.1", 0, timedelta(seconds=0.1))
    with listener, pytest.raises(UBatchError, match=r"^node 0 at 127\.0\.0\.1 has not begun its run .*--node-rank 0"):
        join_run(store, two_nodes(None, 1))


def test_what_gloo_keeps_is_signed() -> None:
    """A stranger's address in the place of a rank's would lead its peers to the stranger."""
    raw, address = dist.HashStore(), bytes(range(256))
    store = SignedStore(JobStore(raw, b"k" * 32), timedelta(seconds=0.1))
    within = dist.PrefixStore("group", store)  # C++ calls the methods of the class in Python
    within.set("address", address)
    within.wait(["address"])
    assert within.get("address") == address
    with pytest.raises(dist.DistStoreError, match="nobody has written group/other"):
        within.wait(["other"])
    raw.set("group/address", "a stranger's")
    with pytest.raises(ForgedValue, match="carries no keyed hash"):
        within.get("address")


def test_counters_are_signed() -> None:
    raw = dist.HashStore()
    one, other = JobStore(raw, b"k" * 32), JobStore(raw, b"k" * 32)
    assert [one.add("count", 1), other.add("count", 2)] == [1, 3]
    value = raw.get("count")
    assert one.add("count", 0) == 3
    assert raw.get("count") == value, "to read it is not to write it: all waiting ranks read"
    raw.set("count", "0")
    with pytest.raises(ForgedValue, match="'count' in the rendezvous store carries no keyed hash"):
        other.add("count", 1)


def test_one_line_says_what_protects_the_network(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "serving")
    announce_network(EngineOptions(TINY_MOE))
    assert not caplog.records
    announce_network(two_nodes(None))
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "not authenticated" in warning.getMessage()
    assert warning.getMessage().endswith("what we write to the store are authenticated")
    caplog.clear()
    announce_network(two_nodes(make(tmp_path / "secret")))
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    assert "gloo and NCCL cannot authenticate, so the network of 127.0.0.1 must be private" in line.getMessage()
