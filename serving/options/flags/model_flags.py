"""Settings of the checkpoint, and the names of transports, vLLM's included."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from model_runner.parallel import AUTO
from moe import all2all_backends
from serving.arguments.fields import Flag, Group
from serving.options.flags.fields import Positive, also
from ubatch import nearest
from ubatch.errors import shown

TRANSPORTS = tuple(name for name in all2all_backends() if name != "emulated_link")  # its flag is --emulated-link
_OTHER_NAMES = {"naive": "allgather_reducescatter"}
"""vLLM's name -> the name here; both send every token to every rank."""
_NOT_HERE = {
    "pplx": "deepep_low_latency",
    "flashinfer_all2allv": "torch_dist",
    "mori": "deepep_high_throughput",
    "mori_high_throughput": "deepep_high_throughput",
    "mori_low_latency": "deepep_low_latency",
}
"""vLLM's name of a transport that is not here -> the one to use instead."""


def _transport(name: str | None) -> str | None:
    """The transport's name here, from that name or vLLM's."""
    if name in _NOT_HERE:
        raise ValueError(f"{name} is not here; use {_NOT_HERE[name]}")
    known = (AUTO, *all2all_backends())
    if name is None or ":" in name:  # "package.module:Class", which need not be registered
        return name
    if name not in known and name not in _OTHER_NAMES:
        raise ValueError(f"unknown all2all back end {shown(name)}{nearest(name, known)}")
    return _OTHER_NAMES.get(name, name)


TransportName = Annotated[str | None, AfterValidator(_transport)]
"""Name of the transport that carries tokens to their experts; vLLM's names are accepted, too."""


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
