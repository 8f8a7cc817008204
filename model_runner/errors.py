"""Errors of a checkpoint, a request, or the order of steps. All are `UBatchError`s."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ubatch import UBatchError

__all__ = [
    "CheckpointError",
    "CheckpointFileMissing",
    "RequestError",
    "StepOrderError",
    "TensorMissing",
    "TensorParallelMismatch",
    "UnknownArchitecture",
    "WrongShape",
]


class CheckpointError(UBatchError):
    """A checkpoint cannot be loaded; the message names the file and what is wrong with it."""


class CheckpointFileMissing(CheckpointError):
    """A file of the checkpoint, or the whole folder, is missing."""


class TensorMissing(CheckpointError):
    """The checkpoint has no tensor `name`, which the architecture needs."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class WrongShape(CheckpointError):
    """Tensor `name` has shape `got`; the checkpoint's config requires `expected`."""

    def __init__(self, name: str, got: Sequence[int], expected: Sequence[int]) -> None:
        self.name, self.got, self.expected = name, tuple(got), tuple(expected)
        super().__init__(
            f"tensor {name!r} has shape {list(self.got)}, but config.json asks for {list(self.expected)}; "
            f"weights and config are not of the same model."
        )


class UnknownArchitecture(CheckpointError):
    """This package does not support the checkpoint's architecture."""

    def __init__(self, architecture: str, known: Iterable[str]) -> None:
        self.architecture = architecture
        # No "did you mean": a config names its family truly, and the weights of another one would not fit.
        super().__init__(f"unknown architecture {architecture!r}. Known: {', '.join(sorted(known))}")


class RequestError(UBatchError, ValueError):
    """A prompt or its sampling parameters cannot be served; the message says which and why.

    Args:
        message: what is wrong and what to do.
        param: name of the wrong parameter; None if the prompt is wrong.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class StepOrderError(UBatchError):
    """The calls that make up steps came in an invalid order; the message says which."""


class TensorParallelMismatch(UBatchError):
    """Ranks that share one replica's attention have different requests in a step; the message names them."""
