"""`ubatch serve`: an OpenAI-compatible server. Settings are read and checked here, before anything is started.

Machines other than the first only run engines.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from serving.logs import configure_logging, log_event
from serving.options import Command, Settings, chosen_dtype, describe_settings, fetch_checkpoints, read_serve_command
from serving.text.chat_template import read_template
from serving.text.tokenizer import check_tokenizer

_logger = logging.getLogger(__name__)


def read(program: str, description: str, words: Sequence[str]) -> Command:
    """Read the command line, the settings file that it names, and the environment; check that there is a tokenizer.

    Raises:
        ConfigError: anything that cannot work, in one line.
        SystemExit: after `--help`.
    """
    command = read_serve_command(program, description, words)
    if command.engine.node_rank == 0:  # the other machines need no tokenizer
        check_tokenizer(command.engine.model)
        _check_answers(command.settings, command.engine.model)
    return command


def _check_answers(settings: Settings, model: Path) -> None:
    """Look early at the files that settings of the answers name."""
    if settings["chat_template"] is not None:
        read_template(settings["chat_template"])
    if settings.given("generation_config") or settings.given("override_generation_config"):
        from serving.generation_config import request_defaults  # takes a second

        request_defaults(model, settings["generation_config"], settings["override_generation_config"])


def run(command: Command) -> int:
    """Serve until told to end; the exit status is 0 after a drain.

    Raises:
        ConfigError, CheckpointError: the model cannot be served like this.
        CannotListen: the port is in use, or this user may not use it.
        EngineDead: an engine died; the message names its rank.
    """
    if command.print_config:
        print(describe_settings(command.settings))
        return 0
    settings, node = command.settings, command.engine.node_rank
    configure_logging(settings["log_level"], f"node {node}" if node else "api")
    for note in command.notes:
        log_event(_logger, note, level=logging.WARNING)
    fetch_checkpoints(settings)
    if node:
        from serving.engine.node import run_node

        for choice in chosen_dtype(settings):
            log_event(_logger, choice)
        return run_node(command.engine)
    from serving.server import run_server  # the imports take longer than all the checks

    return run_server(command)
