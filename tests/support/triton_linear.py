"""Linear attention in Triton's interpreter, as on a GPU."""

from __future__ import annotations

import pytest


def use_triton(patch: pytest.MonkeyPatch) -> None:
    """Have linear layers on the CPU run in Triton."""
    pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
    from ubatch.kernels.triton_jit import INTERPRETED

    if not INTERPRETED:
        pytest.skip("Triton's interpreter is off: TRITON_INTERPRET=1 was not set before Triton was imported")
    patch.setattr("attention.linear.choice.runs_in_triton", lambda device: True)
