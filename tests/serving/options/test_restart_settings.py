"""How often engines are started again: who may say so, what is refused, and what the engines are told."""

from __future__ import annotations

import pytest
from engine_mains import tiny
from repository import TINY_MOE

from serving import generate
from serving.engine.offline import make_offline_engine
from serving.engine.options import RestartLimits
from serving.offline.opening import resolve_options
from serving.options import notes, read_serve_command, to_engine_options
from ubatch import ConfigError

TINY = str(TINY_MOE)


def of_server(*words: str) -> RestartLimits:
    return read_serve_command("ubatch serve", "", [TINY, *words]).engine.restarts


def test_a_server_starts_its_engines_again_and_scripts_do_not() -> None:
    assert of_server() == RestartLimits(3, 600.0, 60.0)
    words = ("--max-engine-restarts", "7", "--engine-restart-window-s", "60", "--resume-timeout-s", "0")
    assert of_server(*words) == RestartLimits(7, 60.0, 0.0)
    of_generate = generate.read("ubatch generate", "", [TINY, "--prompt", "a", *words[:4]])
    assert of_generate.engine.restarts == RestartLimits(7, 60.0)
    assert generate.read("ubatch generate", "", [TINY, "--prompt", "a"]).engine.restarts.max_engine_restarts == 0
    in_script = {"max_engine_restarts": 2, "engine_restart_window_s": 30.0, "resume_timeout_s": 5.0}
    for options, limits in (({}, RestartLimits()), (in_script, RestartLimits(2, 30.0, 5.0))):
        assert to_engine_options(resolve_options(TINY, options)[0]).restarts == limits


def test_times_without_restarts_are_told() -> None:
    words = ("--max-engine-restarts", "0", "--engine-restart-window-s", "60", "--resume-timeout-s", "5")
    (note,) = notes(read_serve_command("ubatch serve", "", [TINY, *words]).settings)
    assert note == (
        "--engine-restart-window-s, --resume-timeout-s without --max-engine-restarts: no engine is started again"
    )


def test_a_rank_in_the_callers_process_cannot_be_started_again() -> None:
    with pytest.raises(
        ConfigError, match=r"max_engine_restarts is 2, but a single rank runs in this process.*AsyncLLM"
    ):
        make_offline_engine(tiny(1, restarts=RestartLimits(2)))
