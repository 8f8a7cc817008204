"""Separate settings for decode, prefill and verify steps.

    decode      one token per request
    prefill     prompts, or chunks of them; also in a batch with decodes
    verify      draft tokens

A setting that a mode leaves out is taken from the rest of the `UBatchConfig`; its `for_mode` merges both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ubatch.errors import ConfigError, check_type, named_values, shown
from ubatch.schedules.forward_context import ForwardMode
from ubatch.schedules.schedule import Schedule
from ubatch.schedules.vote import MAX_LANES

MODE_KEYS = ("decode", "prefill", "verify")

_KEYS: Mapping[ForwardMode, str] = {
    ForwardMode.DECODE: "decode",
    ForwardMode.PREFILL: "prefill",
    ForwardMode.MIXED: "prefill",
    ForwardMode.TARGET_VERIFY: "verify",
    ForwardMode.DRAFT_EXTEND: "decode",  # never overlapped
    ForwardMode.IDLE: "decode",  # takes part in any step of the other ranks
}


def mode_key(mode: ForwardMode) -> str:
    """The key in `MODE_KEYS` for the settings of a step."""
    return _KEYS[mode]


@dataclass(frozen=True)
class ModeSettings:
    """Settings for the steps of one mode; None takes the value from the rest of the `UBatchConfig`.

    Attributes:
        schedule: a name, or a `Schedule`.
        num_ubatches: lanes, 2 to 8.
        token_threshold: such a step overlaps from this many tokens on.

    Raises:
        ConfigError: a wrong type, or a number out of range.
    """

    schedule: Schedule | str | None = None
    num_ubatches: int | None = None
    token_threshold: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule | str | None):
            raise ConfigError(f"schedule must be the name of a schedule, not {shown(self.schedule)}.")
        for name in ("num_ubatches", "token_threshold"):
            if getattr(self, name) is not None:
                check_type(name, getattr(self, name), int)
        if self.num_ubatches is not None and not 2 <= self.num_ubatches <= MAX_LANES:
            raise ConfigError(f"num_ubatches must be 2 to {MAX_LANES}, not {self.num_ubatches}.")
        if self.token_threshold is not None and self.token_threshold < 1:
            raise ConfigError(f"token_threshold must be at least 1, not {self.token_threshold}.")

    @classmethod
    def from_mapping(cls, mode: str, values: object) -> ModeSettings:
        """Read the settings that a file has under `mode`; keys in snake or kebab case.

        Raises:
            ConfigError: `values` is no mapping, or has an unknown key (the message has the nearest known one) or a
                wrong value.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{mode} must hold a mapping ({', '.join(_SETTINGS)}), not {shown(values)} ({type(values).__name__})."
            )
        arguments = named_values(values, _SETTINGS, f"{mode}: ")
        try:
            return cls(**arguments)
        except ConfigError as error:
            raise ConfigError(f"{mode}: {error}") from error

    def to_mapping(self) -> dict[str, object]:
        """The settings that are not None, as plain values; a `Schedule` as its name."""
        schedule = self.schedule.name if isinstance(self.schedule, Schedule) else self.schedule
        return {name: value for name, value in (vars(self) | {"schedule": schedule}).items() if value is not None}


_SETTINGS = ("schedule", "num_ubatches", "token_threshold")


@dataclass(frozen=True)
class Resolved:
    """The settings in force in the steps of a mode.

    Attributes:
        schedule: with its lanes.
        token_threshold: a step overlaps from this many tokens on.
    """

    schedule: Schedule
    token_threshold: int

    @property
    def single_batch(self) -> bool:
        """Whether a step overlaps without being split: one lane, with chunks of experts or a signalled combine."""
        return self.schedule.single_batch

    @property
    def overlaps(self) -> bool:
        """Whether a step can overlap at all."""
        return self.schedule.overlaps
