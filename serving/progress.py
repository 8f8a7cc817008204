"""Progress on standard error: a bar in a terminal, a line at intervals in a file or a pipe."""

import sys
from typing import Any

from tqdm import tqdm

_LINES_EVERY_S = 10.0


class _Lines(tqdm):
    """A progress bar that writes whole lines, without cursor movements."""

    disable: bool

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Write a line, unless the call only clears the bar."""
        if msg != "":
            self.fp.write(f"{msg or self}\n")
            self.fp.flush()
        return True

    def close(self) -> None:
        """Write a last line with the final count."""
        if not self.disable:
            self.display()
            self.disable = True
        super().close()


def progress(*args: Any, show: bool = True, **options: Any) -> Any:
    """Like `tqdm(*args, **options)`, but the bar disappears at the end; no output unless `show`."""
    if sys.stderr.isatty():
        return tqdm(*args, **options, leave=False, disable=not show)
    lines = {"mininterval": _LINES_EVERY_S, "maxinterval": _LINES_EVERY_S, "ascii": True, "ncols": 80}
    return _Lines(*args, **options, **lines, disable=not show)
