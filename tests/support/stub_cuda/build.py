"""`python tests/support/stub_cuda/build.py`: compile the stub for this Python's torch, and say how to load it.

The headers are those that the packages of torch and Triton bring. What it builds lies in `.cache/stub-cuda`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

CODE = Path(__file__).resolve().parent / "cuda"
ROOT = CODE.parents[3]
BUILT = ROOT / ".cache" / "stub-cuda"
LIBRARY = BUILT / "libstub_cuda.so"
TORCH, TRITON = "2.11.", "3.6."
COUNTS, FIGURES = "STUB_CUDA_COUNTS", "STUB_CUDA_FIGURES"
"""Environment variables: the files for what the stub counted, and for launches per layer."""


class WrongPython(RuntimeError):
    """This Python lacks what the stub stands below."""


def build() -> Path:
    """Compile what has changed, link it, and return the library.

    Raises:
        WrongPython: it has no CUDA build of torch, or another version.
    """
    includes = [f"-I{folder}" for folder in headers()]
    objects = BUILT / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    (BUILT / "lib").mkdir(exist_ok=True)
    shared = (CODE / "state.h").stat().st_mtime
    made = []
    for source in sorted(CODE.glob("*.cpp")):
        made.append(objects / f"{source.stem}.o")
        if not made[-1].exists() or made[-1].stat().st_mtime < max(shared, source.stat().st_mtime):
            options = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]
            subprocess.run(["g++", *options, *includes, "-c", str(source), "-o", str(made[-1])], check=True)
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < max(each.stat().st_mtime for each in made):
        subprocess.run(["g++", "-shared", *map(str, made), "-ldl", "-lpthread", "-o", str(LIBRARY)], check=True)
    driver = BUILT / "lib" / "libcuda.so.1"  # by this name Triton looks for the driver
    driver.unlink(missing_ok=True)
    driver.symlink_to(LIBRARY)
    return LIBRARY


def environment() -> dict[str, str]:
    """The environment of a process that runs over the stub."""
    return {
        **os.environ,
        "LD_PRELOAD": str(LIBRARY),
        "LD_LIBRARY_PATH": str(BUILT / "lib"),
        "TRITON_LIBCUDA_PATH": str(BUILT / "lib"),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(BUILT / "triton"),
        "UBATCH_AUTOTUNE_CACHE": str(BUILT / "autotune.json"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
    }


def headers() -> list[Path]:
    """Folders of the headers that this Python's packages bring.

    Raises:
        WrongPython: see `build`.
    """
    for name, wanted in (("torch", TORCH), ("triton", TRITON)):
        found = _version(name)
        if not found.startswith(wanted) or "+cpu" in found:
            raise WrongPython(
                f"{sys.executable} has {name} {found or 'not at all'}, and the stub stands below the CUDA build of "
                f"{wanted}x. `make stub` makes an environment that has it; STUB_PYTHON names another one."
            )
    nvidia, triton = _folder("nvidia"), _folder("triton")
    return [nvidia / "cu13" / "include", nvidia / "nccl" / "include", triton / "backends" / "nvidia" / "include"]


def _folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise WrongPython(f"{sys.executable} lacks the package {package}, which torch's CUDA build brings.")
    return Path(next(iter(spec.submodule_search_locations)))


def _version(name: str) -> str:
    """A package's version, without importing it; empty if it is not there."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return ""
    own = Path(spec.origin).parent / "version.py"
    if own.exists():  # torch says there whether it is a CPU build
        values: dict[str, str] = {}
        exec(own.read_text(encoding="utf-8"), values)
        return str(values["__version__"])
    return version(name)


if __name__ == "__main__":
    try:
        print(f"LD_PRELOAD={build()}")
    except (WrongPython, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
