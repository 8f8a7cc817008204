"""Files of expert loads: tokens that were routed to each expert, `[steps, layers, experts]`.

    .npy     the array, as `numpy.save` writes it
    .json    the array as nested lists; or, as others write it, an object that has it as `logical_count`

A step is any stretch of time. A file of `[layers, experts]` has one.
"""

import io
import json
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from ubatch import ConfigError
from ubatch.errors import cut, shown
from ubatch.process import write_whole

LOAD_SUFFIXES = (".npy", ".json")
"""How the names of load files end."""

_UNREADABLE = (OverflowError, RecursionError, SyntaxError, TokenError, ValueError)
"""What readers raise for other files: numpy parses a header as Python."""
_COUNT = "logical_count"
"""SGLang's name of the array in the JSON that its `--init-expert-location` reads."""


def read_loads(path: str | Path) -> npt.NDArray[np.float64]:
    """Read a file of loads.

    Returns:
        `[steps, layers, experts]`, finite and not negative.

    Raises:
        ConfigError: there is no such file, or it has something else.
    """
    path = Path(path)
    check_load_suffix(path)
    try:
        if path.suffix == ".npy":
            # Mapped, a header that promises more than the file has is an error, not an allocation. `np.load` would take
            # zip files and pickles, too.
            values: Any = np.lib.format.open_memmap(path, mode="r")
        else:
            values = json.loads(path.read_bytes())
            if isinstance(values, dict):
                if _COUNT not in values:
                    raise ConfigError(f"{path}: the object has no {_COUNT!r}, only {shown(sorted(values))}.")
                values = values[_COUNT]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}.") from error
    except ConfigError:
        raise
    except _UNREADABLE as error:
        why = cut(str(error).partition("\n")[0])
        raise ConfigError(f"{path} is not a {path.suffix} file of expert loads: {why}") from error
    return _checked(values, path)


def _checked(values: Any, path: Path) -> npt.NDArray[np.float64]:
    try:
        array = np.asarray(values)
    except ValueError:
        raise ConfigError(f"{path}: the lists of expert loads differ in length, or in depth.") from None
    if array.dtype.kind not in "iuf":
        raise ConfigError(f"{path}: expert loads are numbers, not {array.dtype}.")
    if array.ndim not in (2, 3) or not array.size:
        raise ConfigError(
            f"{path}: expert loads are [steps, layers, experts] or [layers, experts], not {list(array.shape)}."
        )
    loads = np.array(array[None] if array.ndim == 2 else array, dtype=np.float64)
    wrong = np.argwhere(~np.isfinite(loads) | (loads < 0))
    if len(wrong):
        step, layer, expert = wrong[0]
        value = loads[step, layer, expert]
        raise ConfigError(f"{path}: the load of expert {expert} in MoE layer {layer} of step {step} is {value:g}.")
    return loads


def write_loads(path: str | Path, loads: npt.NDArray[np.generic]) -> None:
    """Write loads whole: a reader gets the former file or the new one.

    Args:
        path: the file; replaced if it exists.
        loads: `[steps, layers, experts]`.

    Raises:
        ConfigError: its name ends with none of `LOAD_SUFFIXES`.
        OSError: it cannot be written.
    """
    path = Path(path)
    check_load_suffix(path)
    if path.suffix == ".json":
        # Step by step: `json` keeps other threads from running, and all steps of a large model take it a second.
        steps = (json.dumps(step.tolist(), separators=(",", ":")) for step in loads)
        write_whole(path, f"[{','.join(steps)}]")
    else:
        buffer = io.BytesIO()
        np.save(buffer, loads, allow_pickle=False)
        write_whole(path, buffer.getvalue())


def check_load_suffix(path: Path) -> None:
    """Check how a load file's name ends.

    Raises:
        ConfigError: it ends with none of `LOAD_SUFFIXES`.
    """
    if path.suffix not in LOAD_SUFFIXES:
        raise ConfigError(f"{path}: a file of expert loads ends with {' or '.join(LOAD_SUFFIXES)}.")
