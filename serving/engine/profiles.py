"""Profiles of all ranks: ask every rank to write its trace, and wait for their answers."""

import asyncio
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from serving.engine.options import EngineOptions
from serving.engine.rank.tracing import TEMPORARY, profile_name
from serving.engine.wire.messages import ProfileWritten, StopProfile
from ubatch import UBatchError

_WITHIN_S = 120.0


class Profiles:
    """The answers of the ranks that write a profile; empty while none is written."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._answers: dict[int, asyncio.Future[ProfileWritten]] = {}

    async def stop(self, folder: Path | None, send: Callable[[StopProfile], object]) -> list[Path]:
        """Stop recording on every rank; see `EngineClient.stop_profile`. Ranks write where they were told at their
        start, whatever a message says; so it is this process that moves the files."""
        if self._answers:
            raise UBatchError("a profile is being written already.")
        loop = asyncio.get_running_loop()
        self._answers = {rank: loop.create_future() for rank in range(self._options.world_size)}
        try:
            send(StopProfile(profile_name()))
            answers = await asyncio.wait_for(asyncio.gather(*self._answers.values()), _WITHIN_S)
        except TimeoutError as error:
            raise UBatchError(f"not every rank has written its profile within {_WITHIN_S:.0f} s.") from error
        finally:
            self._answers = {}
        wrong = [f"{self._options.describe_rank(each.rank)}: {each.error}" for each in answers if each.error]
        written = [Path(each.path) for each in answers if not each.error]
        if wrong:
            raise UBatchError(" ".join([*wrong, *(f"{path} is written." for path in written)]))
        return written if folder is None else await asyncio.to_thread(_moved, written, folder)

    def written(self, message: ProfileWritten) -> None:
        """A rank has answered."""
        answer = self._answers.get(message.rank)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """Raise an error in the call that waits."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(make_error())


def _moved(paths: Iterable[Path], folder: Path) -> list[Path]:
    """The files of this machine, moved to a folder; those of other machines stay."""
    folder.mkdir(parents=True, exist_ok=True)
    moved = []
    for path in paths:
        moved.append(Path(shutil.move(path, folder / path.name)) if path.exists() else path)
        if path.parent.name.startswith(TEMPORARY):  # made for this profile alone
            with suppress(OSError):
                path.parent.rmdir()
    return moved
