"""`--max-prefill-tokens-per-mixed-step` as it is given: a number, auto, off; and what contradicts it."""

from __future__ import annotations

from pathlib import Path

import pytest
from repository import TINY_MOE

from serving.options import read_serve_command, resolve_settings, to_engine_options
from serving.options.sources import read_file, read_keywords

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
