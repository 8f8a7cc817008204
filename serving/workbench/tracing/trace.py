"""`ubatch trace`: record steps of a running server or of a run here (`offline`), and explain them in words.

record   one trace per rank: from a server's files, from files recorded earlier, or from ranks started here
         (a file of the experts' load is shown as it is)
merge    the traces onto one clock, with the same step numbers
write    trace.json (Perfetto), trace.html (a page that needs no other files), summary.json (for scripts)
print    a table, and the findings of the diagnosis
"""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from serving.generate import print_notes
from serving.options import TRACE, Layer, Settings, chosen_dtype, describe_settings, merge, read_layers
from serving.options.sources import Source, settle_environment, spelled_flag
from serving.workbench.bench.statistics import columns
from serving.workbench.tracing.diagnosis import diagnose
from serving.workbench.tracing.experts import RecordedLoads, as_document, draw_balance, loads_of_file, loads_of_traces
from serving.workbench.tracing.inside import Finding
from serving.workbench.tracing.offline import OfflineRun, choose_run, pick_link, record, record_serial
from serving.workbench.tracing.steps import Group, StepRecord, between_steps, group_steps, read_steps
from ubatch import ConfigError, Remark, UBatchError, write_chrome, write_html
from ubatch.trace import RankTrace, merge_traces, read_chrome

_ANSWER_S = 150.0
"""Seconds to wait for the server's answer: the ranks write their files before it answers."""


class ServerRefused(UBatchError):
    """The server cannot be reached, or refuses to record."""


_OF_SOURCE = {
    "--url": {"url", "seconds", "api_key", "out", "serial"},
    "--files": {"files", "out", "serial"},
    "--expert-loads": {"expert_loads", "ranks", "expert_placement", "out"},
}
_OF_OTHERS = {"seconds", "api_key", "ranks", "expert_placement"}
"""What a run here does not have."""
_SOURCES = ("url", "files", "expert_loads", "prompt")


@dataclass(frozen=True)
class TraceCommand:
    """What to trace: a server (`url`), files, or a checkpoint and prompts to run here (`run`), by the settings in
    force; `notes` are settings that are allowed but may be mistakes, one sentence each."""

    settings: Settings
    run: OfflineRun | None
    print_config: bool
    notes: tuple[str, ...]


def read(program: str, description: str, words: Sequence[str]) -> TraceCommand:
    """Read the command line, the settings file that it names, and the environment.

    Raises:
        ConfigError: anything that cannot work, in one line.
        SystemExit: after `--help`.
    """
    layers, print_config = read_layers(TRACE, program, description, words)
    layers, idle = _chosen_sources(layers)
    settings = merge(*layers, table=TRACE)
    source, run = _check(settings, layers[-1]), None
    if source == "--url":  # no run starts here, so a transport from the environment has no effect
        if settings.all["all2all_backend"].source is Source.ENVIRONMENT:
            settings = settings.derive("all2all_backend", None)
        settings = settle_environment(settings)
    told = settings.notes
    if source == "--prompt":
        run = choose_run(layers, print_config=print_config)
        if run.command.engine.nnodes > 1:
            raise ConfigError(
                f"{run.command.settings.spell('nnodes')}: every machine writes what its ranks recorded to its own disk."
                " Trace `ubatch serve` there, and show the files with --files."
            )
        settings, told = run.command.settings, run.command.notes
    return TraceCommand(settings, run, print_config, (*idle, *told))


def run(command: TraceCommand) -> int:
    """Record, write and print; returns 1 if no step was recorded.

    Raises:
        ConfigError: flags that contradict each other; a file that is no trace.
        ServerRefused: the server cannot be reached, or refuses to record.
        Others: see `ubatch generate`.
    """
    if command.print_config:
        print(describe_settings(command.settings))
        return 0
    chosen = () if command.run is None else chosen_dtype(command.settings)
    print_notes("ubatch trace", (*chosen, *command.notes))
    if command.settings["expert_loads"] is not None:
        return _show_loads(command.settings)
    recorded, serial = _record(command)
    ranks = merge_traces(recorded)
    steps = read_steps(ranks)
    measures = all(rank.measures for rank in ranks)
    between = [between_steps(rank) for rank in ranks]
    findings = diagnose(steps, serial=serial, measures=measures, between=between)
    if not steps:
        print(_line(findings[0]))
        return 1
    loads = loads_of_traces(ranks)
    for path in _write(command, ranks, recorded, steps, findings, loads):
        print(f"wrote {path}")
    print(columns(_table(steps), indent=0))
    if loads is not None:
        print(f"experts: {loads.sentence}.")
    for finding in findings:
        print(_line(finding))
    return 0


def _chosen_sources(layers: Sequence[Layer]) -> tuple[list[Layer], list[str]]:
    """If the command line says what to trace, drop that setting from the file; returns the layers, and notes on it."""
    words = layers[-1]
    chosen = [words[name].spelled for name in _SOURCES if name in words and words[name].value]
    if not chosen:
        return list(layers), []
    idle = {name: each for layer in layers[:-1] for name, each in layer.items() if name in _SOURCES and each.value}
    idle = {name: each for name, each in idle.items() if name not in words}
    notes = [f"{each.spelled} has no effect: {chosen[0]} is given on the command line" for each in idle.values()]
    return [{name: each for name, each in layer.items() if name not in idle} for layer in layers], notes


def _check(s: Settings, words: Layer) -> str:
    """Find the flag that says what to trace, and refuse other flags without effect (not a file's: it may be shared)."""
    sources = {spelled_flag(name): bool(s[name]) for name in _SOURCES}
    chosen = [name for name, there in sources.items() if there]
    if not chosen:
        raise ConfigError("give --url of a running server, --files, --expert-loads, or a checkpoint and --prompt.")
    source = chosen[0]
    allowed = _OF_SOURCE.get(source)
    wrong = [name for name in words if (name in _OF_OTHERS if allowed is None else name not in allowed)]
    if wrong:
        raise ConfigError(f"{words[wrong[0]].spelled} has no effect with {source}. Remove it.")
    if source == "--expert-loads" and s["ranks"] is None and s["expert_placement"] is None:
        raise ConfigError("--expert-loads needs --ranks, or --expert-placement: which rank has which experts.")
    return source


# --------------------------------------------------------------------------------------------------------- recording


class Recorded(NamedTuple):
    """A recording, and the serial steps to compare it with."""

    ranks: list[RankTrace]
    serial: list[StepRecord]


def _record(command: TraceCommand) -> Recorded:
    s = command.settings
    serial = _serial_steps(s["serial"])
    if command.run is not None:
        return _offline(command.run, serial)
    return Recorded(_from_files(s["files"]) if s["url"] is None else _from_server(s), serial)


def _serial_steps(files: Sequence[Path]) -> list[StepRecord]:
    steps = [step for step in read_steps(merge_traces(_from_files(files))) if not step.overlapped] if files else []
    if files and not steps:
        raise ConfigError(f"--serial {files[0]}: it has no step without overlap. Record it without --enable-dbo.")
    return steps


def _offline(run: OfflineRun, serial: list[StepRecord]) -> Recorded:
    """Say what was chosen, and run the arms."""
    for choice in run.choices:
        print(f"chose {choice}")
    if run.link:
        run, choice = pick_link(run)
        print(f"chose {choice}")
    if run.overlaps and not serial:
        print("chose to run once without overlap first, to compare with")
        serial = record_serial(run)
    return Recorded(record(run), serial)


def _from_server(s: Settings) -> list[RankTrace]:
    """Record a server's ranks for some seconds. The server's files stay where it wrote them."""
    base = s["url"].rstrip("/").removesuffix("/v1")
    headers = {} if s["api_key"] is None else {b"Authorization": f"Bearer {s['api_key']}".encode()}
    # No proxies: the files are read here, so the server is near.
    with httpx.Client(base_url=base, headers=headers, timeout=_ANSWER_S, trust_env=False) as client:
        _ask(client, "/start_profile")
        print(f"recording {s['seconds']:g} s of {base}", file=sys.stderr)
        try:
            time.sleep(s["seconds"])
        finally:  # on Ctrl-C, too: otherwise the server would keep recording
            files = [Path(name) for name in _ask(client, "/stop_profile")["files"]]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise ConfigError(
            f"the ranks wrote {', '.join(map(str, files))} on their own machines, and {missing[0]} is not here. "
            f"Copy the files and call `ubatch trace --files`."
        )
    return _from_files(files)


def _ask(client: httpx.Client, path: str) -> Any:
    try:
        response = client.post(path)
        response.raise_for_status()
        return response.json()
    except httpx.HTTPStatusError as error:
        raise ServerRefused(
            f"{client.base_url} answers {error.response.status_code} to {path}: {error.response.text[:500]}"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ServerRefused(f"{client.base_url}{path} gives no answer that can be used: {error!r}.") from error


def _from_files(files: Sequence[Path]) -> list[RankTrace]:
    return [trace for file in files for trace in read_chrome(file)]


# ----------------------------------------------------------------------------------------------- writing and printing


def _write(
    command: TraceCommand,
    ranks: Sequence[RankTrace],
    recorded: Iterable[RankTrace],
    steps: Sequence[StepRecord],
    findings: Sequence[Finding],
    loads: RecordedLoads | None,
) -> list[Path]:
    spans = {rank.rank: rank.spans for rank in ranks}
    notes = {rank.rank: rank.notes for rank in ranks}
    measures = all(rank.measures for rank in ranks)
    s, out = command.settings, command.settings["out"]
    source = s["url"] or ", ".join(map(str, s["files"])) or str(s["model"])
    facts = {"source": source, "ranks": str(len(ranks))}
    if len({rank.clock.host for rank in recorded}) > 1:
        facts["clock"] = "time of day: the ranks ran on several machines"
    paths = [out / name for name in ("trace.json", "trace.html", "summary.json")]
    try:
        out.mkdir(parents=True, exist_ok=True)
        extra = {rank.rank: rank.extra for rank in ranks}
        write_chrome(paths[0], spans, notes=notes, measures=measures, clock=ranks[0].clock, extra=extra)
        write_html(
            paths[1],
            spans,
            title="ubatch trace",
            summary=facts,
            notes=notes,
            remarks=[Remark(str(finding.kind), finding.text) for finding in findings],
            table=_table(steps),
            sections=[] if loads is None else [loads.section()],
        )
        summary: dict[str, object] = {
            **facts,
            "groups": [asdict(group) for group in group_steps(steps)],
            "findings": [asdict(finding) for finding in findings],
            **({} if loads is None else {"balancedness": loads.figures}),
        }
        paths[2].write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise _cannot_write(out, error) from error
    return paths


def _show_loads(s: Settings) -> int:
    """Write the page of a file of loads."""
    loads = loads_of_file(s["expert_loads"], s["ranks"], s["expert_placement"])
    path, picture = (s["out"] / name for name in ("experts.html", "experts.svg"))
    facts = {"source": str(s["expert_loads"]), "steps": str(len(loads.steps)), "tokens": f"{loads.steps.sum():,.0f}"}
    if s["expert_placement"] is not None:
        facts["placement"] = str(s["expert_placement"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_html(path, {}, title="expert load", summary=facts, sections=[loads.section()])
        picture.write_text(as_document(draw_balance(loads.whole, loads.placement)), encoding="utf-8")
    except OSError as error:
        raise _cannot_write(s["out"], error) from error
    print(f"wrote {path}\nwrote {picture}\nexperts: {loads.sentence}.")
    return 0


def _cannot_write(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write to {folder}: {error.strerror}. Choose another folder with --out.")


def _table(steps: Sequence[StepRecord]) -> list[list[str]]:
    """Table of all steps by group; the first row is the heading."""
    groups = group_steps(steps)
    if len(groups) > 1:
        groups += group_steps(steps, key=lambda _: ("", "all"))
    head = ["all steps", "steps", "tokens", "median ms", "hidden", "exposed", "hand-off", "idle"]
    return [head, *map(_row, groups)]


def _row(group: Group) -> list[str]:
    total, (few, many) = group.total, group.tokens
    shares = (total.exposed_s, total.handoff_s, total.idle_s)
    return [
        f"{group.mode} {group.outcome}".strip(),
        str(group.steps),
        str(few) if few == many else f"{few}-{many}",
        f"{group.step_s * 1e3:.2f}",
        f"{total.hidden_fraction:.0%}" if total.communication_s else "none sent",
        *(f"{share / total.wall_s:.1%}" if total.wall_s else "-" for share in shares),
    ]


def _line(finding: Finding) -> str:
    return f"{finding.kind}: {finding.text}"
