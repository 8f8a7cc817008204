"""An engine: one data-parallel rank that schedules and runs steps; and the client that feeds all of them.

options        what an engine is made from
core           the two loops over a scheduler and an executor
tracing        which steps are traced, for statistics and profiles
build          options -> runner -> core
messages, link what travels between client and engines, and an engine's end of the wire
secret, gate   what several nodes know and nobody else, and who is let in by it
rendezvous     where processes and nodes meet
process        a rank's process: take in, step, send; pause together
launch, node   the processes of one machine; a machine without the client
routing        which rank serves a request, and the way back
failures       which of many reports names the cause
client         all of it, as the API sees it
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
