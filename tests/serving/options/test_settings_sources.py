"""Files, variables and keywords that are not what they should be: each is one line that says where and what to do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT, TINY_MOE

from serving.cli import main
from serving.options import notes, read_serve_command
from serving.options.sources import read_file
from serving.workbench.tracing import trace
from ubatch import ConfigError

TINY = str(TINY_MOE)


# -- files -----------------------------------------------------------------------------------------------------------


def test_what_is_merged_in_may_be_overridden(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("schedules:\n  a: {b: &b {<<: &c {lanes: 2, lead: 1}, lanes: 3}}\n  d: {<<: *b, lead: 0}\n")
    assert read_file(file)["schedules"].value["d"] == {"lanes": 3, "lead": 0}


# -- the environment -------------------------------------------------------------------------------------------------

SHARED = ["--data-parallel-size", "2", "--enable-expert-parallel"]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words, "--print-config"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("value", ["", "pplx", "nonsense"])
@pytest.mark.parametrize(
    "words", [("serve", TINY), ("trace", "--url", "http://h"), ("trace", "--files", "f"), ("generate", TINY)]
)
def test_a_transport_is_checked_only_where_tokens_travel(
    words: tuple[str, ...], value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", value)
    assert printed(capsys, *words)
    if "serve" in words and value:
        assert main(["serve", TINY, *SHARED]) == 2
        assert "VLLM_ALL2ALL_BACKEND: " in capsys.readouterr().err


def test_an_empty_transport_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", "")
    assert "VLLM_ALL2ALL_BACKEND" not in printed(capsys, "serve", TINY, *SHARED, "--device", "cpu")


def test_an_empty_key_matters_only_where_it_is_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UBATCH_API_KEY", "")
    assert printed(capsys, "trace", "--files", "f")
    assert printed(capsys, "trace", TINY, "--prompt", "x")
    for words in (["serve", TINY], ["trace", "--url", "http://h"]):
        assert main([*words, "--print-config"]) == 2
        assert "UBATCH_API_KEY: it should have at least 1 character" in capsys.readouterr().err


# -- a stronger source against a weaker one --------------------------------------------------------------------------


def test_overlap_that_the_line_turns_off_needs_no_other_change(tmp_path: Path) -> None:
    file = tmp_path / "dbo.yaml"
    file.write_text("enable-dbo: true\nubatch-size: 4\ndbo-decode-token-threshold: 2\n")
    words = [TINY, *SHARED, "--device", "cpu", "--config", str(file)]
    with pytest.raises(ConfigError, match="a microbatch would be empty"):
        read_serve_command("ubatch serve", "", words)
    settings = read_serve_command("ubatch serve", "", [*words, "--no-enable-dbo"]).settings
    told = "\n".join(notes(settings))
    assert f"ubatch-size in {file} (4) has no effect: no step overlaps (--no-enable-dbo)" in told
    file.write_text("enable-dbo: true\nenable-single-batch-overlap: true\n")
    settings = read_serve_command("ubatch serve", "", [*words, "--no-enable-dbo"]).settings
    assert settings["schedule"] == "single_batch", "the other kind of overlap stays"


@pytest.mark.parametrize("own", [("--files", "f"), (TINY, "--prompt", "x"), ("--url", "http://line")])
def test_the_source_on_the_line_beats_that_of_the_file(own: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "trace.yaml"
    file.write_text("url: http://file\nfiles: [a, b]\nprompt: [hello]\n")
    command = trace.read("ubatch trace", "", [*own, "--config", str(file)])
    assert command.settings["url"] == ("http://line" if "--url" in own else None)
    assert command.settings["files"] == ((Path("f"),) if "--files" in own else ())
    assert (command.run is not None) == ("--prompt" in own)
    told = [note for note in command.notes if "is given on the command line" in note]
    assert len(told) == 2
    assert all(str(file) in note for note in told)


def test_a_prompt_that_took_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "Hello", TINY]) == 2
    error = capsys.readouterr().err
    assert "--prompt takes all words that follow" in error
    assert "Put MODEL first, or write --model" in error
    assert main(["generate", "--prompt", "Hello", "you there"]) == 2
    assert "MODEL is missing: give" in capsys.readouterr().err


# -- the default thresholds are written once: every command follows them -----------------------------------------------

CHANGED = {"dbo_decode_token_threshold": (32, 47), "dbo_prefill_token_threshold": (512, 611)}
CODE = """
import json
from importlib.machinery import SourceFileLoader

read = SourceFileLoader.get_code
changed = json.loads({changed!r})

def get_code(loader, name):
    if name != "ubatch.wrapping.config":
        return read(loader, name)
    text = loader.get_source(name)
    for setting, (old, new) in changed.items():
        assert f"{{setting}}: int = {{old}}\\n" in text
        text = text.replace(f"{{setting}}: int = {{old}}\\n", f"{{setting}}: int = {{new}}\\n")
    return compile(text, loader.path, "exec")

SourceFileLoader.get_code = get_code

from serving.options import merge, resolve_settings, read_layers, SERVE, to_engine_options
from serving.options.flags.tables import COMMANDS
from serving.options.overlap import overlap_config
from ubatch import UBatchConfig

layers, _ = read_layers(SERVE, "ubatch serve", "", [{model!r}, "--device", "cpu", "--enable-dbo"])
configs = {{"config": UBatchConfig(), "file": UBatchConfig.from_mapping({{}})}}
configs["server"] = to_engine_options(resolve_settings(*layers)).dbo
configs |= {{table.program: overlap_config(merge(table=table)) for table in COMMANDS}}
seen = {{where: {{name: getattr(config, name) for name in changed}} for where, config in configs.items()}}
seen["flags"] = {{name: SERVE.settings[name].default for name in changed}}
print(json.dumps(seen))
"""


@pytest.mark.wide
def test_a_changed_default_is_seen_everywhere() -> None:
    code = CODE.format(changed=json.dumps(CHANGED), model=str(TINY_MOE))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert {"config", "file", "flags", "server", "ubatch generate", "ubatch trace", "ubatch tune"} <= seen.keys()
    new = {name: value for name, (_, value) in CHANGED.items()}
    assert seen == dict.fromkeys(seen, new)
