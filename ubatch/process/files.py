"""Writing files so that a reader gets the old content or the new, never a part of it."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, new: bool = False) -> None:
    """Write a file atomically: on an error, such as a full disk, the old file is kept and no partial file is left.

    Args:
        content: text, which is written as UTF-8, or bytes.
        new: replace no file.

    Raises:
        OSError: it cannot be written, or is there although it must be `new`.
    """
    # Others may write the same file: threads, or machines with a shared folder, where a process may have this one's id.
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:  # follows no link
            file.write(content.encode() if isinstance(content, str) else content)
        if new:
            os.link(part, path)
            part.unlink()
        else:
            part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
