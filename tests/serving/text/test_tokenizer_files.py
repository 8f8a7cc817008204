"""What a checkpoint without a usable tokenizer is told: at once, in one line, by whatever needs text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from repository import TINY_MOE

import serving.llm
import serving.offline.opening
from serving import LLM
from serving.cli import main
from serving.text.tokenizer import load_tokenizer
from ubatch import ConfigError

TEXT = "tokenizer.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_MOE, tmp_path / "model"))


def leave_out(folder: Path) -> None:
    (folder / TEXT).unlink()


def leave_out_all(folder: Path) -> None:
    for name in (TEXT, "tokenizer_config.json"):
        (folder / name).unlink()


def only_added(folder: Path) -> None:
    spec = json.loads((folder / TEXT).read_text())
    spec["model"] = {"type": "BPE", "vocab": {}, "merges": []}
    (folder / TEXT).write_text(json.dumps(spec))


def cut_off(folder: Path) -> None:
    (folder / TEXT).write_text('{"a"')


def no_spec(folder: Path) -> None:
    (folder / TEXT).write_text('{"version":"1.0"}')


def no_text(folder: Path) -> None:
    (folder / TEXT).write_bytes(b"\xff\xfe")


FAULTS = [
    (leave_out, "tokenizer"),
    (leave_out_all, "tokenizer"),
    (only_added, "only added tokens"),
    (cut_off, "tokenizer.json is not a tokenizer that can be read"),
    (no_spec, "tokenizer.json is not a tokenizer that can be read"),
    (no_text, "tokenizer.json is not a tokenizer that can be read"),
]


@pytest.mark.parametrize("words", [("serve",), ("generate", "--prompt", "x"), ("trace", "--prompt", "x")])
@pytest.mark.parametrize(("spoil", "message"), FAULTS)
def test_commands_refuse_it_when_settings_are_read(
    folder: Path,
    spoil: Callable[[Path], None],
    message: str,
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(folder)
    command, *more = words
    assert main([command, str(folder), "--print-config", *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(folder) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("spoil", "message"), FAULTS)
def test_llm_refuses_it_before_weights_travel(
    folder: Path, spoil: Callable[[Path], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(folder)
    monkeypatch.setattr(serving.offline.opening, "fetch_checkpoints", lambda _: pytest.fail("weights were asked for"))
    with pytest.raises(ConfigError, match=message if "read" not in message else "tokenizer"):
        LLM(folder, device="cpu")


def test_a_server_needs_text_and_other_machines_do_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_out_all(folder)
    nodes = ("--nnodes", "2", "--node-rank", "1", "--data-parallel-size", "2", "--enable-expert-parallel")
    where = ("--master-addr", "127.0.0.1", "--master-port", "4000", "--device", "cpu")
    assert main(["serve", str(folder), *nodes, *where, "--print-config"]) == 0


def test_llm_without_a_tokenizer_needs_none(folder: Path) -> None:
    leave_out_all(folder)
    with LLM(folder, skip_tokenizer_init=True, device="cpu", kv_cache_memory="4M", max_num_seqs=1) as llm:
        assert llm.generate([1, 2, 3], use_tqdm=False)[0].outputs[0].token_ids


def test_slow_vocabularies_are_tokenizers_too(folder: Path) -> None:
    """`vocab.json` and `merges.txt`, which transformers makes the same tokenizer of."""
    wanted = load_tokenizer(TINY_MOE)
    spec = json.loads((folder / TEXT).read_text())["model"]
    (folder / TEXT).unlink()
    (folder / "vocab.json").write_text(json.dumps(spec["vocab"]))
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in spec["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    assert load_tokenizer(folder).encode("def main") == wanted.encode("def main")


@pytest.mark.parametrize("name", ["enable_dbo", "enable_two_batch_overlap"])
def test_llm_takes_either_name_of_overlap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.llm, "make_offline_engine", lambda options: Mock())
    llm = LLM(TINY_MOE, skip_tokenizer_init=True, device="cpu", **{name: True})
    assert llm.options.dbo.enable_dbo
    with pytest.raises(ConfigError, match="one setting with two values"):
        LLM(TINY_MOE, enable_dbo=False, enable_two_batch_overlap=True)
