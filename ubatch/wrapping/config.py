"""Settings of the runtime. The names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ubatch.errors import ConfigError, check_known, check_type, named_values, shown
from ubatch.process.files import read_yaml
from ubatch.ranks.group import CommGroup, check_group
from ubatch.schedules.forward_context import ForwardMode
from ubatch.schedules.modes import MODE_KEYS, ModeSettings, Resolved, mode_key
from ubatch.schedules.schedule import SCHEDULES, Schedule, check_runnable
from ubatch.schedules.split_cost import SplitBy
from ubatch.schedules.vote import MAX_LANES, Decision, DeclineReason, fingerprint


class CUDAGraphMode(StrEnum):
    """Whether steps are captured as CUDA graphs."""

    NONE = "none"
    FULL = "full"

    @classmethod
    def of(cls, mode: CUDAGraphMode | str) -> CUDAGraphMode:
        """The mode called `mode`.

        Raises:
            ConfigError: there is no such mode.
        """
        check_known("cudagraph_mode", mode, tuple(cls))
        return cls(mode)


class Verify(StrEnum):
    """Which calls of a module are proved before they overlap: run unsplit and in lanes, and compared."""

    FIRST = "first"
    """the first call of every signature (two in 16 bits)"""
    ALWAYS = "always"
    """every call; for development, without speed-up"""
    OFF = "off"
    """no call: the user guarantees that rows of a batch are independent, and names how outputs merge"""


@dataclass(frozen=True)
class UBatchConfig:
    """When and how to overlap.

    Attributes:
        enable_dbo: False runs every step unsplit (and still votes, so that ranks may differ).
        num_ubatches: lanes, 2 to 8. A schedule of `schedules` has its own number.
        dbo_decode_token_threshold: a decode-only step overlaps from this many tokens on.
        dbo_prefill_token_threshold: a step with a prefill overlaps from this many tokens on.
        schedule: a name of `ubatch.schedules.schedule.SCHEDULES` or of `schedules`, or a `Schedule`. One lane with
            chunks (`single_batch`) or a signalled combine overlaps without splitting the batch.
        comm_sms: streaming multiprocessors reserved for communication kernels; None: the schedule's number. Ignored on
            a CPU.
        tbo_token_distribution_threshold: if the best split between requests leaves one lane less than this share of the
            tokens, a prefill batch is cut inside a request; 0: never, 0.5: always. Only the model runner reads this and
            the next, because it knows the requests.
        split_by: lanes of a batch with prefills get equal `tokens`, or equal `cost` (attention pairs and expert rows).
            With `cost` the threshold above is a share of the cost.
        timeout_s: a lane that holds the baton longer counts as hung.
        group: the ranks whose collectives the module calls; `moe.expert_parallel` sets it.
        split_dims: parameter name (or `name.key` inside a nested argument) -> the dimension to split, None to give
            every lane the whole argument.
        output_dims: output name (or path; `output` where there is no name) -> the dimension to concatenate, None if
            every lane returns the same. Needed only with `verify="off"`: there an output without a name is concatenated
            along dimension 0, if that has the call's rows or tokens. A proof finds the dimension by itself, and refuses
            a wrong one.
        profile_ranges: show every lane's stages as ranges in torch.profiler and NVTX (`ubatch.trace.recorder`).
        require_overlap: raise `OverlapDeclined` instead of running unsplit. A proving call is allowed.
        verify: `first`, `always` or `off`; see `Verify`.
        cudagraph_capture_sizes: tokens of the graphs that `UBatchWrapper.capture_sizes` captures; smaller calls are
            padded to the next one.
        schedules: name -> the user's own schedules; their names are valid wherever a schedule's name is.
        modes: separate settings for `decode`, `prefill` (also mixed batches) and `verify` steps; in a file these three
            are top-level keys.

    Raises:
        ConfigError: at construction, for any value that cannot work.
    """

    enable_dbo: bool = True
    num_ubatches: int = 2
    dbo_decode_token_threshold: int = 32
    dbo_prefill_token_threshold: int = 512
    schedule: Schedule | str = "mlp_shared_overlap"
    comm_sms: int | None = None
    split_by: str = SplitBy.TOKENS.value
    tbo_token_distribution_threshold: float = 0.48
    timeout_s: float = 60.0
    group: CommGroup | None = None
    split_dims: Mapping[str, int | None] = field(default_factory=dict)
    output_dims: Mapping[str, int | None] = field(default_factory=dict)
    profile_ranges: bool = False
    require_overlap: bool = False
    verify: str = Verify.FIRST.value
    cudagraph_capture_sizes: tuple[int, ...] = ()
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    modes: Mapping[str, ModeSettings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kinds in _kinds().items():
            check_type(name, getattr(self, name), *kinds)
        for option in ("split_dims", "output_dims"):
            for name, dim in getattr(self, option).items():
                check_type(f"a key of {option}", name, str)
                check_type(f"{option}[{shown(name)}]", dim, int, NoneType)
        sizes = tuple(self.cudagraph_capture_sizes)
        object.__setattr__(self, "cudagraph_capture_sizes", sizes)
        for size in sizes:
            check_type("an entry of cudagraph_capture_sizes", size, int)
        if len(set(sizes)) < len(sizes):
            raise ConfigError(f"cudagraph_capture_sizes {list(sizes)} has a size twice.")
        if min(sizes, default=1) < 1:
            raise ConfigError(f"cudagraph_capture_sizes {list(sizes)}: a size must be at least 1 token.")
        if not 2 <= self.num_ubatches <= MAX_LANES:
            what = f"num_ubatches must be 2 to {MAX_LANES}, not {self.num_ubatches}."
            raise ConfigError(f"{what} Set enable_dbo=False to run unsplit.")
        self._check_schedules()
        share = self.tbo_token_distribution_threshold
        if not 0 <= share <= 0.5:
            raise ConfigError(f"tbo_token_distribution_threshold is {share}; it must be 0 to 0.5.")
        check_known("split_by", self.split_by, tuple(SplitBy))
        check_known("verify", self.verify, tuple(Verify))
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive, not {self.timeout_s}.")
        if self.group is not None:
            check_group(self.group)
        self._by_mode  # noqa: B018 - refuses invalid settings

    def _check_schedules(self) -> None:
        for name, schedule in self.schedules.items():
            check_type("a key of schedules", name, str)
            check_type(f"schedules[{shown(name)}]", schedule, Schedule)
            if name in SCHEDULES:
                raise ConfigError(f"schedules has {name!r}, which is a schedule of this package. Choose another name.")
            if name != schedule.name:
                raise ConfigError(f"schedules[{name!r}] calls itself {schedule.name!r}. Give both the same name.")
            if schedule.lanes > MAX_LANES:
                raise ConfigError(f"schedules[{name!r}] has {schedule.lanes} lanes; there are at most {MAX_LANES}.")
        for key, settings in self.modes.items():
            check_known("mode", key, MODE_KEYS)
            check_type(f"modes[{shown(key)}]", settings, ModeSettings)

    def resolved_schedule(self) -> Schedule:
        """The schedule, with its lanes, of modes that do not set one; a one-lane schedule keeps its lane."""
        return self._with_lanes(self.schedule, None)

    def for_mode(self, mode: ForwardMode) -> Resolved:
        """The settings in force in the steps of a mode. Mixed batches count as prefills; an idle rank gets decode's."""
        return self._by_mode[mode]

    def switched_off(self, schedule: Schedule | None) -> tuple[DeclineReason, str] | None:
        """Reason and message if no step can overlap, whatever its size; else None.

        Args:
            schedule: the mode's schedule; None for an idle rank, which does not know the mode.
        """
        if not self.enable_dbo:
            return DeclineReason.DISABLED, "enable_dbo is off."
        if schedule is not None and not schedule.overlaps:
            return DeclineReason.SERIAL_SCHEDULE, f"schedule {schedule.name!r} has one lane, and no chunks."
        return None

    def below_threshold(self, mode: ForwardMode, num_tokens: int) -> tuple[DeclineReason, str] | None:
        """Reason and message if a step of this mode is too small to overlap; None if it is large enough."""
        threshold = self.for_mode(mode).token_threshold
        if num_tokens >= threshold:
            return None
        prefill = mode_key(mode) == "prefill"
        reason = DeclineReason.BELOW_PREFILL_THRESHOLD if prefill else DeclineReason.BELOW_DECODE_THRESHOLD
        return reason, f"{num_tokens} tokens are below the {mode} threshold of {threshold}."

    def agreed_schedule(self, decision: Decision, mode: ForwardMode) -> Schedule:
        """This rank's schedule in a step that the ranks agreed to overlap. A rank without tokens takes the others'
        mode.

        Args:
            decision: the decision, engaged.
            mode: this rank's own mode.

        Raises:
            ConfigError: the others run a schedule that this rank does not have.
        """
        key = decision.schedule, decision.num_lanes, decision.common_mode, mode
        if key not in self._agreed:
            self._agreed[key] = self._find_agreed(*key)
        return self._agreed[key]

    @cached_property
    def _agreed(self) -> dict[tuple[int, int, int | None, ForwardMode], Schedule]:
        return {}

    def _find_agreed(self, agreed: int, lanes: int, common_mode: int | None, own_mode: ForwardMode) -> Schedule:
        mode = next((each for each in ForwardMode if fingerprint(each) == common_mode), own_mode)
        known = [self.for_mode(mode).schedule, *self.schedules.values(), *SCHEDULES.values()]
        for schedule in map(self._with_comm_sms, known):
            if schedule.lanes > 1:
                schedule = schedule.with_lanes(lanes)
            if agreed in (0, schedule.fingerprint) and schedule.lanes == lanes:
                return schedule
        raise ConfigError(
            f"the other ranks overlap {mode} steps with a schedule of {lanes} lanes that this rank does not have; its "
            f"own is {known[0].describe()!r}. Give all ranks the same schedules."
        )

    @cached_property
    def _by_mode(self) -> Mapping[ForwardMode, Resolved]:
        by_key = {key: self._resolve(key) for key in MODE_KEYS}
        return {mode: by_key[mode_key(mode)] for mode in ForwardMode}

    def _resolve(self, key: str) -> Resolved:
        own = self.modes.get(key, ModeSettings())
        where = f"{key}: " if key in self.modes else ""
        try:
            schedule = self._with_lanes(self.schedule if own.schedule is None else own.schedule, own.num_ubatches)
        except ConfigError as error:
            raise ConfigError(f"{where}{error}") from error
        name = f"dbo_{'prefill' if key == 'prefill' else 'decode'}_token_threshold"
        threshold: int = getattr(self, name)
        if own.token_threshold is not None:
            name, threshold = "token_threshold", own.token_threshold
        if threshold < schedule.lanes:
            raise ConfigError(
                f"{where}{name} is {threshold}, below the {schedule.lanes} lanes of schedule {schedule.name!r}: a lane "
                f"would be empty. Set it to at least {schedule.lanes}."
            )
        return Resolved(schedule, threshold)

    def _with_lanes(self, asked: Schedule | str, lanes: int | None) -> Schedule:
        """A schedule, given itself or by name. Its lanes are `lanes`, else those of a user's own schedule, else
        num_ubatches."""
        schedule = asked if isinstance(asked, Schedule) else self._named(asked)
        check_runnable(schedule)
        schedule = self._with_comm_sms(schedule)
        if schedule.lanes == 1:
            if lanes is not None:
                raise ConfigError(f"num_ubatches is {lanes}, but schedule {schedule.name!r} has one lane. Remove it.")
            return schedule
        if lanes is None:
            lanes = schedule.lanes if schedule.name in self.schedules else self.num_ubatches
        return schedule.with_lanes(lanes)

    def _with_comm_sms(self, schedule: Schedule) -> Schedule:
        return schedule if self.comm_sms is None else replace(schedule, comm_sms=self.comm_sms)

    def _named(self, name: str) -> Schedule:
        known = {**SCHEDULES, **self.schedules}
        check_known("schedule", name, known)
        return known[name]

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> UBatchConfig:
        """Make a config from keys in snake or kebab case.

        Raises:
            ConfigError: an unknown key (with the nearest known one), or a wrong type or value.
        """
        kinds = {**_kinds(), **dict.fromkeys(MODE_KEYS, (Mapping,))}
        arguments = named_values(values, kinds.keys() - {"modes"})
        for key, (name, value) in zip(values, arguments.items(), strict=True):
            # `verify` is the proof's setting, unless it holds those of verify steps; YAML reads `off` as False.
            if name == "verify" and not isinstance(value, Mapping):
                arguments[name] = "off" if value is False else value
            else:
                check_type(str(key), value, *kinds[name])
        given = [key for key in MODE_KEYS if isinstance(arguments.get(key), Mapping)]
        modes = {key: ModeSettings.from_mapping(key, arguments.pop(key)) for key in given}
        schedules = arguments.pop("schedules", {})
        for name, each in schedules.items():
            check_type(f"schedules[{shown(name)}]", each, Mapping)
        own = {name: Schedule.from_mapping(str(name), each) for name, each in schedules.items()}
        return cls(**arguments, schedules=own, modes=modes)

    @classmethod
    def from_yaml(cls, path: str | Path) -> UBatchConfig:
        """Read a config from a YAML file with one mapping. Needs the `pyyaml` package.

        Raises:
            ConfigError: the file is missing, is not YAML or not a mapping, or has a bad key or value.
        """
        values = read_yaml(Path(path))
        try:
            return cls.from_mapping(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def describe(self) -> dict[str, object]:
        """The settings as plain values, for logs. `from_mapping` reads them, except a `Schedule` that is not in
        `schedules`."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("group", "schedules", "modes")}
        values["schedules"] = {name: schedule.to_mapping() for name, schedule in self.schedules.items()}
        return values | {key: settings.to_mapping() for key, settings in self.modes.items()}


@cache
def _kinds() -> Mapping[str, tuple[type, ...]]:
    """Setting -> the classes that its value may have: as annotated, or a list, as YAML has it. The group has a check of
    its own."""
    hints = {name: hint for name, hint in get_type_hints(UBatchConfig).items() if name != "group"}
    choices = {name: get_args(hint) if isinstance(hint, UnionType) else (hint,) for name, hint in hints.items()}
    kinds = {name: tuple(get_origin(each) or each for each in choice) for name, choice in choices.items()}
    return {**kinds, "schedule": (str, Schedule), "cudagraph_capture_sizes": (list, tuple)}
