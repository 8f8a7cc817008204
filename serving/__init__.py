"""Floor 4 runs the model: commands (`cli`), the scheduler, engines and their client, the HTTP API, offline use.

from serving import LLM

with LLM("examples/models/tiny-moe") as llm:
    print(llm.generate("Once upon a time")[0].outputs[0].text)
"""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from serving.cli import main as main
    from serving.llm import LLM as LLM

__all__ = ["LLM", "main"]


def __getattr__(name: str) -> typing.Any:
    """Import on first use: `LLM` imports torch, which a command may not need; `python -m serving.cli` runs `main`."""
    if name == "main":
        from serving.cli import main

        return main
    if name == "LLM":
        from serving.llm import LLM

        return LLM
    raise AttributeError(f"module 'serving' has no attribute {name!r}")
