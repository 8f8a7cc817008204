"""No variable of the environment sets anything here, unless a test says so."""

import pytest


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("UBATCH_API_KEY", "VLLM_ALL2ALL_BACKEND"):
        monkeypatch.delenv(variable, raising=False)
