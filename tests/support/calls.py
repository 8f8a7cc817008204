"""Calls of the commands as a user types them, in few words."""

import re
import shlex
from collections.abc import Sequence

import pytest
from repository import MODELS, TINY_MOE

from serving.cli import main

HEAD = MODELS / "tiny-moe-eagle"
SHORT = {
    "TINY": str(TINY_MOE),
    "EP": "--data-parallel-size 2 --enable-expert-parallel",
    "TP": "--tensor-parallel-size 2 --enable-expert-parallel",
    "SBO": "--enable-single-batch-overlap",
    "NODES": "--nnodes 2 --data-parallel-size 2",
    "NGRAM": "--speculative-algorithm ngram",
    "PATH": f"--speculative-draft-model-path {HEAD}",
    "EAGLE": f"--speculative-algorithm eagle --speculative-draft-model-path {HEAD}",
    "BACKEND": "--data-parallel-size 2 --enable-expert-parallel --all2all-backend",
    "ROOM": "--all2all-options max_tokens_per_rank",
    "DBO": "--data-parallel-size 2 --enable-expert-parallel --enable-dbo",
    "CORS": "--allowed-origins *",
    "SAMPLED": "--temperature 0.7",
    "HEAD": str(HEAD),
    "MIXED": "--max-prefill-tokens-per-mixed-step",
}
"""Words that stand for several."""


def words_of(call: str) -> tuple[list[str], int]:
    """A call's words, and the machine's GPUs: `GPUS=2` in front is a machine with two of them."""
    words = shlex.split(re.sub(r"[A-Z]{2,}", lambda short: SHORT.get(short[0], short[0]), call))
    gpus = int(words.pop(0).removeprefix("GPUS=")) if words[:1] and words[0].startswith("GPUS=") else 0
    return words, gpus


def line_of(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a wrong call prints."""
    assert main(words) == 2
    out, error = capsys.readouterr()
    (line,) = error.splitlines()
    assert out == ""
    assert line.startswith(f"ubatch {' '.join(words[: 2 if words[0] == 'bench' else 1])}: ")
    return line
