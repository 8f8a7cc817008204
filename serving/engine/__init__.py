"""Engines, each a data-parallel rank that schedules and runs steps; and the client that sends them requests.

options        settings of an engine; `speculation` has those of draft tokens
rank/          a rank's process: the two loops over a scheduler and an executor; start-up and tracing
wire/          messages between client and engines, the rendezvous, and authentication
launch, node   the processes of one machine; a machine without the client
routing        which rank serves a request, and to which stream its outputs go
prefixes       which rank was sent which beginnings of prompts
runs, run      runs of the engines, one after another; one of them, from its start to its first failure
profiles       asks every rank to write its trace, and waits
liveness       takes all signs of life and of death, and says once which rank has failed, and why
blame          whether a failure is a rank's own, inside a step, and which requests were in that step
restarts       whether the engines may be started again
kept           memory that a rank leaves to the process that takes its place
step_record    which requests are in the steps that a rank runs; it outlives the rank
suspects       which request kills the engines
kept           memory that a rank leaves for the process that takes its place
run_folder     the private folder of a run on one machine
run_host       what node 0 provides for a run: folder, store, socket, who may connect
client         the engines as the API uses them
offline        the engines, or one rank in this process, as `LLM` uses them
"""

from serving.engine.client import EngineClient, EngineInfo
from serving.engine.node import run_node
from serving.engine.options import EngineOptions
from serving.engine.rank.core import EngineCore

__all__ = ["EngineClient", "EngineCore", "EngineInfo", "EngineOptions", "run_node"]
