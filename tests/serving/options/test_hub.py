"""Checkpoints by their names on the hub: its cache, revisions, and what cannot be had. Nothing here needs a network."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hub_cache import add_to_cache, make_lite
from huggingface_hub import constants, errors
from repository import ROOT, TINY_MOE

from model_runner import CheckpointError
from serving import LLM
from serving.cli import main
from serving.generate import read as read_generate
from serving.hub import ModelNotFound, fetch_weights, find_checkpoint, looks_like_name
from serving.options import fetch_checkpoints, notes, read_serve_command, resolve_keywords
from serving.text.tokenizer import load_tokenizer
from serving.workbench.tuning.tune import read as read_tune
from ubatch import ConfigError

NAME = "tiny-lab/Tiny-MoE"
OLD, NEW = "a" * 40, "b" * 40
HEAD = TINY_MOE.parent / "tiny-moe-eagle"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with two commits of a model, and no way to the hub."""
    cache = tmp_path / "hub"
    add_to_cache(cache, NAME, TINY_MOE, OLD, "v1")
    add_to_cache(cache, NAME, TINY_MOE, NEW, "main")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def serve(*words: str) -> Any:
    return read_serve_command("ubatch serve", "", list(words))


# -- where it is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "commit"),
    [((), NEW), (("--revision", "v1"), OLD), (("--revision", OLD), OLD), (("--revision", "main"), NEW)],
)
def test_a_name_is_looked_up_in_the_cache(cache: Path, words: tuple[str, ...], commit: str) -> None:
    command = serve("--model", NAME, *words)
    folder = command.engine.model
    assert folder == cache / "models--tiny-lab--Tiny-MoE" / "snapshots" / commit
    assert command.settings["model"] == command.settings["served_model_name"] == NAME
    fetch_checkpoints(command.settings)  # all of it is there


def test_all_ways_to_name_a_model(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: {NAME}\nrevision: v1\n")
    wanted = serve(NAME, "--revision", "v1").engine
    for words in (
        ["--model", NAME, "--revision=v1"],
        [f"--model={NAME}", "--config", str(file)],
        ["--config", str(file)],
    ):
        assert serve(*words).engine == wanted
    assert serve(NAME, "--model", NAME).engine == serve(NAME).engine
    file.write_text("model: nobody/nothing\n")
    assert serve("--model", NAME, "--config", str(file)).settings["model"] == NAME
    add_to_cache(cache, "gpt2", TINY_MOE, OLD, "main")
    assert serve("gpt2").engine.model.name == OLD


@pytest.mark.parametrize("read", [read_generate, read_tune])
def test_other_commands_do_the_same(cache: Path, read: Callable[..., Any]) -> None:
    prompt = ["--prompt", "x"] if read is read_generate else []
    folder = read("ubatch", "", ["--model", NAME, "--revision", "v1", *prompt]).engine.model
    assert folder.name == OLD


@pytest.mark.long
def test_llm_takes_names(cache: Path) -> None:
    with LLM(NAME, revision="v1", device="cpu", kv_cache_memory="4M", max_num_seqs=1) as llm:
        assert llm.options.model.name == OLD
        assert llm.generate("def main(", use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize("keyword", [{"port": 9000}, {"api_key": "x"}, {"served_model_name": "x"}])
def test_llm_refuses_what_only_a_server_has(keyword: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"is for `ubatch serve`, and LLM has no server. Remove it."):
        LLM(TINY_MOE, **keyword)


def test_download_dir_is_another_cache(cache: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    add_to_cache(other, "a/b", TINY_MOE, OLD, "main")
    assert resolve_keywords("a/b", {"download_dir": other}).folders["model"].is_relative_to(other)
    with pytest.raises(ModelNotFound):
        resolve_keywords("a/b", {})


def test_draft_models_have_names_too(cache: Path) -> None:
    add_to_cache(cache, "tiny-lab/head", HEAD, NEW, "main")
    keywords = {"speculative_algorithm": "eagle", "speculative_draft_model_path": "tiny-lab/head"}
    settings = resolve_keywords(str(TINY_MOE), keywords)
    assert settings.folders["speculative_draft_model_path"].name == NEW
    with pytest.raises(ModelNotFound, match="speculative_draft_model_path: tiny-lab/tail is no folder here"):
        resolve_keywords(str(TINY_MOE), {**keywords, "speculative_draft_model_path": "tiny-lab/tail"})


def test_a_folder_that_looks_like_a_name_is_a_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny-lab").mkdir()
    Path(NAME).symlink_to(TINY_MOE)
    assert serve(NAME).engine.model == Path(NAME)


def test_what_looks_like_a_name() -> None:
    assert looks_like_name("deepseek-ai/DeepSeek-V2-Lite")
    assert looks_like_name("gpt2")
    for path in ("./foo", "../a/b", "/a/b", "~/a", "a/b/c", "a/", "a//b", "examples/models"):
        assert not looks_like_name(path), path


# -- what comes when ---------------------------------------------------------------------------------------------


def test_weights_come_after_the_checks_and_of_the_same_commit(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Config and tokenizer first; then, before any rank starts, the weights of that commit; none for `dummy`."""
    asked: list[dict[str, Any]] = []
    snapshot = add_to_cache(tmp_path / "new", "a/b", TINY_MOE, NEW, leave_out=".safetensors")

    def download(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        if "*.safetensors" in options["allow_patterns"]:
            (snapshot / "model.safetensors").symlink_to(TINY_MOE / "model.safetensors")
        return str(snapshot)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    settings = serve("a/b", "--revision", "main").settings
    assert [each["revision"] for each in asked] == ["main"]
    assert not any(part.endswith("safetensors") for part in asked[0]["allow_patterns"])
    assert asked[0]["local_files_only"] is False
    fetch_checkpoints(settings)
    assert [each["revision"] for each in asked] == ["main", NEW]
    asked.clear()
    fetch_checkpoints(serve("a/b", "--load-format", "dummy").settings)
    assert len(asked) == 1


@pytest.mark.parametrize("offline", [True, False])
def test_a_cache_with_short_names_of_commits(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    """Caches that others made. The folder's name is no revision then: what was asked for is asked for again."""
    snapshot = add_to_cache(cache, "a/b", TINY_MOE, "abc1234", "main")
    asked: list[str | None] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, revision, **_: asked.append(revision) or str(snapshot)
    )
    fetch_checkpoints(serve("a/b").settings)
    assert asked == ([None] if offline else [None, None])
    asked.clear()
    fetch_checkpoints(serve("a/b", "--revision", "main").settings)
    assert asked == (["main"] if offline else ["main", "main"])


def test_a_checkpoint_without_weights_is_refused_before_a_rank_starts(cache: Path, tmp_path: Path) -> None:
    add_to_cache(cache, "a/b", TINY_MOE, OLD, "main", leave_out=".safetensors")
    settings = serve("a/b").settings
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors nor"):
        fetch_checkpoints(settings)
    fetch_checkpoints(serve("a/b", "--load-format", "dummy").settings)


# -- what cannot be had ------------------------------------------------------------------------------------------


REFUSED = {
    "nobody/nothing": "MODEL: nobody/nothing is no folder here, is not (or not whole) in the cache",
    "gpt2": "MODEL: gpt2 is no folder here, is not (or not whole) in the cache",
    "nobody/at-all": "Unset HF_HUB_OFFLINE, name the cache that has it (HF_HUB_CACHE, --download-dir)",
    f"{NAME} --revision v9": f"MODEL: {NAME} at revision v9 is no folder here, is not",
    f"{NAME} --revision {'c' * 40}": "at revision ccc",
    "--model ./foo": "--model: ./foo is not a folder. Give the folder of a Hugging Face checkpoint, or its",
    "a/b/c": "a/b/c is not a folder",
    "''": "MODEL is empty: give the folder of a Hugging Face checkpoint, or its name on the hub",
    "--model ''": "--model is empty: give",
    "'--model= '": "--model is empty: give",
    "TINY --revision v1": "--revision has no effect: ",
    "TINY --download-dir x": "--download-dir has no effect: ",
    f"{NAME}--x/y": "is not a folder",
    "a--b/y..z": "no name that the hub allows",
    "c/d --model a/b": '--model ("a/b") and MODEL ("c/d") are one setting with two values',
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_is_not_there_is_one_clear_line(cache: Path, call: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *shlex.split(call.replace("TINY", str(TINY_MOE)))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert REFUSED[call] in line


def _answer(kind: type[errors.HfHubHTTPError], status: int) -> Exception:
    try:
        import httpx2 as client  # what the hub's client has brought along
    except ImportError:
        client = httpx
    request = client.Request("GET", "https://huggingface.co/api/models/a/b")
    return kind("no", response=client.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (_answer(errors.GatedRepoError, 403), "is gated: ask for access on https://huggingface.co/a/b, then log"),
        (_answer(errors.RepositoryNotFoundError, 401), "the hub has no model of that name, or a private one"),
        (_answer(errors.RevisionNotFoundError, 404), "at revision v1: the hub has no such branch, tag or commit"),
        (_answer(errors.HfHubHTTPError, 500), "could not be had from the hub: HfHubHTTPError"),
        (errors.LocalEntryNotFoundError("no"), "and the hub does not answer. Try again, name a cache"),
        (OSError(28, "No space left on device"), "could not be had from the hub: OSError: [Errno 28] No space"),
    ],
)
def test_what_the_hub_refuses_says_what_to_do(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelNotFound, match=r"^MODEL: a/b") as caught:
        find_checkpoint("a/b", "MODEL", revision="v1")
    assert message in str(caught.value)


def test_the_progress_bar_is_the_hubs_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody turns it off, and nobody puts another one in its place."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    enable_progress_bars()  # whatever ran before in this process

    asked: list[dict[str, Any]] = []
    real = __import__("huggingface_hub").snapshot_download
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: asked.append(k) or real(*a, **k))
    fetch_weights(find_checkpoint(NAME, "MODEL"), "MODEL")
    assert asked
    assert not any("tqdm_class" in each for each in asked)
    assert not are_progress_bars_disabled()


# -- code of checkpoints -----------------------------------------------------------------------------------------


def test_no_code_of_a_checkpoint_is_run_and_nobody_is_asked(tmp_path: Path) -> None:
    folder = make_lite(tmp_path / "lite")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("def main(  x)") == load_tokenizer(TINY_MOE).encode("def main(  x)")
    assert tokenizer.chat_template
    plain, trusting = (serve(str(folder), "--load-format", "dummy", *more) for more in ((), ("--trust-remote-code",)))
    assert plain.engine == trusting.engine
    assert [note for note in notes(trusting.settings) if "no remote code is ever run" in note]
    assert not [note for note in notes(plain.settings) if "remote code" in note]
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"its tokenizer is code, which is never run. Put a tokenizer.json there"):
        load_tokenizer(folder)


@pytest.mark.wide
def test_the_environment_of_the_hub_counts(cache: Path) -> None:
    """In a process of its own, as the hub's client reads its variables when it is imported."""
    words = [sys.executable, "-m", "serving.cli", "serve", "--model", NAME, "--trust-remote-code", "--print-config"]
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache), "PATH": "/usr/bin:/bin", "PYTHONPATH": "."}
    root = ROOT
    ran = subprocess.run(words, capture_output=True, text=True, timeout=100, env=environment, cwd=root, check=False)
    assert ran.returncode == 0, ran.stderr
    assert f"model: {json.dumps(NAME)} " in ran.stdout
    assert "trust-remote-code: true " in ran.stdout
