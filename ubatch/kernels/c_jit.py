"""CPU kernels in C, compiled on the machine that runs them, as Triton does for a GPU.

For the packages above; nothing in `ubatch` imports it. torch's CPU kernels read a decode step's weights and keys
several times, or synchronise all threads after every small product; a loop in C reads them once. It needs a C compiler
on the machine (`$CC`, or `cc`): GCC or clang, with GNU extensions and the standard C headers:

    c_vectors.h + source                                vector types, and helpers that several kernels use
    these + flags + compiler + processor -> a key       ~/.cache/ubatch/c/<key>.so, or under $UBATCH_C_CACHE
      and <key>.sha256                                  a library without its matching checksum is not loaded
    missing: compile to a temporary file, sync, rename  so processes that start together do not disturb each other
    load                                                uses torch's OpenMP threads, not a second pool

Calls release the GIL. Kernels get `torch.get_num_threads()` as an argument, because OpenMP's default differs in a
thread that has not computed yet. If there is no compiler, `compile_c` raises `ConfigError`, and callers use torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ubatch.errors import ConfigError
from ubatch.kernels.recording import this_thread
from ubatch.ranks.long_calls import taking_long

CACHE_VARIABLE = "UBATCH_C_CACHE"
OFF_VARIABLE = "UBATCH_C_KERNELS"
"""Environment variable; `0` switches C off, so that torch is used, and Triton's own launcher."""
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_FLAGS_X86 = ("-mprefer-vector-width=512",)
_VECTORS = Path(__file__).with_name("c_vectors.h")
TILES_SOURCE = Path(__file__).with_name("c_tiles.h")
"""AMX's registers, for the kernels whose source begins with this file."""
_PATIENCE_S = 120.0
_PROBE = """
int omp_get_max_threads(void);
int ubatch_threads(void) { return omp_get_max_threads(); }
void ubatch_probe(float *x, long n) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(2)
    for (long i = 0; i < n; i++) store(x + i * LANES, exponential(load(x + i * LANES)));
}
"""

_loaded: dict[tuple[str, Path | None], ctypes.CDLL | ConfigError] = {}


def compile_c(source: str, include: Path | None = None, /, **defines: int) -> ctypes.CDLL:
    """A library from C source, compiled at most once per machine; its functions have no types yet.

    Args:
        source: C code, appended to `c_vectors.h`.
        include: another folder with headers.
        defines: constants, defined before both.

    Raises:
        ConfigError: there is no compiler, it fails, or its OpenMP is not torch's; the message has the reason. A second
            call with the same source fails at once.
    """
    constants = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    source = f"{constants}{_VECTORS.read_text(encoding='utf-8')}{source}"
    known = _loaded.get((source, include))
    if known is None:
        try:
            known = _load(source, include)
        except ConfigError as error:
            known = error
        _loaded[source, include] = known
    if isinstance(known, ConfigError):
        raise known
    return known


def kernel_of(library: ctypes.CDLL, name: str, *types: Any) -> Callable[..., None]:
    """A `void` function of the library with the given ctypes of its arguments; torch's profiler records its calls."""
    function = getattr(library, name)
    function.argtypes, function.restype = types, None

    def call(*args: Any) -> None:
        if torch.autograd._profiler_enabled():  # a range costs as much as a small kernel
            with torch.profiler.record_function(f"ubatch::{name}"):
                function(*args)
        else:
            function(*args)
        recording = this_thread.recording
        if recording is not None:
            recording.note(function, args)

    return call


def kernels_of(library: ctypes.CDLL, **types: Sequence[Any]) -> SimpleNamespace:
    """Several functions of the library, each an attribute; see `kernel_of`.

    Args:
        types: name of the function -> the ctypes of its arguments.
    """
    return SimpleNamespace(**{name: kernel_of(library, name, *own) for name, own in types.items()})


@cache
def why_not_c() -> str | None:
    """Why C kernels cannot run here; None if they can. The first call may compile a small probe."""
    try:
        library = compile_c(_PROBE)
    except ConfigError as error:
        return str(error)
    threads, found = torch.get_num_threads(), int(library.ubatch_threads())
    if found != threads:
        return f"the C compiler's OpenMP has {found} threads where torch has {threads}: it is another one than torch's."
    return None


def _load(source: str, include: Path | None) -> ctypes.CDLL:
    if os.environ.get(OFF_VARIABLE) == "0":
        raise ConfigError(f"kernels in C are switched off: {OFF_VARIABLE}=0.")
    if os.name != "posix":
        raise ConfigError(f"kernels in C are compiled and loaded on POSIX systems, not on {os.name!r}.")
    compiler = _compiler()
    flags = (*_FLAGS, *(_FLAGS_X86 if platform.machine() in ("x86_64", "AMD64") else ()))
    flags += () if include is None else (f"-I{include}",)
    key = hashlib.sha256("\0".join((source, *flags, *compiler, _version(compiler), _processor())).encode()).hexdigest()
    path = _folder() / f"{key[:32]}.so"
    if not _is_whole(path):
        with taking_long("compiling a kernel in C"):
            path = _compile_into_cache(source, compiler, flags, path)
    try:
        # Not linked with an OpenMP library: its functions are found in the one that torch has loaded.
        return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        with suppress(OSError):  # so that the next process compiles it again
            path.unlink()
            _checksum_file(path).unlink()
        raise ConfigError(f"the compiled kernel cannot be loaded together with torch: {error}") from error


def _compiler() -> tuple[str, ...]:
    """The compiler command; `$CC` may have arguments (`ccache gcc`)."""
    named = shlex.split(os.environ.get("CC", ""))
    names = named[:1] or ["cc", "gcc", "clang"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise ConfigError(f"no C compiler ({', '.join(names)}) is installed. Install one, such as gcc, or set CC.")
    return found, *named[1:]


def _compile_into_cache(source: str, compiler: tuple[str, ...], flags: tuple[str, ...], path: Path) -> Path:
    """Compile to `path`. If the folder is not writable and the user did not choose it, use a folder of this process."""
    try:
        try:
            _compile(source, compiler, flags, path)
        except OSError:
            if os.environ.get(CACHE_VARIABLE):
                raise
            path = Path(_own_folder().name) / path.name
            _compile(source, compiler, flags, path)
    except OSError as error:
        raise ConfigError(
            f"{path.parent} cannot be written to, and has no good kernel of this kind: {error}. Choose another folder: "
            f"{CACHE_VARIABLE}."
        ) from error
    return path


def _compile(source: str, compiler: tuple[str, ...], flags: tuple[str, ...], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        code, built, linked, checksum = (Path(folder) / f"kernel.{kind}" for kind in ("c", "o", "so", "sha256"))
        code.write_text(source, encoding="utf-8")
        _run([*compiler, *flags, "-c", str(code), "-o", str(built)])
        _run([*compiler, "-shared", str(built), "-lm", "-o", str(linked)])
        checksum.write_text(_checksum(path, linked), encoding="ascii")
        for made, place in ((linked, path), (checksum, _checksum_file(path))):
            made.chmod(0o700)
            _sync(made)
            made.replace(place)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Flush to disk, so that a crash of the machine cannot leave a partial file under the final name."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _checksum_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _checksum(path: Path, content: Path) -> str:
    """Checksum of a library's content and its path, so that a library copied from another key does not match."""
    return hashlib.sha256(path.name.encode() + content.read_bytes()).hexdigest()


def _is_whole(path: Path) -> bool:
    """Whether the library exists and is undamaged. Loading a damaged one can kill the process without a message."""
    try:
        return not _others_may_write(path) and _checksum_file(path).read_text(encoding="ascii") == _checksum(path, path)
    except (OSError, ValueError):
        return False


def _others_may_write(path: Path) -> bool:
    status = path.stat()
    return status.st_uid not in (os.getuid(), 0) or bool(status.st_mode & 0o022)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the C compiler {command[0]} did not run: {error}") from error
    if done.returncode:
        raise ConfigError(f"the C compiler failed: {' '.join(command)}\n{done.stderr.strip()[-2000:]}")
    return done.stdout


@cache
def _version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"])


@cache
def _processor() -> str:
    """The processor's model and features, on which `-march=native` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    kinds = ("flags", "Features", "model", "cpu family", "vendor_id", "CPU part")
    return "\n".join(sorted({line for line in lines if line.partition(":")[0].strip() in kinds}))


@cache
def _folder() -> Path:
    """The cache folder, which may be read-only; a folder of this process if none can be made."""
    given = os.environ.get(CACHE_VARIABLE)
    try:
        folder = Path(given).expanduser() if given else Path.home() / ".cache" / "ubatch" / "c"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        exposed = _others_may_write(folder)
    except (OSError, RuntimeError):  # RuntimeError: this user has no home folder
        if given:
            raise ConfigError(f"{CACHE_VARIABLE}={given} cannot be written to. Choose another folder.") from None
        return Path(_own_folder().name)
    if exposed:
        raise ConfigError(
            f"{folder} can be written to by others (or its group), and what lies there would be run. Make it yours "
            f"alone, or name another folder: {CACHE_VARIABLE}."
        )
    return folder


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process, deleted with it."""
    try:
        return tempfile.TemporaryDirectory(prefix="ubatch-c-")
    except OSError as error:
        raise ConfigError(
            f"no folder for compiled kernels can be made: {error}. Choose one: {CACHE_VARIABLE}."
        ) from error
