"""What a results file was measured from: the commit, the command, and a digest of the sources that it measures.

A file is older than what it measures if these sources have changed since. Whatever prints a stored file says so, and
`ubatch bench results` says it of all of them.
"""

import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

import serving
from serving.arguments.fields import Flag, Group
from serving.workbench.bench.statistics import columns
from ubatch import ConfigError

KEY = "measured"
"""Key of the stamp in a results file."""
_ROOT = Path(serving.__file__).resolve().parent.parent
_SOURCES = (".py", ".c", ".h")


@dataclass(frozen=True)
class Provenance:
    """The stamp of a results file.

    Attributes:
        commit: the short hash, with a `+` if the measured sources had uncommitted changes; None outside git.
        command: that wrote it, without its `--json`.
        sources: files and folders of the tree that it measures.
        digest: of their contents.
    """

    commit: str | None
    command: str
    sources: tuple[str, ...]
    digest: str

    @property
    def stale(self) -> bool:
        """Whether the measured sources have changed since."""
        return digest_of(_contents(self.sources)) != self.digest

    def __str__(self) -> str:
        """`measured at 1a2b3c4, 12 commits ago: older than what it measures`."""
        when = f"measured at {self.commit or 'an unknown commit'}"
        behind = None if self.commit is None else _git("rev-list", "--count", f"{self.commit.rstrip('+')}..HEAD")
        if behind is not None:
            when += f", {behind} commit{'s' * (behind != '1')} ago"
        return f"{when}: older than what it measures" if self.stale else when


def stamp(sources: Sequence[str]) -> dict[str, Any]:
    """The stamp of a file that is measured now."""
    commit = _git("rev-parse", "--short=7", "HEAD")
    if commit is not None and _git("status", "--porcelain", "--", *sources):
        commit += "+"
    return asdict(Provenance(commit, _command(sys.argv), tuple(sources), digest_of(_contents(sources))))


def read_provenance(file: Path) -> Provenance:
    """The stamp of a results file.

    Raises:
        ConfigError: the file cannot be read, or has no stamp.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))[KEY]
        return Provenance(found["commit"], found["command"], tuple(found["sources"]), found["digest"])
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} does not say at which commit it was measured. Measure it again.") from error


def provenance_of(file: Path) -> str:
    """When a file was measured, in words; also of a file without a stamp, or whose stamp is no stamp."""
    try:
        return str(read_provenance(file))
    except ConfigError:
        return "it does not say at which commit it was measured"


def digest_of(contents: Iterable[tuple[str, bytes]]) -> str:
    """A digest of files by name and content, in any order."""
    digest = hashlib.sha256()
    for name, content in sorted(contents):
        digest.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def _contents(sources: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    for source in sources:
        path = _ROOT / source
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.suffix in _SOURCES:
                yield file.relative_to(_ROOT).as_posix(), file.read_bytes()


def _command(argv: Sequence[str]) -> str:
    """The command line without the file that it writes; of a call from Python only the program."""
    program, *words = argv
    if Path(program).name not in ("ubatch", "cli.py"):
        return f"Python ({Path(program).name})"
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return shlex.join(["ubatch", *(word for word in words if not word.startswith("--json="))])


def _git(*words: str) -> str | None:
    """What git prints, for the tree of this package; None if that is no checkout, or git fails."""
    if not (_ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(_ROOT), *words], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# -- `ubatch bench results` --------------------------------------------------------------------------------------------


class Options(Group):
    """Where they are."""

    folder: Annotated[Path, Flag(positional=True)] = Field(Path("benchmarks/results"), description="folder of results")


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
