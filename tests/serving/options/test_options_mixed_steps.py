"""`--max-prefill-tokens-per-mixed-step` as it is given: a number, auto, off; and what contradicts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from repository import TINY_MOE

from serving.options import read_serve_command, resolve_settings, to_engine_options
from serving.options.sources import read_file, read_keywords
from ubatch import ConfigError

NAME = "max_prefill_tokens_per_mixed_step"


@pytest.mark.parametrize(("given", "limit"), [(64, 64), ("auto", "auto"), ("off", None)])
def test_it_reaches_the_scheduler(given: int | str, limit: int | str | None) -> None:
    settings = resolve_settings(read_keywords({"model": TINY_MOE, NAME: given}))
    assert to_engine_options(settings).scheduler.max_prefill_tokens_per_mixed_step == limit


@pytest.mark.parametrize(("word", "value"), [("64", 64), ("auto", "auto"), ("off", "off")])
def test_on_the_command_line_a_number_is_a_number(word: str, value: int | str) -> None:
    command = read_serve_command("serve", "", [str(TINY_MOE), f"--{NAME.replace('_', '-')}", word])
    assert command.settings[NAME] == value


def test_off_is_the_default() -> None:
    settings = resolve_settings(read_keywords({"model": TINY_MOE}))
    assert to_engine_options(settings).scheduler.max_prefill_tokens_per_mixed_step is None


@pytest.mark.parametrize(("written", "value"), [("off", "off"), ("'off'", "off"), ("auto", "auto"), ("128", 128)])
def test_in_a_file_off_needs_no_quotes(tmp_path: Path, written: str, value: int | str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"{NAME.replace('_', '-')}: {written}\n", encoding="utf-8")
    assert resolve_settings(read_keywords({"model": TINY_MOE}), read_file(file))[NAME] == value


@pytest.mark.parametrize(
    ("written", "told"), [("on", "True"), ("'64'", "'64'"), ("64.5", "64.5"), ("[64]", r"\[64\]"), ("", "None")]
)
def test_what_is_no_number_in_a_file_is_refused(tmp_path: Path, written: str, told: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"{NAME}: {written}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"expected a number of tokens, auto or off, not {told}"):
        resolve_settings(read_keywords({"model": TINY_MOE}), read_file(file))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({NAME: 0}, "at least 1"),
        ({NAME: "some"}, "expected a number of tokens, auto or off"),
        ({NAME: 15}, r"is 15, below --block-size \(16\)"),
        ({NAME: 2048}, r"no step has more than --max-num-batched-tokens \(2048\)"),
        ({NAME: 64, "prefill_first": True}, "has no effect with prefill_first"),
        ({NAME: "auto", "enable_chunked_prefill": False}, "enable_chunked_prefill forbids that"),
    ],
)
def test_what_cannot_work_is_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_settings(read_keywords({"model": TINY_MOE, **keywords}))
