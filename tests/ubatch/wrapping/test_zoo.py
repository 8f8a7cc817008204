"""The zoo: third-party modules, wrapped. Each gives equal results, overlapped or declined with its reason."""

import copy
import functools

import pytest
from repository import ROOT
from torch import nn
from zoo import ENTRIES, page
from zoo_check import Twins, act_on, assert_same, built, generator_states, rows_are_independent, seeded, state_of
from zoo_entry import DRAWS_RANDOM, KEEPS_STATE, OVERLAPS, ROWS_DEPEND, Entry, forward

pytestmark = pytest.mark.long

PAGE = ROOT / "docs" / "zoo.md"

QUICK = frozenset(
    {"torch.nn", "outputs", "coupled rows", "keeps state", "recurrent", "random", "detection", "labels", "graph"}
)
SAMPLED = [
    pytest.param(name, marks=[] if number % (3 if entry.family in QUICK else 16) == 0 else pytest.mark.slow)
    for number, (name, entry) in enumerate(ENTRIES.items())
]
"""All entries; of the large models every sixteenth is in the usual run, of others every third."""

_built = functools.cache(built)


def module_of(entry: Entry, batch: int) -> nn.Module:
    """The entry's module; tests run copies of it."""
    return _built(entry, batch if entry.per_batch else 0)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", SAMPLED)
def test_equal_and_overlapped_or_declined(name: str) -> None:
    """Thrice at every batch, and one wrapper at all of them."""
    entry = ENTRIES[name]
    outcomes = {}
    twins = Twins.of(entry, module_of(entry, 1))
    for batch in entry.batches:
        twins = Twins.of(entry, module_of(entry, batch)) if entry.per_batch else twins
        outcomes[batch] = twins.compare(batch)
    wrong = {batch: seen for batch, seen in outcomes.items() if not seen <= entry.expected(batch)}
    assert not wrong, f"{wrong} where {[sorted(entry.expected(batch)) for batch in wrong]} is right"
    if not entry.per_batch:
        twins.compare_over_batches()


@pytest.mark.parametrize("name", SAMPLED)
def test_the_bare_module_is_what_the_entry_says(name: str) -> None:
    """Copies of it do the same; only an entry that says so draws random numbers, or is changed by calls."""
    entry, batch = ENTRIES[name], 2
    one, other = (copy.deepcopy(module_of(entry, batch)) for _ in range(2))
    before = state_of(one)
    after = act_on(entry, one, one, batch, 0)
    assert_same(act_on(entry, other, other, batch, 0), after)
    if entry.act is not forward:
        return  # a training step makes gradients, and sampling draws
    with seeded(1000 * batch):
        entry.arguments(batch)
        drew = not _same(after.generators, generator_states())
    assert drew == bool(entry.outcomes & {DRAWS_RANDOM, "dropout_in_training"}), f"it draws random numbers: {drew}"
    if _same(after.state, before):
        assert entry.outcomes != {KEEPS_STATE}, "no call changes it"
    else:
        assert entry.outcomes & {KEEPS_STATE, "batch_norm_in_training"}, "a call changes it"


def _same(one: object, other: object) -> bool:
    try:
        assert_same(one, other)
    except AssertionError:
        return False
    return True


BY_HAND = [
    name
    for name, entry in ENTRIES.items()
    if entry.act is forward and not entry.per_batch and entry.outcomes in ({OVERLAPS}, {ROWS_DEPEND})
]


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", BY_HAND)
def test_the_expected_outcome_is_right(name: str) -> None:
    """By hand, with the bare module alone: where rows are independent a call should overlap, and only there."""
    entry = ENTRIES[name]
    assert rows_are_independent(entry, module_of(entry, 0)) == (entry.outcomes == {OVERLAPS})


def test_there_are_enough_and_most_overlap() -> None:
    certain = [entry for entry in ENTRIES.values() if entry.outcomes == {OVERLAPS}]
    assert len(ENTRIES) >= 80
    assert len(certain) >= 50
    assert 2 * len(certain) > len(ENTRIES)


def test_the_page_shows_the_expected_outcomes() -> None:
    """`PYTHONPATH=. python tests/support/zoo.py` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()
