"""Settings of the runtime. Names are vLLM's, so what a user knows carries over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from ubatch.errors import ConfigError, nearest
from ubatch.group import CommGroup
from ubatch.schedule import Schedule, check_runnable, get_schedule
from ubatch.split_cost import SplitBy
from ubatch.vote import MAX_LANES

__all__ = ["CUDAGraphMode", "UBatchConfig"]


class CUDAGraphMode(StrEnum):
    """Whether steps are captured as CUDA graphs."""

    NONE = "none"
    FULL = "full"


_KINDS: Mapping[str, type] = {
    "enable_dbo": bool,
    "num_ubatches": int,
    "dbo_decode_token_threshold": int,
    "dbo_prefill_token_threshold": int,
    "schedule": str,
    "split_by": str,
    "tbo_token_distribution_threshold": float,
    "timeout_s": float,
    "split_dims": Mapping,
    "output_dims": Mapping,
    "require_overlap": bool,
}


@dataclass(frozen=True)
class UBatchConfig:
    """When and how to overlap.

    Attributes:
        enable_dbo: False runs every step unsplit (and still votes, so that ranks may differ).
        num_ubatches: lanes, 2 to 8.
        dbo_decode_token_threshold: a decode-only step overlaps from this many tokens on.
        dbo_prefill_token_threshold: a step with a prefill overlaps from this many tokens on.
        schedule: a name of `ubatch.schedule.SCHEDULES`, or a `Schedule`.
        tbo_token_distribution_threshold: a prefill batch so lopsided that the best split by requests leaves one lane
            less than this share of the tokens is cut inside a request; 0 never does, 0.5 always. Read by the model
            runner, which knows the requests; so is
        split_by: `tokens`, or `cost` (attention pairs and expert rows): what lanes of a batch with prefills have
            equal shares of. The threshold above is then a share of the cost.
        timeout_s: a lane that holds the baton longer counts as hung.
        group: the ranks whose collectives the module calls; `moe.expert_parallel` sets it.
        split_dims: parameter name (or `name.key` inside a nested argument) -> the dimension to split, None to give
            every lane the whole argument.
        output_dims: output name (or path; `output` where there is no name) -> the dimension to concatenate, None
            where every lane returns the same. What is not named is concatenated along dimension 0, where that is the
            rows or tokens of the call.
        require_overlap: raise `OverlapDeclined` instead of running unsplit.

    Raises:
        ConfigError: at construction, for any value that cannot work.
    """

    enable_dbo: bool = True
    num_ubatches: int = 2
    dbo_decode_token_threshold: int = 32
    dbo_prefill_token_threshold: int = 512
    schedule: Schedule | str = "mlp_shared_overlap"
    split_by: str = SplitBy.TOKENS.value
    tbo_token_distribution_threshold: float = 0.48
    timeout_s: float = 60.0
    group: CommGroup | None = None
    split_dims: Mapping[str, int | None] = field(default_factory=dict)
    output_dims: Mapping[str, int | None] = field(default_factory=dict)
    require_overlap: bool = False

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            _check_type(name, getattr(self, name), kind if name != "schedule" else (str, Schedule))
        for option in ("split_dims", "output_dims"):
            for name, dim in getattr(self, option).items():
                _check_type(f"a key of {option}", name, str)
                _check_type(f"{option}[{name!r}]", dim, (int, type(None)))
        if not 2 <= self.num_ubatches <= MAX_LANES:
            raise ConfigError(
                f"num_ubatches must be 2 to {MAX_LANES}, not {self.num_ubatches}. Set enable_dbo=False to run unsplit."
            )
        for name in ("dbo_decode_token_threshold", "dbo_prefill_token_threshold"):
            value = getattr(self, name)
            if value < self.num_ubatches:
                raise ConfigError(
                    f"{name} is {value}, below num_ubatches ({self.num_ubatches}): a lane would be empty. "
                    f"Set it to at least {self.num_ubatches}."
                )
        if not 0 <= self.tbo_token_distribution_threshold <= 0.5:
            raise ConfigError(
                f"tbo_token_distribution_threshold is {self.tbo_token_distribution_threshold}; it must be 0 to 0.5."
            )
        if self.split_by not in tuple(SplitBy):
            raise ConfigError(f"unknown split_by {self.split_by!r}{nearest(self.split_by, tuple(SplitBy))}")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive, not {self.timeout_s}.")
        if self.group is not None and not isinstance(self.group, CommGroup):
            raise ConfigError(
                f"group must be a CommGroup, not {type(self.group).__name__}. "
                "Make one: CommGroup.from_process_group(pg)."
            )
        self.resolved_schedule()

    def resolved_schedule(self) -> Schedule:
        """The schedule with this configuration's number of lanes; a one-lane schedule stays one."""
        schedule = get_schedule(self.schedule) if isinstance(self.schedule, str) else self.schedule
        check_runnable(schedule)
        return schedule if schedule.lanes == 1 else schedule.with_lanes(self.num_ubatches)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> UBatchConfig:
        """From keys in snake or kebab case.

        Raises:
            ConfigError: an unknown key (with the nearest known one), or a wrong type or value.
        """
        arguments: dict[str, Any] = {}
        for key, value in values.items():
            name = str(key).replace("-", "_")
            if name not in _KINDS:
                raise ConfigError(f"unknown key {key!r}{nearest(name, _KINDS)}")
            if name in arguments:
                raise ConfigError(f"{key!r} is given twice, with hyphens and with underscores. Remove one.")
            _check_type(str(key), value, _KINDS[name])
            arguments[name] = value
        return cls(**arguments)

    @classmethod
    def from_yaml(cls, path: str | Path) -> UBatchConfig:
        """From a YAML file with one mapping. Needs the `pyyaml` package.

        Raises:
            ConfigError: the file is missing, is not YAML or not a mapping, or has a bad key or value.
        """
        import yaml

        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"cannot read {path}: it is not UTF-8 text ({error.reason}).") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {error}") from error
        if values is None:
            values = {}
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold one mapping of settings, not {type(values).__name__}.")
        try:
            return cls.from_mapping(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def describe(self) -> dict[str, object]:
        """The settings as plain values, for logs."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "group"}


def _check_type(name: str, value: object, kind: type | tuple[type, ...]) -> None:
    """A bool is no number here, though Python has it so; an int may stand for a float."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    accepted = (*kinds, int) if float in kinds else kinds
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join("None" if each is type(None) else each.__name__ for each in kinds)
        raise ConfigError(f"{name} must be {expected}, not {value!r} ({type(value).__name__}).")
