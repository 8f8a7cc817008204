"""Tests here may be coroutine functions."""

from async_tests import pytest_pyfunc_call as pytest_pyfunc_call
