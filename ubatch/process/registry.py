"""Pluggable parts: registered by name, imported on first use.

A back end may need missing packages or hardware (a GPU kernel library on a laptop). So a name maps to
`"module:attribute"`, and nothing is imported before `load`. An installed package may fail to import with any error;
`import_optional` turns it into `ConfigError`.
"""

import importlib
from types import ModuleType

from ubatch.errors import ConfigError, check_known, describe, shown


def import_optional(module: str, advice: str) -> ModuleType:
    """Import a module that may be missing or broken.

    Args:
        module: its full name.
        advice: what to do if it cannot be imported; the end of the error message.

    Raises:
        ConfigError: the import failed with any error: some packages raise RuntimeError if the versions of their parts
            do not match.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ConfigError(f"{module} cannot be imported ({describe(error)}). {advice}") from error


class LazyRegistry:
    """Names of one kind of part, and the module of each.

    Args:
        kind: name of the kind for errors ("all2all back end").
        targets: name -> `"module:attribute"`.
    """

    def __init__(self, kind: str, targets: dict[str, str]) -> None:
        self._kind = kind
        self._targets: dict[str, str] = {}
        for name, target in targets.items():
            self.register(name, target)

    def names(self) -> tuple[str, ...]:
        """The known names, sorted."""
        return tuple(sorted(self._targets))

    def register(self, name: str, target: str) -> None:
        """Add a part.

        Args:
            name: what users write.
            target: `"package.module:attribute"`; imported at the first `load`.

        Raises:
            ConfigError: the name is taken by another target, or the target is not of that form.
        """
        module, _, attribute = target.partition(":")
        if not module or not attribute:
            raise ConfigError(
                f"the target of {self._kind} {name!r} must be of the form 'package.module:attribute', not {target!r}."
            )
        taken = self._targets.setdefault(name, target)
        if taken != target:
            raise ConfigError(f"{self._kind} {name!r} is registered as {taken!r} already. Choose another name.")

    def load(self, name: str) -> object:
        """Import and return the part called `name`.

        Raises:
            ConfigError: the name is unknown (the message has the nearest known one), or its module cannot be imported.
        """
        check_known(self._kind, name, self._targets)
        module, _, attribute = self._targets[name].partition(":")
        advice = f"{self._kind} {shown(name)} needs it: repair what it imports, or choose another one."
        return getattr(import_optional(module, advice), attribute)
