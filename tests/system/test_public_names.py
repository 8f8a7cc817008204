"""Public names are what `docs/public-names.txt` says; the changelog tells what changed in it since the last release."""

from __future__ import annotations

import importlib
import re
import warnings

import pytest
from public_names import COMMAND, FILE, changed_names, last_release, listing
from repository import ROOT

import ubatch

UNRELEASED = (ROOT / "CHANGELOG.md").read_text().partition("\n## Unreleased\n")[2].partition("\n## ")[0]


@pytest.mark.long
def test_the_list_is_that_of_the_code() -> None:
    assert FILE.read_text() == listing(), f"public names changed. Run `{COMMAND}`, and add a line to CHANGELOG.md."


def test_the_changelog_names_what_changed() -> None:
    told = set(re.findall(r"[\w.]+", UNRELEASED))
    changed = changed_names(last_release().read_text(), FILE.read_text())
    missing = sorted(changed - told)
    assert not missing, f"the section Unreleased of CHANGELOG.md does not name {', '.join(missing)}"


def test_the_last_release_is_this_version_or_an_older_one() -> None:
    version = ubatch.__version__
    assert (FILE.parent / f"public-names-{version}.txt").is_file(), f"copy {FILE.name} to public-names-{version}.txt"
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("before", "now", "names"),
    [
        ("u.f(x)\nu.g()\n", "u.f(x, y)\nu.g()\n", {"f"}),
        ("u.C()\nu.C.a: int\n", "u.C()\nu.C.b: int\n", {"C.a", "C.b"}),
        ("u.C()\nu.C.a: int = 1\n", "u.C()\nu.C.a: int = 2\n", {"C.a"}),
        ("u.C()\nu.C.a: int\n", "", {"C"}),
        ("", "u.C()\nu.C.a(self) -> int\n", {"C"}),
    ],
)
def test_what_changed(before: str, now: str, names: set[str]) -> None:
    assert changed_names(before, now) == names


@pytest.mark.parametrize("name", sorted(ubatch._MOVED))
def test_a_name_that_goes_still_works_and_warns(name: str) -> None:
    place = ubatch._MOVED[name]
    assert name not in ubatch.__all__
    assert name in UNRELEASED
    with pytest.warns(DeprecationWarning, match=rf"ubatch\.{name} .* {re.escape(place)}\.{name}\."):
        found = getattr(ubatch, name)
    assert found is getattr(importlib.import_module(place), name)


def test_importing_a_name_that_goes_warns_where_it_is_imported() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from ubatch import Ring  # noqa: F401
    assert {warning.filename for warning in caught} == {__file__}


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'ubatch' has no attribute 'nonsense'"):
        ubatch.nonsense  # noqa: B018


def test_what_someone_has_replaced_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ubatch, "dbo_yield", None)
    assert not hasattr(ubatch, "no_such_name")
    assert ubatch.dbo_yield is None
