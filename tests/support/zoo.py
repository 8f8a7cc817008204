"""All entries of the zoo."""

from __future__ import annotations

import zoo_caches
import zoo_language
import zoo_outputs
import zoo_recurrent
import zoo_torch
import zoo_vision_audio
from zoo_entry import Entry

_FILES = [zoo_torch, zoo_outputs, zoo_recurrent, zoo_language, zoo_vision_audio, zoo_caches]

ENTRIES: dict[str, Entry] = {entry.name: entry for file in _FILES for entry in file.ENTRIES}
"""By name, in the order of the page."""

if len(ENTRIES) < sum(len(file.ENTRIES) for file in _FILES):
    raise ValueError("two entries of the zoo have the same name")
