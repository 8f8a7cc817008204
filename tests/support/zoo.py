"""All entries of the zoo, and the page of them, `docs/zoo.md`: `PYTHONPATH=. python tests/support/zoo.py` writes it.

It has the expected outcomes; `tests/ubatch/wrapping/test_zoo.py` shows whether they come.
"""

import zoo_outputs
import zoo_states
import zoo_torch
import zoo_transformers
from repository import ROOT
from zoo_entry import OVERLAPS, Entry

_ALL = [*zoo_torch.ENTRIES, *zoo_outputs.ENTRIES, *zoo_torch.RECURRENT, *zoo_transformers.ENTRIES, *zoo_states.ENTRIES]

ENTRIES: dict[str, Entry] = {entry.name: entry for entry in _ALL}
"""By name, in the order of the page."""

if len(ENTRIES) < len(_ALL):
    raise ValueError("two entries of the zoo have the same name")

HEAD = """# The zoo

Modules from elsewhere, wrapped at the lowest thresholds and called three times (in 16 bits, four) at every batch of the
table: at first, while the wrapper learns, and again. At every call the result, what was written to arguments and
caches, the state of the module and of the random number generators are those of the bare module, within rounding.
*overlaps*: the last call ran in lanes, by its trace. *whole*: it was the bare call, and the reason was counted.
*either*: both are right, and equal. A batch of one row is never cut.

{count} modules: {overlaps} overlap, {whole} run whole, {either} may do either. The last batch of a row is the
one that equals another size of the call, which is named. `tests/support/zoo*.py` has the modules and the expected
outcomes, `tests/ubatch/wrapping/test_zoo.py` runs them, and `tests/support/zoo.py` writes this page.

| module | family | batches | collides with | outcome | reason |
|---|---|---|---|---|---|
"""


def page() -> str:
    """The page that the expected outcomes make."""
    kinds = [kind_of(entry) for entry in ENTRIES.values()]
    counts = {kind: kinds.count(kind) for kind in ("overlaps", "whole", "either")}
    return HEAD.format(count=len(ENTRIES), **counts) + "".join(map(row_of, ENTRIES.values()))


def row_of(entry: Entry) -> str:
    """The table's row of an entry."""
    others = [f"at {batch}: {_words(entry.expected(batch))}" for batch in sorted(entry.at)]
    cells = [
        entry.name,
        entry.family,
        ", ".join(map(str, entry.batches)),
        entry.collides[1],
        kind_of(entry),
        "; ".join(filter(None, [_words(entry.outcomes - {OVERLAPS}), *others])),
    ]
    return "| " + " | ".join(cells) + " |\n"


def kind_of(entry: Entry) -> str:
    """What becomes of a batch of several rows, as a rule."""
    if OVERLAPS not in entry.outcomes:
        return "whole"
    return "overlaps" if entry.outcomes == {OVERLAPS} else "either"


def _words(reasons: frozenset[str]) -> str:
    return " or ".join(f"`{reason}`" if reason != OVERLAPS else reason for reason in sorted(reasons))


if __name__ == "__main__":
    (ROOT / "docs" / "zoo.md").write_text(page(), encoding="utf-8")
