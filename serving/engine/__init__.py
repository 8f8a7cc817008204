"""An engine: one data-parallel rank that schedules and runs steps; and the client that feeds all of them.

options        what an engine is made from; `speculation` where it is about drafts
rank/          one process: the two loops over a scheduler and an executor, and what is made and traced for them
wire/          what travels between client and engines, where they meet, and who is let in
launch, node   the processes of one machine; a machine without the client
routing        which rank serves a request, and the way back
vital_signs    who is silent for too long
failures       which of many reports names the cause
folder         where the sockets of one machine lie
client         all of it, as the API sees it
offline        all of it, or one rank in this process, as `LLM` sees it
"""

from serving.engine.client import EngineClient, EngineInfo
from serving.engine.node import run_node
from serving.engine.options import EngineOptions
from serving.engine.rank.core import EngineCore, Executor, LaunchedStep, StepScheduler

__all__ = [
    "EngineClient",
    "EngineCore",
    "EngineInfo",
    "EngineOptions",
    "Executor",
    "LaunchedStep",
    "StepScheduler",
    "run_node",
]
