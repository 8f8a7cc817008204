"""Errors of a checkpoint, a request, or the order of steps. All are `UBatchError`s."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ubatch import UBatchError
from ubatch.errors import shown

_ALLOCATOR = "DefaultCPUAllocator"
_FIRST = 5
"""Names of tensors that a message shows."""


class CheckpointError(UBatchError):
    """A checkpoint cannot be loaded; the message names the file and what is wrong with it."""


class CheckpointFileMissing(CheckpointError):
    """A file of the checkpoint, or the whole folder, is missing."""


class TensorMissing(CheckpointError):
    """The checkpoint has no tensor `name`, which the architecture needs."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class TensorsUnread(CheckpointError):
    """The checkpoint stores tensors `names`, which the architecture does not read: it would compute something else."""

    def __init__(self, names: Sequence[str], path: Path, architecture: str) -> None:
        self.names = tuple(names)
        first = ", ".join(map(shown, names[:_FIRST])) + (f" and {len(names) - _FIRST} more" if names[_FIRST:] else "")
        number = "a tensor" if len(names) == 1 else f"{len(names)} tensors"
        drafts = any(name.endswith(".eh_proj.weight") for name in names)
        super().__init__(
            f"{path} stores {number} that {architecture} with this config.json does not read: {first}. "
            "The model would run without them, and be wrong. Give the config that these weights were trained with, or "
            "take out of the files what is not the model's."
            + (" Layers that draft tokens (eh_proj) are counted by num_nextn_predict_layers." if drafts else "")
        )


class WrongShape(CheckpointError):
    """Tensor `name` has shape `got`; the checkpoint's config requires `expected`.

    Args:
        entries: the entries of the config that may be at fault, with their values.
    """

    def __init__(self, name: str, got: Sequence[int], expected: Sequence[int], entries: Sequence[str] = ()) -> None:
        self.name, self.got, self.expected = name, tuple(got), tuple(expected)
        entry = f" ({', '.join(entries)})" if entries else ""
        super().__init__(
            f"tensor {shown(name)} has shape {list(self.got)}, but config.json asks for {list(self.expected)}{entry}; "
            f"weights and config are not of the same model."
        )


class UnknownArchitecture(CheckpointError):
    """This package does not support the checkpoint's architecture."""

    def __init__(self, architecture: str, known: Iterable[str]) -> None:
        self.architecture = architecture
        # No "did you mean": a config names its family truly, and the weights of another one would not fit.
        super().__init__(f"unknown architecture {shown(architecture)}. Known: {', '.join(sorted(known))}")


@contextmanager
def fits_in_memory(what: str) -> Iterator[None]:
    """Say of what torch's allocator on a CPU had no memory for, `what`, that the checkpoint's sizes may be at fault.

    Raises:
        CheckpointError: instead of the allocator's error.
    """
    try:
        yield
    except RuntimeError as error:
        if _ALLOCATOR not in str(error):
            raise
        detail = str(error).rpartition(_ALLOCATOR)[2].strip(": ").partition("\n")[0]
        raise CheckpointError(
            f"{what} do not fit into this machine's memory ({detail}). Check the sizes in config.json; use a smaller "
            "model or dtype, or more ranks on more machines."
        ) from error


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
