"""Copy a checkpoint, with nan as the embedding of one token: a request with this token must fail."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from ubatch import ConfigError

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def poisoned_copy(model: Path, folder: Path) -> int:
    """Fill an empty folder with links to the checkpoint's files and a changed embedding; returns the poisoned token's
    id.

    A tied output head is untied, so that it keeps its weights.

    Raises:
        ConfigError: the model is no checkpoint in safetensors, or its embedding has another name.
    """
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model} is not the folder of a checkpoint: {error}.") from error
    index = model / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    name = places.get(_EMBEDDING, "model.safetensors")
    tensors = load_file(model / name) if (model / name).is_file() else {}
    if _EMBEDDING not in tensors:
        raise ConfigError(f"{model} has no {_EMBEDDING} in safetensors; give the folder of another checkpoint.")
    if config.get("tie_word_embeddings"):
        tensors[_HEAD] = tensors[_EMBEDDING].clone()
        places |= {_HEAD: name} if places else {}
    token = len(tensors[_EMBEDDING]) - 1
    tensors[_EMBEDDING][token] = float("nan")
    save_file(tensors, folder / name, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    if places:
        (folder / index.name).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for file in model.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file.resolve())
    return token
