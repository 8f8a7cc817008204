"""Files that readers find whole."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ubatch.process.files import write_whole


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Two threads have the same process id, as processes of two machines with a shared folder may."""
    path = tmp_path / "file"
    contents = ["a" * 10_000, "b" * 20_000]
    write_whole(path, contents[0])

    def write(text: str) -> None:
        for _ in range(50):
            write_whole(path, text)

    with ThreadPoolExecutor(2) as threads:
        writers = [threads.submit(write, text) for text in contents]
        while not all(writer.done() for writer in writers):
            assert path.read_text() in contents
    assert [writer.result() for writer in writers] == [None] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
