"""Options that all benchmarks share: how often to measure, and where to write the results."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from serving.arguments.fields import Flag, Group
from serving.workbench.bench.provenance import KEY, stamp
from serving.workbench.bench.statistics import environment, write_json


def _is_checkpoint(folder: Path) -> Path:
    if not os.path.isfile(folder / "config.json"):  # `Path.is_file` raises if the name is too long
        raise ValueError("no config.json is there; give the folder of a Hugging Face checkpoint")
    return folder


Checkpoint = Annotated[Path, AfterValidator(_is_checkpoint)]
"""The folder of a Hugging Face checkpoint."""


ModelFolder = Annotated[Checkpoint, Flag(positional=True), Field(description="folder of a Hugging Face checkpoint")]
Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
Ranks = Annotated[int, Field(ge=2, description="data- and expert-parallel ranks")]
LatencyUs = Annotated[float, Field(ge=0, description="the link's latency")]
Dtype = Literal["float32", "bfloat16"]
Dtypes = Annotated[tuple[Dtype, ...], Field(min_length=1, description="of the model")]
ServeFlags = Annotated[
    str,
    Flag(metavar='"FLAG ..."'),
    Field(description="more flags of the server, as in --serve-flags='--ubatch-size 3'"),
]
_RUNNER = Path(__file__).parents[3] / "model_runner"
_PARTS = sorted(each.name for each in (*_RUNNER.glob("*.py"), *_RUNNER.glob("[!_]*/")) if each.name != "auto")
ENGINE = ("ubatch", "moe", "attention", *(f"model_runner/{part}" for part in _PARTS), "model_runner/auto/step_cost.py")
"""What runs a step."""
DECIDING = (*ENGINE, "model_runner/auto")
"""The same with what decides how it runs, where no threshold is given."""
_SERVING = ("api", "engine", "scheduler", "text", "llm.py", "offline")
SERVER = (*DECIDING, *(f"serving/{part}" for part in _SERVING))


# Where code, too, makes the options, `default=` names a default: only so do type checkers know that there is one.
class FileOptions(Group):
    """Options of a command that can write what it found to a file."""

    json_file: Annotated[Path | None, Flag(name="json", metavar="FILE")] = Field(
        default=None, description="write raw arms and results here"
    )


class ReportOptions(FileOptions):
    """Options of a benchmark that can write its figures to a file.

    Attributes:
        unwritten: options that the file leaves out.
        measures: files and folders whose speed its figures are, in addition to the benchmark's own module.
    """

    unwritten: ClassVar[frozenset[str]] = frozenset()
    measures: ClassVar[tuple[str, ...]] = ENGINE

    def write(self, figures: Mapping[str, Any], machine: Mapping[str, Any] | None = None) -> None:
        """Write `figures`, the machine and these options if a file was asked for, and print its name.

        Args:
            machine: `environment()` as another thread saw it: one that is pinned sees fewer cores.
        """
        if self.json_file is None:
            return
        options = self.model_dump(mode="json", exclude={"json_file", *self.unwritten})
        own = type(self).__module__.replace(".", "/")
        measured = stamp((*self.measures, f"{own}.py"))
        write_json(
            self.json_file, {"environment": machine or environment(), KEY: measured, "options": options, **figures}
        )
        print(f"wrote {self.json_file}")


class BlockOptions(ReportOptions):
    """Options of a benchmark whose arms are interleaved."""

    blocks: int = Field(default=15, ge=2, description="A B B A blocks; 15 or more for figures to quote")
