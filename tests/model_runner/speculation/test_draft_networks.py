"""Loading draft networks: layers for multi-token prediction against transformers' layers, and refusals.

And their trees of drafts, against growing them one path at a time.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    APART,
    LAYERS,
    checkpoint_fixture,
    make_checkpoint,
    make_mtp_checkpoint,
    make_qwen3_moe_checkpoint,
    with_tensors,
)
from draft_cases import (
    PROMPTS,
    TINY_HEAD,
    TINY_MOE,
    TOLERANCE,
    Recording,
    Reference,
    drafted_tokens,
    drafting,
    head_estimates,
    make_head,
    make_proposer,
    plain_tokens,
)
from hypothesis import given
from hypothesis import strategies as st
from request_steps import admitted, prefill, step, verify
from run_examples import run_example
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

from model_runner import CausalLM, ModelRunner, ScheduledRequest, TensorMissing, TensorsUnread
from model_runner.drafting import load_draft
from model_runner.drafting.proposer import select_nodes
from model_runner.settings import most_nodes
from model_runner.step.batch import check_parents, path_to
from serving.cli import main
from ubatch import ConfigError

pytestmark = pytest.mark.long


def mtp_estimates(path: Path) -> Callable[[Any], Any]:
    """The layer by transformers' own: the fourth of a model that has four."""

    def bind(model: Any) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        weights = load_file(path / "model.safetensors")
        kinds = {}
        if "mtp.fc.weight" in weights:
            for name, apart in APART.items():
                weights[f"mtp.layers.0.{name}.weight"] = weights.pop(apart) + int(name != "eh_proj")
            place = f"model.layers.{LAYERS}"
            weights = {name.replace("mtp.layers.0", place): weight for name, weight in weights.items()}
            kinds = {"layer_types": ["linear_attention", "full_attention"] * 2}
        own = {name: weights[f"model.layers.{LAYERS}.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")}
        last = weights[f"model.layers.{LAYERS}.shared_head.norm.weight"]
        config = AutoConfig.from_pretrained(path, num_hidden_layers=LAYERS + 1, attn_implementation="eager", **kinds)
        whole = path
        if kinds:
            whole = path / "whole"
            whole.mkdir(exist_ok=True)
            (whole / "config.json").write_text((path / "config.json").read_text())
            save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
        layers = AutoModelForCausalLM.from_pretrained(whole, config=config, dtype=torch.float32).eval().model
        eps = config.rms_norm_eps

        @torch.no_grad()
        def estimate(tokens: list[int], features: Tensor) -> Tensor:
            embedded = F.embedding(torch.tensor(tokens[1:]), model.get_input_embeddings().weight)
            size = embedded.shape[-1:]
            both = (F.rms_norm(embedded, size, own["enorm"], eps), F.rms_norm(features, size, own["hnorm"], eps))
            x = F.linear(torch.cat(both, dim=-1), own["eh_proj"])[None]
            places = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
            rotary = layers.rotary_emb(x, places)
            out = layers.layers[LAYERS](x, attention_mask=mask, position_ids=places, position_embeddings=rotary)
            return F.rms_norm((out[0] if isinstance(out, tuple) else out)[0], size, last, eps)

        return estimate

    return bind


@pytest.mark.parametrize("family", ["DeepseekV3", "Glm4Moe", "Qwen3Next"])
def test_the_layer_for_multi_token_prediction(family: str, tmp_path: Path) -> None:
    path = make_mtp_checkpoint(tmp_path, family)
    reference = Reference(path, mtp_estimates(path))
    with ModelRunner(path, num_kv_blocks=128, block_size=4, num_speculative_tokens=3) as runner:
        network = Recording(load_draft("mtp", None, runner))
        proposer, requests = drafting(runner, network, chunk=6, num_steps=3)
        for _ in range(3):
            network.given.clear()
            drafts = proposer.propose(requests, [3] * 3)
            for index, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
                for place in range(3):
                    expected = reference.logits(request.token_ids, draft.tokens[:place])
                    assert (network.given[place][index] - expected).abs().max() < TOLERANCE
                    assert expected.abs().max() > 0.3
            drafted_tokens(runner, proposer, requests, max(r.num_output_tokens for r in requests) + 1, 3)
        with_drafts = [request.output_token_ids for request in requests]
    with ModelRunner(path, num_kv_blocks=128, block_size=4) as plain:
        requests = admitted(plain, PROMPTS)
        prefill(plain, requests)
        for _ in range(max(map(len, with_drafts)) - 1):
            step(plain, [ScheduledRequest(request, 1) for request in requests])
        for request, got in zip(requests, with_drafts, strict=True):
            assert request.output_token_ids[: len(got)] == got


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_latent_attention_with_heads_of_both_kinds_gives_the_same_text(
    cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ubatch generate` on a checkpoint with its own layer, or a head with grouped-query attention, over both caches.

    Draft networks keep what they compute as it is, whatever the model's cache stores.
    """
    path = make_mtp_checkpoint(tmp_path / "target")
    make_head(tmp_path / "head")
    words = Tokenizer(WordLevel({f"t{token}": token for token in range(131)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(path / "tokenizer.json"))
    prompts = [" ".join(f"t{(7 * place + 31 * index) % 131}" for place in range(4 + 9 * index)) for index in range(3)]
    command = ["generate", str(path), "--prompt", *prompts, "--max-tokens", "12", "--kv-cache-dtype", cache]

    def generated(*flags: str) -> tuple[list[str], str]:
        assert main([*command, *flags]) == 0
        text, _, rest = capsys.readouterr().out.partition("steps: ")
        return text.splitlines(), rest

    plain, rest = generated()
    assert "speculation: " not in rest
    head = ["--speculative-algorithm", "eagle", "--speculative-draft-model-path", str(tmp_path / "head")]
    for flags in (["--speculative-algorithm", "mtp"], head):
        for shape in ([], ["--speculative-eagle-topk", "2"]):
            text, rest = generated(*flags, *shape, "--max-num-batched-tokens", "16")
            assert len(text) == len(plain)
            if cache == "auto":  # rounding to fp8 turns the last bits, which depend on the batch, into steps
                assert text == plain
            assert "tokens per request and verify step" in rest


@pytest.mark.slow
@pytest.mark.timeout(140)
def test_training_starts(tmp_path: Path) -> None:
    output = run_example("train_eagle_head.py", "--steps", "1", "--out", str(tmp_path), timeout=140)
    assert "mean accepted length 1." in output  # it has learned nothing yet
    assert (tmp_path / "model.safetensors").stat().st_size < 4_000_000


target = checkpoint_fixture()


@pytest.fixture
def runner(target: Path) -> Iterator[ModelRunner]:
    with ModelRunner(target, num_kv_blocks=16, block_size=4) as runner:
        yield runner


def refused(runner: ModelRunner, algorithm: str, path: Path | None, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_draft(algorithm, path, runner)


def test_what_does_not_fit_is_refused(tmp_path: Path, runner: ModelRunner) -> None:
    for name, sizes in (("wide", {"hidden_size": 64}), ("words", {"vocab_size": 140})):
        make_head(tmp_path / name, **sizes)
    refused(runner, "eagle", tmp_path / "wide", "hidden_size 64, the target 48")
    refused(runner, "eagle", tmp_path / "words", "vocab_size 140, the target 131")
    words = make_qwen3_moe_checkpoint(tmp_path / "other words", vocab_size=140)
    refused(runner, "draft_model", words, "vocab_size 140, the target 131")
    short = make_qwen3_moe_checkpoint(tmp_path / "short", max_position_embeddings=64)
    refused(runner, "draft_model", short, "has 64 positions, the target runs sequences of 256")


def test_what_is_something_else_is_refused(tmp_path: Path, target: Path, runner: ModelRunner) -> None:
    make_head(tmp_path)
    refused(runner, "eagle", target, "choose draft_model")
    refused(runner, "draft_model", tmp_path, "choose eagle")
    refused(runner, "mtp", None, "has no layer for multi-token prediction")
    refused(runner, "mtp", tmp_path, "takes no path")
    refused(runner, "eagle", None, "needs a checkpoint's path")
    refused(runner, "eagel", tmp_path, "eagel")


def load_mtp(path: Path) -> object:
    with ModelRunner(path, num_kv_blocks=16, block_size=4) as runner:
        return load_draft("mtp", None, runner)


def test_a_hybrid_without_linear_layers_keeps_its_layer_apart_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is stored says where the layer is; a hybrid's config has no entry for it."""
    path = make_mtp_checkpoint(tmp_path, "Qwen3Next", first="full_attention")
    load_mtp(path)
    main(["serve", str(path), "--speculative-algorithm", "mtp", "--print-config"])
    assert "has no tokenizer" in capsys.readouterr().err, "which is checked last"
    with_tensors(path, {"mtp.fc.weight": None})
    with pytest.raises(TensorMissing, match=r"no tensor 'mtp\.fc\.weight'"):
        load_mtp(path)
    names = load_file(path / "model.safetensors")
    with_tensors(path, {name: None for name in names if name.startswith("mtp.")})
    with pytest.raises(ConfigError, match=r"no layer for multi-token prediction \(tensors mtp\.\*\)"):
        load_mtp(path)


def test_a_layer_that_is_counted_and_not_stored(tmp_path: Path) -> None:
    """transformers saves a DeepSeek so."""
    path = make_checkpoint(tmp_path, "DeepseekV3", num_nextn_predict_layers=1)
    with pytest.raises(ConfigError, match=r"no layer for multi-token prediction .* and the layer's tensors\)"):
        load_mtp(path)
    with ModelRunner(path, num_kv_blocks=16, block_size=4, load_format="dummy") as runner:
        load_draft("mtp", None, runner)


@pytest.mark.parametrize(("family", "place"), [("Glm4Moe", "model.layers.3"), ("Qwen3Next", "mtp")])
def test_all_of_the_layer_is_read(family: str, place: str, tmp_path: Path) -> None:
    path = make_mtp_checkpoint(tmp_path, family)
    copy, further = torch.zeros(131, 48), "mtp.layers.1.strange"
    with_tensors(path, {f"{place}.embed_tokens.weight": copy, f"{place}.shared_head.head.weight": copy.clone()})
    if place == "mtp":
        with_tensors(path, {further: torch.zeros(1)})
    load_mtp(path)
    with_tensors(path, {f"{place}.strange": torch.zeros(1)})
    with pytest.raises(TensorsUnread, match=rf"{place}\.strange") as caught:
        load_mtp(path)
    assert caught.value.names == (f"{place}.strange",)


@pytest.mark.parametrize("algorithm", ["eagle", "draft_model"])
def test_all_of_a_draft_network_is_read(algorithm: str, tmp_path: Path, runner: ModelRunner) -> None:
    make_head(tmp_path) if algorithm == "eagle" else make_qwen3_moe_checkpoint(tmp_path)
    load_draft(algorithm, tmp_path, runner)
    with_tensors(tmp_path, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(TensorsUnread, match=r"self_attn\.q_proj\.bias"):
        load_draft(algorithm, tmp_path, runner)


def test_a_target_that_does_not_say_what_its_embeddings_are(tmp_path: Path, runner: ModelRunner) -> None:
    class Other(CausalLM):
        def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
            return input_ids

    make_head(tmp_path)
    Other.__abstractmethods__ = frozenset()
    runner.model, model = Other(), runner.model
    with pytest.raises(ConfigError, match="cannot share its embeddings"):
        load_draft("eagle", tmp_path, runner)
    runner.model = model


Nodes = tuple[int, ...]
Shape = dict[str, int]


def grown(
    reference: Reference, tokens: list[int], num_steps: int, topk: int
) -> tuple[dict[Nodes, float], list[list[Tensor]]]:
    """All candidates of a request's tree, by the drafts on their path, and the logarithms of their probabilities; and
    the logits behind each node that was gone on from, level by level."""
    found: dict[Nodes, float] = {}
    given: list[list[Tensor]] = []
    level: list[Nodes] = [()]
    for _ in range(num_steps):
        given.append([reference.logits(tokens, path) for path in level])
        new: dict[Nodes, float] = {}
        for path, logits in zip(level, given[-1], strict=True):
            chances = logits.log_softmax(dim=-1)
            for token in chances.topk(topk).indices.tolist():
                new[(*path, token)] = found.get(path, 0.0) + float(chances[token])
        found |= new
        level = sorted(new, key=lambda path: -new[path])[:topk]
    return found, given


@pytest.mark.sample(3)
@pytest.mark.parametrize(("num_steps", "topk", "count"), [(1, 3, 3), (3, 2, 6), (3, 2, 10), (4, 3, 30), (2, 4, 20)])
def test_the_most_likely_nodes(tmp_path: Path, num_steps: int, topk: int, count: int) -> None:
    target = make_qwen3_moe_checkpoint(tmp_path / "target")
    reference = Reference(target, head_estimates(make_head(tmp_path / "head")))
    with ModelRunner(target, num_kv_blocks=128, block_size=4) as runner:
        network = Recording(load_draft("eagle", tmp_path / "head", runner))
        proposer, requests = drafting(runner, network, PROMPTS, num_steps=num_steps, topk=topk, num_draft_tokens=count)
        for _ in range(2):
            network.given.clear()
            drafts = proposer.propose(requests, [count] * 3)
            for index, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
                assert draft.parents is not None
                check_parents(request.request_id, draft.parents, count)
                paths = {tuple(draft.tokens[i] for i in path_to(n + 1, draft.parents)) for n in range(count)}
                assert len(paths) == len(draft.tokens) == count
                chances, logits = grown(reference, request.token_ids, num_steps, topk)
                assert len(chances) == most_nodes(num_steps, topk)
                least = sorted(chances.values(), reverse=True)[count - 1]
                assert all(chances[path] > least - 1e-4 for path in paths)  # a near tie may go either way
                for got, expected in zip(network.given, logits, strict=True):
                    assert (got.view(3, -1, 131)[index] - torch.stack(expected)).abs().max() < TOLERANCE
            verify(runner, requests, drafts)


def mean_lengths(target: Path, prompts: list[list[int]], kind: str, path: Path, shapes: list[Shape]) -> list[float]:
    """Mean accepted lengths with each shape of drafts; what comes out is always what comes out without."""
    expected = plain_tokens(target, prompts, 24)
    means = []
    for shape in shapes:
        with ModelRunner(target, num_kv_blocks=512, block_size=4) as runner:
            proposer, requests = drafting(
                runner, load_draft(kind, path, runner), prompts, params={"ignore_eos": True}, num_steps=3, **shape
            )
            lengths = drafted_tokens(runner, proposer, requests, 24, shape.get("num_draft_tokens", 3))
            assert [request.output_token_ids[:24] for request in requests] == expected
            means.append(sum(lengths) / len(lengths))
    return means


def test_the_target_drafts_trees_for_itself(tmp_path: Path) -> None:
    target = make_qwen3_moe_checkpoint(tmp_path)
    chain, tree = mean_lengths(target, PROMPTS, "draft_model", target, [{}, {"topk": 3, "num_draft_tokens": 21}])
    assert chain == 4
    assert tree > 3.5  # the path of best tokens is not always among the most likely ones


@pytest.mark.wide
def test_trees_of_the_trained_head_accept_more_than_chains() -> None:
    text = AutoTokenizer.from_pretrained(TINY_MOE)(Path(__file__).read_text()).input_ids
    prompts = [text[start : start + 100] for start in range(0, 700, 100)]
    chain, tree = mean_lengths(TINY_MOE, prompts, "eagle", TINY_HEAD, [{}, {"topk": 3, "num_draft_tokens": 8}])
    assert tree > chain + 0.1
    assert chain > 1.8


def test_fewer_nodes_than_the_tree_has(tmp_path: Path) -> None:
    target = make_qwen3_moe_checkpoint(tmp_path / "target")
    make_head(tmp_path / "head")
    with ModelRunner(target, num_kv_blocks=128, block_size=4) as runner:
        network = load_draft("eagle", tmp_path / "head", runner)
        proposer = make_proposer(runner, network, num_steps=3, topk=2, num_draft_tokens=7)
        assert proposer.num_places == 7
        assert make_proposer(runner, network, num_steps=4, topk=4, num_draft_tokens=5).num_places == 12
        runner.set_observer(proposer)
        requests = admitted(runner, PROMPTS)
        prefill(runner, requests)
        for request, draft, count in zip(requests, proposer.propose(requests, [7, 4, 0]), (7, 4, 0), strict=True):
            assert len(draft.tokens) == count
            check_parents(request.request_id, draft.parents or (), count)


@given(
    tree=st.lists(st.tuples(st.integers(0, 20), st.sampled_from([0.0, -0.5, -1.0])), min_size=1, max_size=12),
    count=st.integers(1, 12),
)
def test_no_node_is_kept_without_its_parent(tree: list[tuple[int, float]], count: int) -> None:
    parents = [(choice % (node + 1)) - 1 for node, (choice, _) in enumerate(tree)]
    chances: list[float] = []
    for parent, (_, own) in zip(parents, tree, strict=True):
        chances.append((chances[parent] if parent >= 0 else 0.0) + own)  # often as likely as its parent
    count = min(count, len(tree))
    numbers = torch.arange(len(tree))[None]
    ((kept, places),) = select_nodes(torch.tensor([chances]), numbers, torch.tensor([parents]), count=count).tolist()
    assert len(set(kept)) == count
    assert min(chances[node] for node in kept) >= max(
        (chance for node, chance in enumerate(chances) if node not in kept), default=-99.0
    )
    check_parents("tree", places, count)
    for node, place in zip(kept, places, strict=True):
        assert parents[node] == (kept[place - 1] if place else -1)
