"""`ubatch bench results`: when the stored figures were measured, and which are older than what they measure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from serving.arguments.fields import Flag, Group
from serving.workbench.bench.provenance import provenance_of, read_provenance
from serving.workbench.bench.statistics import columns
from ubatch import ConfigError


class Options(Group):
    """Where they are."""

    folder: Annotated[Path, Flag(positional=True), Field(description="folder of results")] = Path("benchmarks/results")


def run(options: Options) -> int:
    """Print a line for every file, and how to measure what is old again.

    Raises:
        ConfigError: there is no such file.
    """
    files = sorted(options.folder.glob("*.json"))
    if not files:
        raise ConfigError(
            f"no results are in {options.folder}. `make bench` and `make bench-link` write them to benchmarks/results."
        )
    print(columns(((file.name, provenance_of(file)) for file in files), indent=0))
    for file in files:
        try:
            found = read_provenance(file)
        except ConfigError:
            continue
        if found.stale:
            print(f"again: {found.command}{f' --json {file}' if found.command.startswith('ubatch') else ''}")
    return 0
