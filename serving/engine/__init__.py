"""Engines, each a data-parallel rank that schedules and runs steps; and the client that sends them requests.

options        settings of an engine; `speculation` has those of draft tokens
rank/          a rank's process: the two loops over a scheduler and an executor; start-up and tracing
wire/          messages between client and engines, the rendezvous and its folder, and authentication
launch, node   the processes of one machine; a machine without the client
routing        which rank serves a request, and to which stream its outputs go
runs, run      runs of the engines, one after another; one of them, from its start to its first failure, and what node 0
               provides for it: folder, store, socket, who may connect
profiles       asks every rank to write its trace, and waits
liveness       takes all signs of life and of death, and says once which rank has failed, and why
restarts       whether the engines may be started again
suspects       whether a failure is a rank's own, inside a step, and which request kills the engines
kept           memory that a rank leaves for the process that takes its place: weights, and which requests are in its
               steps
client         the engines as the API uses them
offline        the engines, or one rank in this process, as `LLM` uses them
"""

from serving.engine.client import EngineClient, EngineInfo
from serving.engine.node import run_node
from serving.engine.options import EngineOptions
from serving.engine.rank.core import EngineCore

__all__ = ["EngineClient", "EngineCore", "EngineInfo", "EngineOptions", "run_node"]
