"""`ubatch completion`: a script by which a shell completes commands and flags."""

import re
from contextlib import redirect_stdout, suppress
from io import StringIO

from serving.arguments.fields import Group
from serving.cli import COMMANDS, main

_SCRIPT = """\
# {usage}
if [ -n "$ZSH_VERSION" ]; then autoload -U +X bashcompinit && bashcompinit; fi
_ubatch() {{
  local words
  case "${{COMP_WORDS[*]:1}}" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _ubatch ubatch"""


class Options(Group):
    """Write the script to a file, ubatch completion > ~/.ubatch-completion, and have the shell read it when it starts:
    source ~/.ubatch-completion in ~/.bashrc or ~/.zshrc."""


def run(options: Options) -> int:
    """Print the script."""
    cases = {f"{name} ": _flags(name) for name in COMMANDS}
    cases["bench "] = [name.split()[1] for name in COMMANDS if name.startswith("bench ")]
    cases[""] = [*dict.fromkeys(name.split()[0] for name in COMMANDS), "--help", "--version"]
    rows = [f'    "{words}"*) words="{" ".join(each)}" ;;' for words, each in cases.items()]
    print(_SCRIPT.format(usage="Written by `ubatch completion`.", cases="\n".join(rows)))
    return 0


def _flags(name: str) -> list[str]:
    """A command's flags, read from its `--help`, which lists all of them."""
    shown = StringIO()
    with redirect_stdout(shown), suppress(SystemExit):
        main([*name.split(), "--help"])
    rows = re.findall(r"^  (-.*?)(?:  |$)", shown.getvalue(), re.MULTILINE)
    return [flag for row in rows for flag in re.findall(r"(?<![\w-])--[a-z0-9-]+", row)]
