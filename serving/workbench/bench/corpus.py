"""Source text of the installed Python: training text of the examples' small models, and held-out text.

Whole files are held out; the same seed always holds out the same files.
"""

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from ubatch import UBatchError

# Tests and vendored code, and two folders of tables (code pages, help topics) that are not program text.
_SKIPPED = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings", "pydoc_data"}
)
_HELD_OUT = 0.03  # of the files


class CorpusMissing(UBatchError):
    """This Python has no source text."""


@dataclass(frozen=True)
class Corpus:
    """Source text of the standard library, one string per file, split by file."""

    train: list[str]
    held_out: list[str]


def read_corpus(seed: int) -> Corpus:
    """The running interpreter's standard library, of which a seeded sample of the files is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in sorted(root.rglob("*.py")) if _SKIPPED.isdisjoint(path.relative_to(root).parts[:-1]))
    texts = [text for path in paths if (text := path.read_text(encoding="utf-8", errors="replace")).strip()]
    if len(texts) < 100:
        raise CorpusMissing(
            f"found {len(texts)} source files under the standard library ({root}), expected several hundred: "
            "use a Python that ships its library as .py files"
        )
    random.Random(seed).shuffle(texts)
    num_held_out = round(len(texts) * _HELD_OUT)
    return Corpus(train=texts[num_held_out:], held_out=texts[:num_held_out])
