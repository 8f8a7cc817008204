"""Floor 4 runs the model: commands (`cli`), the scheduler, engines and their client, the HTTP API, offline use.

from serving import LLM, SamplingParams

with LLM("examples/models/tiny-moe") as llm:
    print(llm.generate("Once upon a time", SamplingParams(temperature=0))[0].outputs[0].text)
"""

from __future__ import annotations

import importlib
import typing

if typing.TYPE_CHECKING:
    from serving.cli import main as main
    from serving.llm import LLM as LLM
    from serving.llm_engine import AsyncLLM as AsyncLLM
    from serving.llm_engine import LLMEngine as LLMEngine
    from serving.offline.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from serving.offline.engine_args import EngineArgs as EngineArgs
    from serving.offline.engine_args import FlexibleArgumentParser as FlexibleArgumentParser
    from serving.offline.outputs import CompletionOutput as CompletionOutput
    from serving.offline.outputs import Logprob as Logprob
    from serving.offline.outputs import RequestOutput as RequestOutput
    from serving.offline.prompts import TextPrompt as TextPrompt
    from serving.offline.prompts import TokensPrompt as TokensPrompt
    from serving.offline.sampling_params import RequestOutputKind as RequestOutputKind
    from serving.offline.sampling_params import SamplingParams as SamplingParams
    from serving.structured.params import StructuredOutputsParams as StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "CompletionOutput",
    "EngineArgs",
    "FlexibleArgumentParser",
    "LLMEngine",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "main",
]

_MODULES = {
    "main": "cli",
    "LLM": "llm",
    "AsyncLLM": "llm_engine",
    "LLMEngine": "llm_engine",
    **dict.fromkeys(("AsyncEngineArgs", "EngineArgs", "FlexibleArgumentParser"), "offline.engine_args"),
    **dict.fromkeys(("CompletionOutput", "Logprob", "RequestOutput"), "offline.outputs"),
    **dict.fromkeys(("TextPrompt", "TokensPrompt"), "offline.prompts"),
    **dict.fromkeys(("RequestOutputKind", "SamplingParams"), "offline.sampling_params"),
    "StructuredOutputsParams": "structured.params",
}


def __getattr__(name: str) -> typing.Any:
    """Import on first use: most import torch, which a command may not need; `python -m serving.cli` runs `main`.

    Raises:
        ImportError: vLLM has the name, and this project has not; the message says why.
    """
    if name in _MODULES:
        return getattr(importlib.import_module(f"serving.{_MODULES[name]}"), name)
    if name[:1].isupper():
        from serving.offline.not_offered import NAMES

        if name in NAMES:
            raise ImportError(f"serving.{name} is not offered: {NAMES[name]}.")
    raise AttributeError(f"module 'serving' has no attribute {name!r}")
