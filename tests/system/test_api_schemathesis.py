"""The server against its own `/openapi.json`, by schemathesis, where its command is in the path."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from api_clients import app_of, says, serving
from fake_engine import FakeEngine, FakeInfo

pytestmark = pytest.mark.server

# JSON schema compares no two numbers: these are documented, and still refused.
NOT_IN_A_SCHEMA = (
    *("min_tokens must be from 0 to max_", "context_length_exceeded"),
    # nor does it say what a text must be as JSON, which schemas, expressions and grammars are done, and which tools a
    # choice may name
    "must be a JSON object",
    *('"param":"structured_outputs', '"param":"response_format', '"param":"text.format'),
    *('"param":"tools', '"param":"tool_choice"'),
)
TEXTS = {"model", "prompt", "messages", "stop", "bad_words", "stream_options", "truncation_side", "reasoning_effort"}
"""Fields that have no number or boolean."""
WRONG_TYPE = re.compile(r"Schema-violating request accepted.*in body - ([a-z_]+)[\w/.\[\]]*: Incorrect type", re.DOTALL)


def is_told_elsewhere(failure: str) -> bool:
    """Whether a failure is one of these; or of strings for a number or a boolean, which are read."""
    read = (wrong := WRONG_TYPE.search(failure)) is not None and wrong[1] not in TEXTS
    return read or any(reason in failure for reason in NOT_IN_A_SCHEMA)


@pytest.mark.slow
@pytest.mark.timeout(140)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "others"])
def test_the_server_does_what_it_describes(path: str, tmp_path: Path) -> None:
    program = shutil.which("schemathesis")
    if program is None:
        pytest.skip("the program schemathesis is not installed; `pip install schemathesis` brings it")
    engine = FakeEngine(reply=says("fine"), info=FakeInfo(max_model_len=100_000))
    chosen = ["--exclude-path-regex", "/v1/(.*completions|responses)"] if path == "others" else ["--include-path", path]
    with serving(app_of(engine, described=True, profiles=True, max_outputs_per_request=1024)) as address:
        command = [program, "run", f"{address}/openapi.json", "--checks", "all", "--continue-on-failure", *chosen]
        command += ["--max-examples", "20"]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=130)
    failures = re.split(r"\n- ST", run.stdout.partition("= FAILURES =")[2])[1:]
    new = [failure for failure in failures if not is_told_elsewhere(failure)]
    assert not new, run.stdout
    assert failures or run.returncode == 0, run.stdout + run.stderr
