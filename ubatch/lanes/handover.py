"""Declared values that one stage of a layer passes to a later one: each is left once and taken once.

Between two stages of a layer other lanes run, and values kept meanwhile cost memory. So a layer declares in one place
the values that its stages hand over:

    @dataclass(frozen=True, slots=True)
    class Layer(Handover):
        combines: Left[list[Transfer[Tensor]]] = field(default_factory=partial(Left, "combines"))

It is a programming error to leave a value twice, to take a missing one, or to end the layer with a value not taken; the
error names the field. Source: SGLang's `_StateDict` of two-batch overlap, which refuses to overwrite.
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

from ubatch.errors import UBatchError

__all__ = ["Handover", "HandoverError", "Left"]

T = TypeVar("T")
_NOTHING: Any = object()


class HandoverError(UBatchError):
    """A stage overwrote, missed or forgot a value that another stage left."""


class Left(Generic[T]):
    """One value that a stage leaves for a later stage.

    Args:
        name: of the field, for errors.
    """

    __slots__ = ("_taken", "_value", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._value: T = _NOTHING
        self._taken = False

    @property
    def waits(self) -> bool:
        """Whether a value was left and not yet taken."""
        return self._value is not _NOTHING

    def leave(self, value: T) -> None:
        """Leave `value`.

        Raises:
            HandoverError: a value was left here before.
        """
        if self.waits or self._taken:
            raise HandoverError(f"{self.name!r} was left for a later stage twice in one call.")
        self._value = value

    def take(self) -> T:
        """Return the value and drop the reference to it.

        Raises:
            HandoverError: no value was left, or it was taken before.
        """
        if not self.waits:
            raise HandoverError(f"{self.name!r} was {'taken twice' if self._taken else 'taken before it was left'}.")
        value, self._value, self._taken = self._value, _NOTHING, True
        return value


class Handover:
    """All values that the stages of one call hand over: a frozen dataclass whose fields are `Left`."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def end(self) -> None:
        """Check, at the end of the call, that every value was taken.

        Raises:
            HandoverError: a value was left and not taken.
        """
        forgotten = [name for name in self.__dataclass_fields__ if getattr(self, name).waits]
        if forgotten:
            raise HandoverError(f"the last stage has ended, but nobody took {', '.join(map(repr, forgotten))}.")
