"""What tests of the wrapper share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
