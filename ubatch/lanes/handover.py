"""What one stage leaves for a later one, declared: left once, taken once.

Between the stages of a layer the baton may be anywhere, and what is kept meanwhile costs memory. So a layer declares
what its stages hand over, in one place:

    @dataclass(frozen=True, slots=True)
    class Layer(Handover):
        combines: Left[list[Transfer[Tensor]]] = field(default_factory=partial(Left, "combines"))

Leaving it twice, taking what is not there, or ending the layer with something left behind is an error of the code,
which names it. Source: SGLang's `_StateDict` of two-batch overlap, which refuses to overwrite.
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

from ubatch.errors import UBatchError

__all__ = ["Handover", "HandoverError", "Left"]

T = TypeVar("T")
_NOTHING: Any = object()


class HandoverError(UBatchError):
    """A stage overwrote, missed or forgot what another one left."""


class Left(Generic[T]):
    """One value from one stage to a later one.

    Args:
        name: of the field that it is, for errors.
    """

    __slots__ = ("_taken", "_value", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._value: T = _NOTHING
        self._taken = False

    @property
    def waits(self) -> bool:
        """Whether something was left that nobody has taken."""
        return self._value is not _NOTHING

    def leave(self, value: T) -> None:
        """Leave `value`.

        Raises:
            HandoverError: something was left here before.
        """
        if self.waits or self._taken:
            raise HandoverError(f"{self.name!r} was left for a later stage twice in one call.")
        self._value = value

    def take(self) -> T:
        """What was left; nothing is kept here.

        Raises:
            HandoverError: nothing is here, or it was taken before.
        """
        if not self.waits:
            raise HandoverError(f"{self.name!r} was {'taken twice' if self._taken else 'taken before it was left'}.")
        value, self._value, self._taken = self._value, _NOTHING, True
        return value


class Handover:
    """All that the stages of one call hand over: a frozen dataclass whose fields are `Left`."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def end(self) -> None:
        """The call has ended.

        Raises:
            HandoverError: something was left that nobody took.
        """
        forgotten = [name for name in self.__dataclass_fields__ if getattr(self, name).waits]
        if forgotten:
            raise HandoverError(f"the last stage has ended, but nobody took {', '.join(map(repr, forgotten))}.")
