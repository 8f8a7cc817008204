"""Fake devices with lanes on them; the lanes' threads end with the test."""

from collections.abc import Iterator

import pytest
from streams_cases import Lanes, Streams, opened_lanes, opened_streams


@pytest.fixture
def fake() -> Iterator[Streams]:
    yield from opened_streams()


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    yield from opened_lanes()
