"""`python -m serving.workbench.gpu`: measure on a GPU, print tables, write them."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_NEEDED = ("torch", "triton", "numpy", "tqdm", "safetensors")


def main(argv: list[str] | None = None) -> int:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"This Python lacks {', '.join(missing)}: install what is missing, or choose another one.", file=sys.stderr
        )
        return 1
    options = _parse(argv)
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

    import torch

    from serving.workbench.gpu.parts import names_in, why_not_into
    from serving.workbench.gpu.run import SECTIONS, Options, run
    from ubatch import ConfigError

    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "No GPU here: this needs an NVIDIA GPU and a CUDA build of torch. --device cpu --tiny runs every section "
            "on the CPU, and measures nothing.",
            file=sys.stderr,
        )
        return 1
    if options.device == "cpu" and not options.tiny:
        print("--device cpu needs --tiny: the full sizes would take days there.", file=sys.stderr)
        return 2
    if (why_not := why_not_into(options.json, rehearsal=options.tiny or options.device == "cpu")) is not None:
        print(why_not, file=sys.stderr)
        return 1
    chosen = Options(
        only=names_in(SECTIONS, options.only),
        device=options.device,
        tiny=options.tiny,
        blocks=options.blocks,
        json_file=options.json,
        markdown_file=options.markdown,
        graphs=_fake_graphs() if options.device == "cpu" else None,
    )
    try:
        return run(chosen, in_process=options.in_process)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _fake_graphs() -> Any:
    """The tests' recorder, which stands in for graphs in a rehearsal; None if the tests are not installed."""
    sys.path.append(str(Path(__file__).resolve().parents[3] / "tests" / "support"))
    if find_spec("fake_graphs") is None:
        return None
    return import_module("fake_graphs").FakeGraphs("cpu")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    from serving.workbench.gpu.parts import PARTS
    from serving.workbench.gpu.run import SECTIONS

    parser = argparse.ArgumentParser(prog="python -m serving.workbench.gpu", description="The GPU benchmarks.")
    parser.add_argument(
        "--only", nargs="+", choices=[*PARTS, *SECTIONS], help="these sections or parts; all by default"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes for a smoke test, which measures nothing")
    parser.add_argument("--blocks", type=int, default=15, help="A B B A blocks; 15 or more for figures to quote")
    parser.add_argument("--json", type=Path, help="write raw arms and figures here, section by section")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--in-process", action="store_true", help="run the sections in this process, one by one")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
