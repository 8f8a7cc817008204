"""`--expert-load-out`: taken by all commands that run engines, refused where nothing would be written."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from repository import TINY_MOE

from serving import generate
from serving.cli import main
from serving.offline.opening import resolve_options
from serving.options import notes, read_serve_command, to_engine_options

TINY = str(TINY_MOE)


def test_every_command_that_runs_engines_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "loads.npy"
    words = [TINY, "--expert-load-out", str(path)]
    assert read_serve_command("ubatch serve", "", words).engine.expert_load_out == path
    assert generate.read("ubatch generate", "", [*words, "--prompt", "a"]).engine.expert_load_out == path
    for given in (path, str(path)):
        assert to_engine_options(resolve_options(TINY, {"expert_load_out": given})[0]).expert_load_out == path
    assert read_serve_command("ubatch serve", "", [TINY]).engine.expert_load_out is None


def test_what_cannot_be_written_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = str(make_checkpoint(tmp_path, "Llama"))
    for model, path, why in (
        (TINY, tmp_path / "loads.csv", "--expert-load-out"),
        (TINY, tmp_path / "loads.csv", "ends with .npy or .json"),
        (TINY, tmp_path / "none" / "loads.npy", "there is no folder"),
        (dense, tmp_path / "loads.npy", "the checkpoint is a dense model. Remove it."),
    ):
        assert main(["serve", model, "--expert-load-out", str(path)]) == 2
        assert why in capsys.readouterr().err


def test_other_machines_say_that_machine_0_writes_it(tmp_path: Path) -> None:
    nodes = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29500")
    there = tmp_path / "only on machine 0" / "loads.npy"
    command = read_serve_command("ubatch serve", "", [TINY, "-dp", "2", "-ep", *nodes, "--expert-load-out", str(there)])
    assert any(note.startswith("--expert-load-out without the client: machine 0") for note in notes(command.settings))
