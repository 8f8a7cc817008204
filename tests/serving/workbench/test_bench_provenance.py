"""What results files say of their age: the commit, the command, and whether what they measure has changed since."""

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from repository import ROOT

from serving.cli import main
from serving.workbench.bench import provenance
from serving.workbench.bench.options import DECIDING, ENGINE, ReportOptions
from serving.workbench.bench.provenance import provenance_of, read_provenance, stamp
from ubatch import ConfigError

pytestmark = [pytest.mark.long, pytest.mark.skipif(shutil.which("git") is None, reason="a commit is git's")]


class Options(ReportOptions):
    """Of a benchmark that measures one folder."""

    measures = ("runtime",)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of a project with one commit, and the command line of a benchmark."""
    root = tmp_path / "tree"
    (root / "runtime").mkdir(parents=True)
    (root / "runtime" / "lane.py").write_text("a = 1\n")
    (root / "runtime" / "notes.md").write_text("no source\n")
    monkeypatch.setattr(provenance, "_ROOT", root)
    monkeypatch.setattr(provenance.sys, "argv", ["/bin/ubatch", "bench", "x", "--blocks", "3", "--json", "x.json"])
    git(root, "init", "--quiet")
    commit(root)
    return root


def git(root: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", "-C", str(root), *who, *words], capture_output=True, text=True, check=True).stdout


def commit(root: Path) -> str:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "x", "--allow-empty")
    return git(root, "rev-parse", "--short=7", "HEAD").strip()


def measured(folder: Path) -> Path:
    """What a benchmark writes."""
    Options(json_file=folder / "x.json").write({"figure": 1.0})
    return folder / "x.json"


def test_a_file_says_when_and_how_it_was_measured(tree: Path, tmp_path: Path) -> None:
    head = git(tree, "rev-parse", "--short=7", "HEAD").strip()
    file = measured(tmp_path)
    assert json.loads(file.read_text())["figure"] == 1.0
    found = read_provenance(file)
    assert (found.commit, found.command, found.stale) == (head, "ubatch bench x --blocks 3", False)
    assert str(found) == f"measured at {head}, 0 commits ago"


def test_it_is_old_once_what_it_measures_has_changed_and_not_before(tree: Path, tmp_path: Path) -> None:
    file = measured(tmp_path)
    head = read_provenance(file).commit
    (tree / "runtime" / "notes.md").write_text("other words\n")
    (tree / "other.py").write_text("b = 1\n")
    commit(tree)
    assert provenance_of(file) == f"measured at {head}, 1 commit ago"
    (tree / "runtime" / "lane.py").write_text("a = 2\n")
    assert provenance_of(file) == f"measured at {head}, 1 commit ago: older than what it measures", "not yet committed"
    assert stamp(["runtime"])["commit"].endswith("+"), "nor is what is measured now"
    commit(tree)
    assert provenance_of(file) == f"measured at {head}, 2 commits ago: older than what it measures"


def test_without_git_the_contents_tell(tree: Path, tmp_path: Path) -> None:
    file = measured(tmp_path)
    head = read_provenance(file).commit
    shutil.rmtree(tree / ".git")
    assert provenance_of(file) == f"measured at {head}"
    (tree / "runtime" / "more.c").write_text("int a;\n")
    assert provenance_of(file) == f"measured at {head}: older than what it measures"
    assert stamp(["runtime"])["commit"] is None


def test_a_file_without_a_stamp_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert provenance_of(tmp_path / "x.json") == "it does not say at which commit it was measured"
    with pytest.raises(ConfigError, match="Measure it again"):
        read_provenance(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="cannot read"):
        read_provenance(tmp_path / "none.json")


def test_what_prints_a_stored_file_says_how_old_it_is(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = measured(tmp_path)
    assert main(["bench", "results", str(tmp_path)]) == 0
    assert "again" not in capsys.readouterr().out
    (tree / "runtime" / "lane.py").write_text("a = 2\n")
    assert main(["bench", "results", str(tmp_path)]) == 0
    table, again = capsys.readouterr().out.splitlines()
    assert table == f"x.json  {provenance_of(file)}"
    assert again == f"again: ubatch bench x --blocks 3 --json {file}"
    assert main(["bench", "results", str(tree)]) == 2
    assert "`make bench` and `make bench-link` write them" in capsys.readouterr().err
    stored = ROOT / "benchmarks" / "results" / "overlap-ratios.json"
    main(["simulate", "--measured", str(stored)])
    assert f"overlap-ratios.json: {provenance_of(stored)}\n" in capsys.readouterr().out


def test_what_runs_and_decides_a_step_is_all_of_the_runner() -> None:
    def files(sources: Iterable[str]) -> set[str]:
        return {name for name, _ in provenance._contents(sources)}

    decides = files(["model_runner/auto"]) - files(["model_runner/auto/step_cost.py"])
    assert files(DECIDING) == files(["ubatch", "moe", "attention", "model_runner"])
    assert files(ENGINE) == files(DECIDING) - decides
