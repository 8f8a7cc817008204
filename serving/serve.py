"""`ubatch serve`: an OpenAI-compatible server. Settings are read and checked here, before anything is started.

Machines other than the first have engines only.
"""

from __future__ import annotations

import logging

from serving.logs import configure_logging, log_event
from serving.options import ServeCommand, describe_settings, fetch_checkpoints, notes
from serving.options import read_serve_command as read

__all__ = ["read", "run"]

_logger = logging.getLogger(__name__)


def run(command: ServeCommand) -> int:
    """Serve until told to end; the exit status is 0 after a drain.

    Raises:
        ConfigError, CheckpointError: the model cannot be served like this.
        CannotListen: the port is in use, or is not ours to use.
        EngineDead: an engine died; the message names its rank.
    """
    if command.print_config:
        print(describe_settings(command.settings))
        return 0
    settings, node = command.settings, command.engine.node_rank
    configure_logging(settings["log_level"], f"node {node}" if node else "api")
    for note in notes(settings):
        log_event(_logger, note, level=logging.WARNING)
    fetch_checkpoints(settings)
    if node:
        from serving.engine.node import run_node

        return run_node(command.engine)
    from serving.server import run_server  # the imports take longer than all the checks

    return run_server(command)
