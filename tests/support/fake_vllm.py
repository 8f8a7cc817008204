"""A stand-in for vLLM in an environment of its own: `LLM`, and `vllm serve`. `FAKE_VLLM` says what goes wrong."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from repository import SUPPORT

__version__ = "0.0"
SamplingParams = SimpleNamespace


def make_environment(folder: Path) -> str:
    """Make an interpreter that finds this `vllm`, and a `torch` that is nothing but a version."""
    cli = folder / "vllm" / "entrypoints" / "cli"
    cli.mkdir(parents=True)
    for package in (cli, *cli.parents[:2]):
        (package / "__init__.py").touch()
    (folder / "vllm" / "__init__.py").write_text("from fake_vllm import LLM, SamplingParams, __version__\n")
    (cli / "main.py").write_text("from fake_vllm import serve as main\n")
    (folder / "torch.py").write_text("__version__ = '9.9'\n")
    return make_interpreter(folder, f"PYTHONPATH={folder}:{SUPPORT}")


def make_interpreter(folder: Path, assignment: str = "PYTHONPATH=") -> str:
    """Make a program that takes `-E`, which says not to heed `PYTHONPATH`, and what this interpreter takes."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -E ] || exit 9\nshift\n{assignment} exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    return str(python)


class LLM:
    """Every new token is the prompt's first one; it prints, and has a process of its own, as vLLM does."""

    def __init__(self, model: str, **options: Any) -> None:
        print(f"loading {Path(model).name}", sorted(options.items()), flush=True)
        if os.environ.get("FAKE_VLLM") == "no memory":
            raise ValueError("no memory for the KV cache")
        self.worker = subprocess.Popen(["sleep", "600"])
        self.calls = 0

    def generate(self, prompts: list[dict[str, list[int]]], params: SamplingParams, use_tqdm: bool) -> list[Any]:
        self.calls += 1
        wrong = os.environ.get("FAKE_VLLM")
        if wrong == "hang":
            time.sleep(600)
        if wrong == "crash":
            print("a kernel failed", flush=True)
            os._exit(3)
        if wrong == "refuse" and self.calls == 1:
            raise ValueError("too long")
        assert (params.temperature, params.ignore_eos, use_tqdm) == (0.0, True, False)
        time.sleep(0.01)
        tokens = [[each["prompt_token_ids"][0]] * params.max_tokens for each in prompts]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=each)]) for each in tokens]


def serve() -> None:
    """`vllm serve MODEL --port PORT ...`"""
    from openai_stub import serve_stub

    words = sys.argv[1:]
    assert words[0] == "serve"
    if os.environ.get("FAKE_VLLM") == "no server":
        sys.exit("the port is taken")
    serve_stub(int(words[words.index("--port") + 1]))
