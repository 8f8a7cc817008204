"""Derive when and how steps overlap from the settings.

    --enable-dbo                                     lanes, under the schedule of the step's mode
    --enable-single-batch-overlap                    one lane, experts in two chunks: `single_batch`
    both                                             lanes whose experts are in two chunks
    the second, and --schedule single_batch_signalled    one lane that sends what blocks of experts have completed

`--no-enable-dbo` turns off the first flag only: the second stays on if a file sets it. SGLang has the same two flags,
but allows only one of them. A schedule of the file's `schedules` is used as written, chunks included.
"""

from collections.abc import Mapping
from dataclasses import replace

from serving.options.sources import Settings, Source
from ubatch import SCHEDULES, ConfigError, ModeSettings, Schedule, UBatchConfig, nearest
from ubatch.errors import shown
from ubatch.schedules import MODE_KEYS

_CHUNKS = 2
_SAME_NAME = (
    *("dbo_decode_token_threshold", "dbo_prefill_token_threshold", "comm_sms", "profile_ranges", "split_by"),
    *("tbo_token_distribution_threshold", "timeout_s"),
)


def derive_overlap(s: Settings) -> Settings:
    """Derive settings from the two overlap flags, before any check.

    If a stronger source says `--no-enable-dbo`, overlap settings of weaker sources have no effect.
    """
    if s["dbo_auto"]:
        s = s.without_effect("dbo_auto", "it is gone in the next release, as --enable-dbo decides so without it")
    if s["enable_single_batch_overlap"] and not s["enable_dbo"] and not s.given("schedule"):
        return s.derive("schedule", "single_batch", s.spell("enable_single_batch_overlap"))
    off = s.all["enable_dbo"]
    if not off.given or off.value or s["enable_single_batch_overlap"]:
        return s
    for name in ("ubatch_size", "dbo_decode_token_threshold", "dbo_prefill_token_threshold"):
        if s.given(name) and s[name] and s.all[name].source.weaker_than(off.source):
            s = s.without_effect(name, f"no step overlaps ({off.spelled})")
    return s


def overlap_config(s: Settings) -> UBatchConfig:
    """The runtime's settings."""
    schedules = UBatchConfig.from_mapping({"schedules": s["schedules"] or {}}).schedules
    modes = {key: mode for key in MODE_KEYS if (mode := _mode(s, key, schedules)) is not None}
    return UBatchConfig(
        enable_dbo=s["enable_dbo"] or s["enable_single_batch_overlap"],
        num_ubatches=s["ubatch_size"],
        schedule=_in_force(s, "schedule", s["schedule"], schedules),
        schedules=schedules,
        modes=modes,
        **{name: s[name] for name in _SAME_NAME},
    )


def measured_kinds(s: Settings) -> tuple[str, ...]:
    """Kinds of steps without a threshold but the default: they overlap only where running steps show that it pays."""
    if not (s["enable_dbo"] or s["enable_single_batch_overlap"]):
        return ()
    flags = {kind: f"dbo_{'prefill' if kind == 'prefill' else 'decode'}_token_threshold" for kind in MODE_KEYS}
    own = {kind: ModeSettings.from_mapping(s.spell(kind), s[kind] or {}).token_threshold for kind in MODE_KEYS}
    return tuple(kind for kind in MODE_KEYS if own[kind] is None and s.all[flags[kind]].source is Source.DEFAULT)


def _mode(s: Settings, key: str, schedules: Mapping[str, Schedule]) -> ModeSettings | None:
    """A mode's own settings, from its flag and from the file; None if it has none."""
    flag = f"schedule_{key}"
    if s[key] is None and s[flag] is None:
        return None
    own = ModeSettings.from_mapping(s.spell(key), s[key] or {})
    if s[flag] is not None:
        if own.schedule not in (None, s[flag]) and s.all[flag].source is Source.FILE:
            both = f"{s.spell(flag)} ({shown(s[flag])}) and {s.spell(key)} ({shown(own.schedule)})"
            raise ConfigError(f"{both} are one setting with two values. Remove one.")
        own = replace(own, schedule=s[flag])
    if own.schedule is None:
        return own
    spelled = flag if s[flag] is not None else key
    return replace(own, schedule=_in_force(s, spelled, own.schedule, schedules))


def _in_force(s: Settings, setting: str, asked: Schedule | str, schedules: Mapping[str, Schedule]) -> Schedule | str:
    """The schedule that a name means, given which of the two overlap flags are on; `setting` named it."""
    known = {**SCHEDULES, **schedules}
    if not isinstance(asked, str) or asked not in known:
        raise ConfigError(f"{s.spell(setting)}: unknown schedule {shown(asked)}{nearest(str(asked), known)}")
    schedule = known[asked]
    if not s["enable_single_batch_overlap"]:
        return asked
    if not s["enable_dbo"] and schedule.lanes > 1:
        raise ConfigError(
            f"{s.spell(setting)}: schedule {shown(asked)} has {schedule.lanes} lanes, but only "
            f"{s.spell('enable_single_batch_overlap')} is given, which runs one. Add --enable-dbo to have both."
        )
    if asked in schedules or schedule.chunks > 1 or schedule.signalled:
        return asked
    if schedule.lanes == 1:
        return "single_batch"
    return replace(schedule, name=f"{asked}_{_CHUNKS}_chunks", chunks=_CHUNKS)
