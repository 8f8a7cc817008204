"""`ubatch bench abuse`: a server under attack, beside a steady load.

streams     fifty streams run all the time; none may get a wrong token
attacks     one after the other, each with the statuses that it may be answered with
rounds      a thousand streams at once, a third of them dropped midway, and again: nothing is lost, memory stays
hang        one rank stands still: `/health` says so, requests fail with its name, the server ends
"""

from serving.workbench.bench.server.abuse.command import Options, run

__all__ = ["Options", "run"]
