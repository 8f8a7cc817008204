"""Settings without bounds: huge numbers, files and names. Each is one short line, at once, and within little memory."""

import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from calls import line_of
from repository import ROOT, TINY_MOE

from serving.options import describe_settings, read_layers, resolve_settings, to_engine_options
from serving.options.flags.tables import COMMANDS
from ubatch import ConfigError, UBatchConfig, UBatchError
from ubatch.errors import cut, nearest, shown
from ubatch.process.files import read_yaml

TINY = str(TINY_MOE)
LONGEST_MESSAGE = 1600  # other tests of this process may have named transports
"""Characters; the longest are lists of all names that are known."""


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a wrong call."""
    begun = time.thread_time()
    line = line_of(words, capsys)
    assert len(line) < LONGEST_MESSAGE
    assert time.thread_time() - begun < 10
    return line


# -- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["serve", "generate", "tune"])
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["-tp", "1000"], "processes on this machine"),
        (["-tp", "3"], "does not divide its 4 attention heads"),
        (["--data-parallel-size", "9223372036854775807"], "processes on this machine"),
        (["--data-parallel-size", "1000"], "--data-parallel-size: 1000 processes on this machine"),
        (["--data-parallel-size", "9223372036854775808"], "less than 2**63"),
        (["--data-parallel-size", "9" * 4000], "less than 2**63"),
        (["--nnodes", "9223372036854775807", "--data-parallel-size", "9223372036854775807"], "at most 4096 machines"),
    ],
)
def test_sizes_are_checked_before_anything_is_measured(
    command: str, words: list[str], what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("serving.options.resolve.choose_dtype")
    if command != "tune":
        words = [*words, "--enable-expert-parallel"]
    if command == "generate":
        words = [*words, "--prompt", "x"]
    assert what in refused([command, TINY, "--device", "cpu", *words], capsys)


def test_processes_are_counted_on_each_machine() -> None:
    from serving.options.checks import _MOST_PROCESSES

    words = ["--data-parallel-size", str(2 * _MOST_PROCESSES), "--nnodes", "2", "--master-addr", "h"]
    layers, _ = read_layers(COMMANDS[0], "ubatch serve", "", [TINY, *words, "--master-port", "1"])
    assert resolve_settings(*layers)["data_parallel_size"] == 2 * _MOST_PROCESSES


# -- files ----------------------------------------------------------------------------------------------------------


def bomb(levels: int, item: str) -> str:
    """Each line stands for eight times what the one before stands for."""
    lines = [f"z{n}: &a{n} " + item % ",".join([f"*a{n - 1}"] * 8) for n in range(1, levels)]
    return "\n".join(["z0: &a0 {k: 1}", *lines]) + "\n"


FILES = {
    "a number of 6,000 digits": "max-num-seqs: " + "9" * 6000,
    "a long number": "max-num-seqs: " + "9" * 900,
    "sexagesimal": "port: " + ":".join(["59"] * 100_000),
    "binary": "port: 0b" + "1" * 100_000,
    "no date": "port: 2024-13-45",
    "wrong tags": "port: !!timestamp x",
    "no bool": "enable-dbo: !!bool x",
    "no integer": "port: !!int ''",
    "unknown tag": "port: !" + "x" * 5000 + " 1",
    "aliases": bomb(12, "[%s]"),
    "merged aliases": bomb(12, "{<<: [%s]}"),
    "aliases of a setting": "prompt: &x [" + ",".join(["a"] * 200) + "]\nmodel: [" + ",".join(["*x"] * 200) + "]",
    "itself": "schedules: &a {x: *a}",
    "many values": "cudagraph-capture-sizes: [" + ",".join(["1"] * 100_000) + "]",
    "a long text": "port: " + "x" * 5000,
    "a long key": "x" * 5000 + ": 1",
    "a very long key": "x" * 500_000 + ": 1",
    "a key twice": "'" + "x" * 5000 + "': 1\n'" + "x" * 5000 + "': 2",
    "a list": "port: [" + ",".join(["1"] * 5000) + "]",
    "a mapping": "port: {" + ",".join(f"k{n}: 1" for n in range(3000)) + "}",
    "a name of a back end": "enable-expert-parallel: true\nall2all-backend: " + "x" * 5000,
    "a name of a schedule": "model: /dev/null\nschedule: " + "x" * 5000,
    "a name of a schedule of one's own": "model: /dev/null\nschedules: {" + "x" * 900 + ": {lanes: 2}}",
    "a model": "model: " + "x" * 5000,
    "a model's path": "model: /" + "x" * 5000,
    "a NUL": 'model: "a\\0b"',
    "a path": "profile-dir: " + "x" * 5000,
    "two values": "model: " + "x" * 5000 + "\nnamed-model: " + "y" * 5000,
    "large": "# " + "x" * 2**20,
    "many digits of bytes": "kv-cache-memory: " + "9" * 900 + "G",
}


@pytest.mark.long
@pytest.mark.wide_sample(3)
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_refused_in_one_short_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(FILES[name])
    refused(["serve", "--config", str(file), "--device", "cpu"], capsys)
    file.write_text(FILES[name].partition("\n")[0] if name.startswith("a key twice") else FILES[name])
    with pytest.raises(ConfigError) as caught:
        UBatchConfig.from_yaml(file)
    assert len(str(caught.value)) < LONGEST_MESSAGE


def test_a_file_without_end_is_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is larger than" in refused(["serve", TINY, "--config", "/dev/zero"], capsys)


def test_aliases_are_read_within_the_bounds(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("decode: &own {schedule: serial}\nprefill: *own\nverify: {<<: *own, token-threshold: 3}\n")
    own = {"schedule": "serial"}
    assert read_yaml(file) == {"decode": own, "prefill": own, "verify": {**own, "token-threshold": 3}}


WORDS = [
    ["--no-such-" + "x" * 5000],
    ["a", "x" * 5000],
    ["--port", "x" * 5000],
    ["--schedule", "x" * 5000],
    ["--kv-cache-memory", "x" * 5000],
    ["--all2all-options", "x" * 5000],
    ["--all2all-options", "x" * 5000 + "=1", "x" * 5000 + "=2"],
    ["--config", "x" * 5000],
    ["--profile-dir", "x" * 5000],
    ["--model", "x" * 5000],
]


@pytest.mark.parametrize("words", WORDS, ids=lambda words: words[0][:20])
def test_words_are_cut_in_messages(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refused(["serve", *words], capsys)


@pytest.mark.parametrize("value", ["x" * 5000, "x" * 300, "/" + "x" * 5000])
@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "--model"],
        ["simulate", "--hardware"],
        ["bench", "auto"],
        ["bench", "link", "--model"],
        ["bench", "handoff", "--json"],
        ["generate", "--prompt", "a"],
        ["tune", "--model"],
        ["serve", "--model"],
    ],
    ids=" ".join,
)
def test_a_long_name_is_no_traceback(words: list[str], value: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused([*words, value], capsys)


def test_what_is_shown_is_short() -> None:
    nested: list[object] = []
    nested.append(nested)
    for value in ("x" * 10**6, 10**6000, [[1] * 100] * 100, {n: [n] for n in range(10**5)}, nested, b"x" * 10**6):
        assert len(shown(value)) <= 83
    assert shown("short") == "'short'"
    assert shown({"a": [1, 2]}) == "{'a': [1, 2]}"
    assert cut("x" * 10, 4) == "xxxx..."
    begun = time.thread_time()
    assert nearest("x" * 10**6, ["serial", "single_batch"]) == ". Known: serial, single_batch"
    assert time.thread_time() - begun < 1


# -- fuzz -----------------------------------------------------------------------------------------------------------

_VALUES = (
    *("0", "1", "-1", "2", "16", "1000", "10000000000", "9223372036854775807", "1" * 90, "0.5", "1e300", "1e400"),
    *(".inf", ".nan", "~", "true", "off", "auto", "x", "''", "'a\\0b'", '"a\\0b"', "2024-13-45", "!!int x", "cuda"),
    *("[]", "[1]", "[10000000000]", "[1, 2]", "[[1]]", "{}", "{a: 1}", "{1: 2}", "{lanes: 10000000000}", "*x"),
    *("{a: {lanes: 4, chunks: 10000000000}}", "{schedule: serial, token-threshold: 10000000000}", "/dev/zero"),
    *("&x [*x]", "&x {<<: [*x, *x]}", "{<<: {a: 1}}", "{? [a] : 1}", "ngram", "float16", "'9999G'", "x" * 5000),
    *("[" * 500, "torch_dist", "1:59:59", "!!binary x"),
)
_FUZZED = 150
_MEMORY = 2 * 2**30


def fuzz(seed: int, file: Path) -> None:
    """Read random files of settings. Anything but a short message of ours fails."""
    chance = random.Random(seed)
    for _ in range(_FUZZED):
        table = chance.choice(COMMANDS)
        names = chance.sample(sorted(table.owners), chance.randint(1, 4))
        text = "".join(f"{name.replace('_', '-')}: {chance.choice(_VALUES)}\n" for name in names)
        if chance.random() < 0.2:
            place = chance.randrange(len(text))
            text = text[:place] + chance.choice("&*:-[]{}!|>%@`\"'#\n\t ,?") + text[place + chance.randint(0, 1) :]
        file.write_text(text)
        words = ["--config", str(file), *([TINY] if "model" not in names else [])]
        begun, message = time.thread_time(), ""
        try:
            layers, _ = read_layers(table, table.program, "", words)
            settings = resolve_settings(*layers, table=table, gpus=chance.choice([0, 2]))
            describe_settings(settings)
            to_engine_options(settings)
        except UBatchError as error:
            message = str(error)
        assert len(message) < LONGEST_MESSAGE, text
        assert time.thread_time() - begun < 10, text


@pytest.mark.wide
@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_random_files_within_little_memory(seed: int, tmp_path: Path) -> None:
    code = f"import sys; sys.path[:] = {sys.path!r}; import test_bounds; test_bounds.limited({seed}, {str(tmp_path)!r})"
    words = [sys.executable, "-c", code]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]


def limited(seed: int, folder: str) -> None:
    """Fuzz with a limit of memory above what the imports took."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    fuzz(seed, Path(folder) / "settings.yaml")
