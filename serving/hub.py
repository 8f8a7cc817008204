"""Find a checkpoint: a folder on this machine, or a name on the Hugging Face hub.

    folder              used as it is
    organisation/name   looked up by `huggingface_hub`: its cache, HF_HUB_OFFLINE, HF_TOKEN, its progress bar
    name                the same: old models such as gpt2 have no organisation

Config and tokenizer are downloaded first, so that settings that contradict them are refused before gigabytes of
weights are downloaded. The process that starts the ranks downloads both, once per machine.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from model_runner import Checkpoint
from ubatch import ConfigError
from ubatch.errors import cut

_NAME = re.compile(r"(?=.{1,96}$)[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # the hub has no longer names
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SMALL = ("*.json", "*.jinja", "*.model", "*.tiktoken", "tokenizer*", "vocab*", "merges.txt")
_WEIGHTS = ("*.safetensors",)
_DOUBLES = ("original/*", "consolidated*")
"""Copies of the weights in other layouts, which are not needed."""


class ModelNotFound(ConfigError):
    """The checkpoint is neither a folder here nor on the hub, or it cannot be downloaded."""


@dataclass(frozen=True)
class Located:
    """Where a checkpoint is.

    Attributes:
        folder: its folder on this machine.
        name: its name on the hub; None if the user gave a folder.
        download_dir: the cache that holds it; None for the hub's default cache.
        revision: the branch, tag or commit that the user asked for; None for `main`.
    """

    folder: Path
    name: str | None = None
    download_dir: Path | None = None
    revision: str | None = None

    @property
    def commit(self) -> str | None:
        """The commit that the config was downloaded from, so that the weights match it even if the branch moved.

        If the cache's folder is not named after a commit, this is the revision that the user asked for.
        """
        return self.folder.name if _COMMIT.fullmatch(self.folder.name) else self.revision


def looks_like_name(model: str | Path) -> bool:
    """Whether `model` is looked up on the hub: it reads `organisation/name` or `name`, and no such path exists here."""
    return _NAME.fullmatch(str(model)) is not None and not os.path.exists(model)  # `Path.exists` may raise


def find_checkpoint(
    model: str | Path, spelled: str, *, revision: str | None = None, download_dir: Path | None = None
) -> Located:
    """Find the folder with a checkpoint's config and tokenizer; the weights may be missing, see `fetch_weights`.

    Args:
        model: a folder, or a name on the hub.
        spelled: the setting that names the checkpoint, for messages.
        revision: branch, tag or commit on the hub; `main` by default.
        download_dir: cache to use in place of the hub's default cache.

    Raises:
        ModelNotFound: there is no such folder or name, or the download failed; the message says what to do.
    """
    if not str(model).strip():
        raise ModelNotFound(
            f"{spelled} is empty: give the folder of a Hugging Face checkpoint, or its name on the hub."
        )
    if not looks_like_name(model):
        if not os.path.isdir(model):
            raise ModelNotFound(
                f"{spelled}: {cut(str(model))} is not a folder. Give the folder of a Hugging Face checkpoint, or its "
                "name on the hub (organisation/name, or only a name like gpt2)."
            )
        return Located(Path(model))
    folder = _download(str(model), spelled, revision, download_dir, _SMALL)
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{spelled}: {folder}, which the hub calls {model}, has no config.json: {_again()}")
    return Located(folder, str(model), download_dir, revision)


def fetch_weights(located: Located, spelled: str) -> None:
    """Download missing weights, then check that all are there.

    Raises:
        ModelNotFound: the download failed.
        CheckpointError: the checkpoint has no weights, or some are missing.
    """
    folder = located.folder
    if located.name is not None and not _offline():  # offline, only what is cached can be used
        folder = _download(located.name, spelled, located.commit, located.download_dir, (*_SMALL, *_WEIGHTS))
    Checkpoint(folder).check_weights()


def _offline() -> bool:
    from huggingface_hub import constants  # only where a name is given

    return bool(constants.HF_HUB_OFFLINE)


def _download(
    name: str, spelled: str, revision: str | None, download_dir: Path | None, patterns: Sequence[str]
) -> Path:
    from huggingface_hub import constants, errors, snapshot_download  # only where a name is given

    offline = _offline()
    cache = constants.HF_HUB_CACHE if download_dir is None else download_dir
    what = f"{spelled}: {name}" if revision is None else f"{spelled}: {name} at revision {revision}"
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            cache_dir=download_dir,
            local_files_only=offline,
            allow_patterns=list(patterns),
            ignore_patterns=list(_DOUBLES),
        )
    except Exception as error:  # the network, the disk and the client's libraries raise many kinds
        login = "log in with `hf auth login` or set HF_TOKEN."
        match error:
            case errors.GatedRepoError():
                why = f" is gated: ask for access on https://huggingface.co/{name}, then {login}"
            case errors.RevisionNotFoundError():
                why = f": the hub has no such branch, tag or commit. https://huggingface.co/{name} lists them."
            case errors.RepositoryNotFoundError():
                why = (
                    " is no folder here, and the hub has no model of that name, or a private one. Correct the name; "
                    f"for a private one {login}"
                )
            case errors.HFValidationError():
                why = f" is no folder here, and no name that the hub allows: {_line(error)}"
            case errors.LocalEntryNotFoundError() | errors.IncompleteSnapshotError():
                reason = "HF_HUB_OFFLINE forbids to download it" if offline else "the hub does not answer"
                why = f" is no folder here, is not (or not whole) in the cache {cache}, and {reason}. {_again(offline)}"
            case _:
                why = f" could not be had from the hub: {type(error).__name__}: {_line(error)}"
        raise ModelNotFound(what + why) from error
    return Path(folder)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _again(offline: bool = False) -> str:
    if offline:
        return "Unset HF_HUB_OFFLINE, name the cache that has it (HF_HUB_CACHE, --download-dir), or give a folder."
    return "Try again, name a cache that has it (HF_HUB_CACHE, --download-dir), or give a folder."
