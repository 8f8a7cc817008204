"""Check for foreign packages with our names: the package index has another `attention` and another `moe`."""

from importlib import metadata, util
from pathlib import Path

from ubatch.errors import UBatchError

_OURS = {"attention": "attention_backends", "moe": "all2all_backends"}
"""Package -> text that only our `__init__.py` contains."""


class ForeignPackage(UBatchError, ImportError):
    """Another package was found in place of one of ours."""


def check_packages() -> None:
    """Check that `attention` and `moe` are ours, without importing them.

    Raises:
        ForeignPackage: one is not ours; the message says which, where it was found and what to do.
    """
    for name, ours in _OURS.items():
        spec = util.find_spec(name)
        if spec is None:
            raise ForeignPackage(f"the package `{name}` is missing: install ubatch again.")
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        if not (spec.origin and ours in Path(spec.origin).read_text(encoding="utf-8", errors="replace")):
            raise ForeignPackage(
                f"`import {name}` finds another package, {places[0] if places else 'built in'}, in place of ubatch's "
                f"own: {_remedy(name)}"
            )


def _remedy(name: str) -> str:
    others = sorted(set(metadata.packages_distributions().get(name, ())) - {"ubatch"})
    if not others:
        return "rename it or take its folder off sys.path (PYTHONPATH, the working directory)."
    return (
        f"pip uninstall {' '.join(others)}, then install ubatch again; or give ubatch a virtual environment of its own."
    )
