"""Settings of the checkpoint, and of the tool calls and the reasoning in its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from serving.arguments.fields import Flag, Group
from serving.options.flags.fields import Positive, also, one_of
from serving.turns import REASONING_PARSERS, TOOL_PARSERS


class Model(Group):
    """The checkpoint, its data type and its device."""

    model: Annotated[
        str | None, Flag(metavar="MODEL", default="here, with --model, or in the file", positional=True)
    ] = Field(None, description="folder of a Hugging Face checkpoint, or its name on the hub, like Qwen/Qwen3-30B-A3B")
    named_model: Annotated[str | None, Flag(name="model", metavar="MODEL", default="")] = Field(
        None, description="the same, instead of MODEL"
    )
    revision: Annotated[str | None, Flag(default="main")] = Field(
        None, min_length=1, description="branch, tag or commit on the hub"
    )
    download_dir: Annotated[Path | None, Flag(default="the hub's cache, HF_HUB_CACHE")] = Field(
        None, description="folder that keeps what is downloaded from the hub"
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto", description="dummy makes random weights, so that a config and a tokenizer are enough"
    )
    trust_remote_code: bool = Field(
        False, description="no effect, accepted as vLLM has it: no code of a checkpoint is ever run"
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], also(half="float16", float="float32")] = Field(
        "auto",
        description="data type; auto is the checkpoint's on a GPU, and on a CPU float32, or bfloat16 if the checkpoint "
        "is bfloat16, too, and it is measured to be faster here",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto is a GPU where there is one")
    max_model_len: Annotated[Positive | None, Flag(default="the checkpoint's")] = Field(
        None, description="longest sequence, prompt and output together"
    )
    allow_long_max_model_len: bool = Field(
        False, description="--max-model-len may exceed the checkpoint's, beyond which outputs may be nonsense"
    )


class Turns(Group):
    """Tool calls and reasoning in the answers of chats."""

    enable_auto_tool_choice: bool = Field(
        False, description="the model decides whether to call tools, where a request leaves it to it (tool_choice auto)"
    )
    tool_call_parser: Annotated[
        str | None, one_of(TOOL_PARSERS), Flag(default="with --enable-auto-tool-choice, what the chat template shows")
    ] = Field(None, description=f"the form of the model's calls: {', '.join(TOOL_PARSERS)}")
    reasoning_parser: Annotated[
        str | None, one_of(REASONING_PARSERS), Flag(default="none; openai_gptoss where the chat template is harmony's")
    ] = Field(None, description=f"separate reasoning from content: {', '.join(REASONING_PARSERS)}")
    exclude_tools_when_tool_choice_none: bool = Field(
        False, description="do not show tools to the model where it may not call them (tool_choice none)"
    )
