"""The server against its own `/openapi.json`, by schemathesis, where its command is in the path."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from api_clients import app_of, says, serving
from fake_engine import FakeEngine, FakeInfo

pytestmark = pytest.mark.server

# JSON schema compares no two numbers: these are documented, and still refused.
NOT_IN_A_SCHEMA = ("min_tokens must be from 0 to max_tokens", "context_length_exceeded")
NOT_IN_A_SCHEMA += ('"message":"structured_outputs', '"message":"response_format')  # schemas and grammars are texts


@pytest.mark.slow
@pytest.mark.timeout(140)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "others"])
def test_the_server_does_what_it_describes(path: str, tmp_path: Path) -> None:
    program = shutil.which("schemathesis")
    if program is None:
        pytest.skip("the program schemathesis is not installed; `pip install schemathesis` brings it")
    engine = FakeEngine(reply=says("fine"), info=FakeInfo(max_model_len=100_000))
    chosen = ["--exclude-path-regex", "/v1/.*completions"] if path == "others" else ["--include-path", path]
    with serving(app_of(engine, described=True, profiles=True, max_outputs_per_request=1024)) as address:
        command = [program, "run", f"{address}/openapi.json", "--checks", "all", "--continue-on-failure", *chosen]
        command += ["--max-examples", "20"]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=130)
    failures = re.split(r"\n- ST", run.stdout.partition("= FAILURES =")[2])[1:]
    new = [failure for failure in failures if not any(reason in failure for reason in NOT_IN_A_SCHEMA)]
    assert not new, run.stdout
    assert failures or run.returncode == 0, run.stdout + run.stderr
