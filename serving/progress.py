"""Progress on standard error: a bar in a terminal, a line now and then where it is a file or a pipe."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

__all__ = ["progress"]

_LINES_EVERY_S = 10.0


class _Lines(tqdm):
    """Whole lines, without what moves a cursor."""

    disable: bool

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Write a line; none for what would only clear the bar."""
        if msg != "":
            self.fp.write(f"{msg or self}\n")
            self.fp.flush()
        return True

    def close(self) -> None:
        """Say how far it came, too."""
        if not self.disable:
            self.display()
            self.disable = True
        super().close()


def progress(*args: Any, show: bool = True, **options: Any) -> Any:
    """As `tqdm(*args, **options)`, whose bar goes when it is done; nothing unless `show`."""
    if sys.stderr.isatty():
        return tqdm(*args, **options, leave=False, disable=not show)
    lines = {"mininterval": _LINES_EVERY_S, "maxinterval": _LINES_EVERY_S, "ascii": True, "ncols": 80}
    return _Lines(*args, **options, **lines, disable=not show)
