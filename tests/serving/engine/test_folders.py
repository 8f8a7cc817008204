"""The private folder of a run, and the store in it."""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from children import exit_code, in_child

from serving.engine.wire.stores import FolderStore, RunFolder
from ubatch import ConfigError
from ubatch.process.job_store import JobStore


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
