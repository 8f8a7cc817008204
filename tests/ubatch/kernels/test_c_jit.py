"""Kernels in C: compiled once, reused, and on failure an error with the reason instead of a crash."""

import ctypes
import errno
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from c_kernels import needs_c

from ubatch import ConfigError
from ubatch.kernels import c_jit
from ubatch.kernels.c_jit import CACHE_VARIABLE, OFF_VARIABLE, compile_c, kernel_of, why_not_c

SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture
def cache(new_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one; the vector types, which take a compiler ten times as long as the sources here, are left out."""
    (tmp_path / "no_vectors.h").touch()
    monkeypatch.setattr(c_jit, "_VECTORS", tmp_path / "no_vectors.h")
    return new_cache


@pytest.fixture
def new_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, in a process that has compiled nothing."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "c"))
    monkeypatch.setattr(c_jit, "_loaded", {})
    for cached in (c_jit._folder, c_jit._version, why_not_c):
        monkeypatch.setattr(c_jit, cached.__name__, c_jit.cache(cached.__wrapped__))
    return tmp_path / "c"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_jit, "_loaded", {})


@needs_c
def test_it_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_c(SOURCE).answer() == 42
    checksum, built = sorted(cache.iterdir())
    assert (checksum.stem, checksum.suffix, built.suffix) == (built.stem, ".sha256", ".so")
    before = built.stat().st_mtime_ns
    forget(monkeypatch)
    monkeypatch.setattr(c_jit, "_compile", None)
    assert (compile_c(SOURCE).answer(), built.stat().st_mtime_ns) == (42, before)
    assert sorted(cache.iterdir()) == [checksum, built]


@needs_c
def test_another_source_or_processor_is_another_kernel(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_c(SOURCE)
    assert compile_c(SOURCE.replace("42", "43")).answer() == 43
    assert compile_c("int answer(void) { return ANSWER; }", ANSWER=44).answer() == 44
    forget(monkeypatch)
    monkeypatch.setattr(c_jit, "_processor", lambda: "another one")
    assert (compile_c(SOURCE).answer(), len(list(cache.glob("*.so")))) == (42, 4)


@needs_c
def test_two_that_start_together(cache: Path) -> None:
    path = c_jit._folder() / "both.so"

    def build(_: int) -> int:
        c_jit._compile(SOURCE, c_jit._compiler(), c_jit._FLAGS, path)
        return ctypes.CDLL(str(path)).answer()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(build, range(4))) == [42] * 4
    assert sorted(each.name for each in cache.iterdir()) == ["both.sha256", "both.so"]
    assert c_jit._is_whole(path)


@pytest.mark.long
@needs_c
def test_its_threads_are_torchs(new_cache: Path) -> None:
    assert c_jit.why_not_c() is None
    library = compile_c("#include <omp.h>\nint threads(void) { return omp_get_max_threads(); }\n")
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert library.threads() == count
    finally:
        torch.set_num_threads(before)


@needs_c
def test_the_profiler_sees_its_calls(cache: Path) -> None:
    library = compile_c("static int calls; void count(int more) { calls += more; } int counted(void) { return calls; }")
    count = kernel_of(library, "count", ctypes.c_int)
    count(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        count(40)
    assert library.counted() == 42
    assert [event.count for event in profile.key_averages() if event.key == "ubatch::count"] == [1]


@needs_c
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("int answer(void) { return }", "the C compiler failed"),
        ("int f(void); int g(void) { return f(); }", "together with torch"),
    ],
)
def test_what_cannot_be_compiled_or_loaded_says_so(cache: Path, source: str, reason: str) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=reason):
            compile_c(source)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("CC", "no-such-compiler", r"no C compiler \(no-such-compiler\) is installed"),
        ("CC", "false", "the C compiler failed"),
        (OFF_VARIABLE, "0", "switched off: UBATCH_C_KERNELS=0"),
    ],
)
def test_without_a_compiler_there_is_a_reason(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=reason):
        compile_c(SOURCE)
    assert re.search(reason, c_jit.why_not_c())


@needs_c
def test_a_compiler_may_have_arguments(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = c_jit._compiler()
    monkeypatch.setenv("CC", f"{name} -DANSWER=7")
    assert compile_c("int answer(void) { return ANSWER; }").answer() == 7


@pytest.mark.long
@needs_c
@pytest.mark.parametrize("damage", ["cut", "foreign", "without a checksum", "checksum of another", "open to its group"])
def test_a_library_that_is_not_as_it_was_compiled_is_compiled_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    compile_c(SOURCE)
    checksum, built = sorted(cache.iterdir())
    good = built.read_bytes()
    forget(monkeypatch)
    compile_c(SOURCE.replace("42", "43"))
    (other,) = set(cache.glob("*.so")) - {built}
    built.unlink()  # as a new file: what is loaded must not change
    built.write_bytes(good[:100] if damage == "cut" else other.read_bytes())
    built.chmod(0o700)
    if damage == "without a checksum":
        checksum.unlink()
    elif damage == "checksum of another":
        checksum.write_bytes(other.with_suffix(".sha256").read_bytes())
    elif damage == "open to its group":
        checksum.write_text(c_jit._checksum(built, built))
        built.chmod(0o770)
    forget(monkeypatch)
    assert (compile_c(SOURCE).answer(), built.read_bytes()) == (42, good)
    assert c_jit._is_whole(built)


@needs_c
def test_a_read_only_cache_with_good_kernels_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_c(SOURCE)
    forget(monkeypatch)
    monkeypatch.setattr(c_jit, "_folder", c_jit.cache(c_jit._folder.__wrapped__))

    def refuse(**where: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for make in ("TemporaryFile", "TemporaryDirectory"):
        monkeypatch.setattr(c_jit.tempfile, make, refuse)
    assert compile_c(SOURCE).answer() == 42
    with pytest.raises(ConfigError, match=r"cannot be written to, and has no good kernel of this kind: .*Read-only"):
        compile_c(SOURCE.replace("42", "43"))


@needs_c
def test_a_read_only_cache_that_nobody_chose_is_left_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    kept, compiled = c_jit._folder(), c_jit._compile

    def refuse(source: str, compiler: tuple[str, ...], flags: tuple[str, ...], path: Path) -> None:
        if path.parent == kept:
            raise OSError(errno.EROFS, "Read-only file system")
        compiled(source, compiler, flags, path)

    monkeypatch.setattr(c_jit, "_compile", refuse)
    assert compile_c(SOURCE).answer() == 42
    assert not list(kept.iterdir())


@needs_c
@pytest.mark.parametrize("mode", [0o777, 0o707, 0o770])
def test_a_folder_that_others_may_write_to_is_refused(cache: Path, mode: int) -> None:
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(ConfigError, match="can be written to by others"):
        compile_c(SOURCE)


@needs_c
def test_a_kernel_that_cannot_be_loaded_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, mode: int) -> None:
        assert Path(path).exists()
        raise OSError("damaged")

    with monkeypatch.context() as patch:
        patch.setattr(c_jit.ctypes, "CDLL", refuse)
        with pytest.raises(ConfigError, match="cannot be loaded together with torch: damaged"):
            compile_c(SOURCE)
    assert not list(cache.iterdir())
    forget(monkeypatch)
    assert compile_c(SOURCE).answer() == 42


@needs_c
def test_another_openmp_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_jit, "_PROBE", "int ubatch_threads(void) { return 1234; }\n")
    assert "has 1234 threads" in c_jit.why_not_c()


@needs_c
def test_a_cache_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(blocked / "c"))
    with pytest.raises(ConfigError, match="cannot be written to"):
        compile_c(SOURCE)
    forget(monkeypatch)
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(blocked))
    assert compile_c(SOURCE).answer() == 42
