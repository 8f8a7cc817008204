"""Files that readers find whole."""

from __future__ import annotations

import threading
from pathlib import Path

from ubatch.process.files import write_whole


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Two threads have the same process id, as processes of two machines with a shared folder may."""
    path = tmp_path / "file"
    contents = ["a" * 10_000, "b" * 20_000]
    write_whole(path, contents[0])
    errors: list[BaseException] = []

    def write(text: str) -> None:
        try:
            for _ in range(50):
                write_whole(path, text)
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(text,)) for text in contents]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_text() in contents
    assert not errors
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
