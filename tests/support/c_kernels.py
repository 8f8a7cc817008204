"""Tests of kernels in C: skipped, with the reason, where there is no compiler."""

from __future__ import annotations

import pytest

from ubatch.kernels.c_jit import why_not_c

_REASON = why_not_c()

needs_c = pytest.mark.skipif(_REASON is not None, reason=_REASON or "C can be compiled")
