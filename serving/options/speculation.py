"""The settings of speculation: checks, derived values, and the engines' configuration.

algorithm            needs                  guesses
ngram                nothing                a chain
eagle                the head's checkpoint  a chain, or with topk above 1 a tree
draft_model          its checkpoint         a chain or a tree, as eagle
mtp                  nothing: the model's   a chain or a tree, as eagle
"""

from collections.abc import Iterator
from contextlib import closing

from model_runner import Acceptance, Checkpoint, CheckpointError, ModelConfig
from model_runner.models import has_layer, no_layer
from model_runner.settings import most_nodes
from serving.engine.speculation import Algorithm, SpeculationConfig
from serving.options.flags.server_flags import DRAFT_STEPS, NGRAM_DRAFTS, TREE_DRAFTS
from serving.options.sources import Settings
from ubatch import ConfigError
from ubatch.errors import shown

_NGRAM = ("speculative_ngram_max", "speculative_ngram_min")
_NETWORK = ("speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk")
_ALL = (*_NETWORK, "speculative_num_draft_tokens", "speculative_accept", *_NGRAM)


def check_speculation(s: Settings) -> Iterator[str]:
    """Contradictions that do not depend on the checkpoint; one sentence each."""
    if s["speculative_algorithm"] is None:
        for name in _ALL:
            if s[name] is not None:
                yield f"{s.spell(name)} needs --speculative-algorithm; without it nothing is guessed."
        return
    algorithm = Algorithm(s["speculative_algorithm"])
    yield from _of_others(s, algorithm)
    if algorithm.has_path and s["speculative_draft_model_path"] is None:
        yield (
            f"{s.spell('speculative_algorithm')} {algorithm} needs --speculative-draft-model-path, the folder of "
            f"{'the head' if algorithm is Algorithm.EAGLE else 'the small model'}'s checkpoint."
        )
    longest, shortest = s["speculative_ngram_max"], s["speculative_ngram_min"]
    if longest is not None and shortest is not None and longest < shortest:
        yield (
            f"{s.spell('speculative_ngram_max')} is {longest}, below {s.spell('speculative_ngram_min')} ({shortest})."
        )
    if algorithm is not Algorithm.NGRAM:
        yield from _of_shape(derive_speculation(s))


def _of_others(s: Settings, algorithm: Algorithm) -> Iterator[str]:
    """Settings that were given but belong to another algorithm; one sentence each."""
    given = f"{s.spell('speculative_algorithm')} {algorithm}"
    others, why = (_NETWORK, ", which has no draft network") if algorithm is Algorithm.NGRAM else (_NGRAM, "")
    for name in others:
        if s[name] is not None:
            yield f"{s.spell(name)} has no effect with {given}{why}. Remove it."
    if algorithm is Algorithm.MTP and s["speculative_draft_model_path"] is not None:
        yield (
            f"{s.spell('speculative_draft_model_path')} has no effect with {given}: the layer is in the model's "
            "own checkpoint. Remove it."
        )


def _of_shape(s: Settings) -> Iterator[str]:
    """Contradictions between steps, top-k and drafts, all of which are known; one sentence each."""
    steps, topk, drafts = (
        s[name] for name in ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    )
    if topk == 1:
        if drafts != steps:
            yield (
                f"{s.spell('speculative_num_draft_tokens')} is {drafts}, but {s.spell('speculative_num_steps')} "
                f"{steps}: with {s.spell('speculative_eagle_topk')} 1 every step guesses one token. Set one of them."
            )
        return
    if s["speculative_accept"] == Acceptance.REJECTION:
        yield (
            f"{s.spell('speculative_accept')} rejection needs chains of drafts, but with "
            f"{s.spell('speculative_eagle_topk')} {topk} they are trees. Use 1, or --speculative-accept match."
        )
    if drafts > most_nodes(steps, topk):
        yield (
            f"{s.spell('speculative_num_draft_tokens')} is {drafts}; a tree of {steps} steps and "
            f"{s.spell('speculative_eagle_topk')} {topk} has {most_nodes(steps, topk)} drafts at most."
        )


def derive_speculation(s: Settings) -> Settings:
    """Derive the speculation settings that nobody gave; without an algorithm all stay None."""
    if s["speculative_algorithm"] is None:
        return s
    s = s.fill("speculative_accept", Acceptance.MATCH.value)
    if s["speculative_algorithm"] == Algorithm.NGRAM:
        s = s.fill("speculative_num_draft_tokens", NGRAM_DRAFTS)
        s = s.fill("speculative_ngram_max", max(SpeculationConfig.ngram_max, s["speculative_ngram_min"] or 0))
        shortest = min(SpeculationConfig.ngram_min, s["speculative_ngram_max"])
        return s.fill("speculative_ngram_min", shortest)
    s = s.fill("speculative_eagle_topk", 1)
    topk, drafts = s["speculative_eagle_topk"], s["speculative_num_draft_tokens"]
    chain = topk == 1
    as_many = chain and drafts is not None
    s = s.fill("speculative_num_steps", drafts if as_many else DRAFT_STEPS, "one per draft" if as_many else "")
    steps = s["speculative_num_steps"]
    if chain:
        return s.fill("speculative_num_draft_tokens", steps, "one per step")
    return s.fill("speculative_num_draft_tokens", min(TREE_DRAFTS, most_nodes(steps, topk)), "of a tree")


def check_draft_network(s: Settings, model: ModelConfig) -> None:
    """Check that the draft network's config fits the model's, before any weights are loaded.

    Raises:
        ConfigError: the folder is no checkpoint; the head has another hidden size; the draft model has another
            vocabulary; or `mtp` is chosen, and the model has no layer for multi-token prediction.
    """
    if s["speculative_algorithm"] == Algorithm.MTP:
        with closing(Checkpoint(s.folders["model"])) as own:
            if not has_layer(model, own):
                raise ConfigError(f"{s.spell('speculative_algorithm')} mtp: {no_layer(own)}")
    path = s.folders.get("speculative_draft_model_path")
    if path is None:
        return
    name = "hidden_size" if s["speculative_algorithm"] == Algorithm.EAGLE else "vocab_size"
    try:
        with closing(Checkpoint(path)) as checkpoint:
            values = checkpoint.config.values
    except CheckpointError as error:
        raise ConfigError(f"{s.spell('speculative_draft_model_path')}: {error}") from error
    ours, theirs = getattr(model, name), values.get(name)
    if theirs != ours:
        what = "the head does not fit" if name == "hidden_size" else "the two must share a tokenizer"
        raise ConfigError(
            f"{s.spell('speculative_draft_model_path')}: {name} of {path} is {shown(theirs)}, the model's is {ours}: "
            f"{what}."
        )


def speculation_config(s: Settings) -> SpeculationConfig | None:
    """The engines' speculation settings; None without speculation."""
    if s["speculative_algorithm"] is None:
        return None
    return SpeculationConfig(
        algorithm=Algorithm(s["speculative_algorithm"]),
        num_draft_tokens=s["speculative_num_draft_tokens"],
        num_steps=s["speculative_num_steps"] or 0,
        topk=s["speculative_eagle_topk"] or 1,
        draft_model_path=s.folders.get("speculative_draft_model_path"),
        acceptance=Acceptance(s["speculative_accept"]),
        ngram_max=s["speculative_ngram_max"] or SpeculationConfig.ngram_max,
        ngram_min=s["speculative_ngram_min"] or SpeculationConfig.ngram_min,
    )
