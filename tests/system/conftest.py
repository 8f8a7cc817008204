"""Tests here may be coroutine functions."""

from __future__ import annotations

from async_tests import pytest_pyfunc_call as pytest_pyfunc_call
