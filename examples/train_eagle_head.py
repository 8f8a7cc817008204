"""Train the EAGLE-style draft head for `examples/models/tiny-moe`: a fully connected layer and one decoder layer.

The head predicts the model's next tokens from the model's hidden states. At position `t` it takes the model's hidden
state of token `t` and the embedding of token `t + 1`, and estimates the hidden state of token `t + 1`. The model's
output layer turns the estimate into the next draft. For the draft after that the head takes its own estimate in place
of the hidden state. So it is trained on its own estimates, too:

    pass 1    the model's hidden states                     keys of all earlier positions, from pass 1
    pass 2    the estimates of pass 1, shifted by one       keys of pass 1, except the last one, from pass 2
    pass 3    the estimates of pass 2, shifted by one       keys of pass 1, except the last two, from passes 2 and 3

The loss of a pass is the smooth L1 distance between estimate and hidden state, plus the cross-entropy between the
output layer's distributions for the two. Half of the training text is source text (`train_tiny_moe.py` says which, and
which files are held out). The other half is the model's own greedy continuations of it, as the head will see in use.

    python examples/train_eagle_head.py                        # the committed head, examples/models/tiny-moe-eagle
    python examples/train_eagle_head.py --steps 5 --out /tmp/head  # smoke test

Source: EAGLE (Li and others, 2024); passes on its own estimates as in HASS (Zhang and others, 2024).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from train_tiny_moe import encode, learning_rate, make_parser, parse_args, prepare
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from model_runner import ModelRunner, SamplingParams, generate
from serving.llm import LLM
from serving.workbench.bench.corpus import Corpus, read_corpus
from serving.workbench.bench.generate import completions

MODELS = Path(__file__).resolve().parent / "models"
DEFAULT_TARGET = MODELS / "tiny-moe"
DEFAULT_OUT = MODELS / "tiny-moe-eagle"
DEFAULT_STEPS = 900

SEQUENCE_LENGTH = 256
BATCH_SIZE = 8  # windows per step; half of them source text, half generated
PASSES = 3
PASS_WEIGHT = 0.8  # weight of a pass's loss, relative to the pass before
FEATURE_WEIGHT = 1.0  # weight of the smooth L1 distance, relative to the cross-entropy
WARMUP_STEPS = 50
PEAK_LR = 2e-3
WEIGHT_DECAY = 0.05
MAX_GRAD_NORM = 1.0

INTERMEDIATE_SIZE = 512
GENERATED_SEQUENCES = 1536
PROMPT_LENGTH = 64

NUM_DRAFTS = 3
MEASURED_PROMPTS = 64  # each twice as long as PROMPT_LENGTH
MEASURED_TOKENS = 128


AS_IN_TARGET = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
AS_IN_TARGET += ("rms_norm_eps", "rope_parameters", "max_position_embeddings")


def head_config(target: Any, intermediate_size: int = INTERMEDIATE_SIZE) -> dict[str, Any]:
    """The head's `config.json`, for a target model with this config."""
    return {
        "architectures": ["EagleQwen3ForCausalLM"],
        "attention_bias": False,
        "dtype": "float16",
        "hidden_act": "silu",
        "intermediate_size": intermediate_size,
        "model_type": "eagle_qwen3",
        "num_hidden_layers": 1,
        **{name: getattr(target, name) for name in AS_IN_TARGET},
    }


class Head(nn.Module):
    """The head, for training: plain torch over whole windows, one pass after the other.

    Its parameters have the names of the checkpoint's tensors, without `model.` and `.weight`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        hidden, heads, kv_heads, dim, intermediate = (config[name] for name in sizes)
        shapes = {
            "fc": (hidden, 2 * hidden),
            "layers.0.input_layernorm": (hidden,),
            "layers.0.self_attn.q_proj": (heads * dim, hidden),
            "layers.0.self_attn.k_proj": (kv_heads * dim, hidden),
            "layers.0.self_attn.v_proj": (kv_heads * dim, hidden),
            "layers.0.self_attn.o_proj": (hidden, heads * dim),
            "layers.0.self_attn.q_norm": (dim,),
            "layers.0.self_attn.k_norm": (dim,),
            "layers.0.post_attention_layernorm": (hidden,),
            "layers.0.mlp.gate_proj": (intermediate, hidden),
            "layers.0.mlp.up_proj": (intermediate, hidden),
            "layers.0.mlp.down_proj": (hidden, intermediate),
            "norm": (hidden,),
        }
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): self._initial(shape) for name, shape in shapes.items()}
        )

    @staticmethod
    def _initial(shape: tuple[int, ...]) -> nn.Parameter:
        return nn.Parameter(torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.5 * shape[1] ** -0.5)

    def weight(self, name: str) -> Tensor:
        """A parameter, by its name in the checkpoint."""
        return self.weights[name.replace(".", "/")]

    def forward(self, embeddings: Tensor, features: Tensor, num_passes: int) -> list[Tensor]:
        """The estimates of all passes, each `[batch, places, hidden]`; place `t` estimates the features of `t + 1`.

        Args:
            embeddings: `[batch, places, hidden]`; place `t` has the embedding of token `t + 1`.
            features: the same shape, the target's hidden states at place `t`.
            num_passes: number of passes. The first `i` places of pass `i + 1` are undefined.
        """
        places = torch.arange(features.shape[1])
        distance = places[:, None] - places
        rotation = self._rotation(places)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        estimates: list[Tensor] = []
        for number in range(num_passes):
            x = F.linear(torch.cat((embeddings, features), dim=-1), self.weight("fc"))
            q, k, v = self._heads(self._norm(x, "layers.0.input_layernorm"), rotation)
            keys.append(k)
            values.append(v)
            seen = [distance >= number, *(distance == number - own for own in range(1, number + 1))]
            attended = F.scaled_dot_product_attention(
                q, torch.cat(keys, dim=2), torch.cat(values, dim=2), torch.cat(seen, dim=1)
            )
            x = x + F.linear(attended.transpose(1, 2).flatten(2), self.weight("layers.0.self_attn.o_proj"))
            estimates.append(self._norm(x + self._mlp(self._norm(x, "layers.0.post_attention_layernorm")), "norm"))
            features = torch.cat((features[:, :1], estimates[-1][:, :-1]), dim=1)
        return estimates

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight(name), self.config["rms_norm_eps"])

    def _rotation(self, places: Tensor) -> tuple[Tensor, Tensor]:
        half = self.config["head_dim"] // 2
        angles = places[:, None] * self.config["rope_parameters"]["rope_theta"] ** (-torch.arange(half) / half)
        return torch.cat((angles, angles), dim=-1).cos(), torch.cat((-angles, angles), dim=-1).sin()

    def _heads(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each `[batch, heads, places, head_dim]`; keys and values are repeated per head."""
        cos, sin = rotation
        dim = self.config["head_dim"]
        heads = []
        for part in ("q", "k", "v"):
            y = F.linear(x, self.weight(f"layers.0.self_attn.{part}_proj"))
            y = y.unflatten(-1, (-1, dim)).transpose(1, 2)
            if part != "v":
                y = self._norm(y, f"layers.0.self_attn.{part}_norm")
                y = y * cos + y.roll(dim // 2, dims=-1) * sin
            heads.append(y)
        groups = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        return heads[0], heads[1].repeat_interleave(groups, dim=1), heads[2].repeat_interleave(groups, dim=1)

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = (F.linear(x, self.weight(f"layers.0.mlp.{part}_proj")) for part in ("gate", "up"))
        return F.linear(F.silu(gate) * up, self.weight("layers.0.mlp.down_proj"))


@dataclass(frozen=True)
class Target:
    """The model that the head drafts for, with the layers that the head shares."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerFast
    embeddings: Tensor
    output: Tensor

    @classmethod
    def load(cls, path: Path) -> Target:
        """Load the checkpoint in fp32, frozen."""
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
        tokenizer = AutoTokenizer.from_pretrained(path)
        return cls(model, tokenizer, model.get_input_embeddings().weight, model.get_output_embeddings().weight)

    @torch.no_grad()
    def features(self, windows: Tensor) -> Tensor:
        """Normalised hidden states, the output layer's input, of windows of ids `[batch, length]`."""
        hidden: Tensor = self.model.model(input_ids=windows, use_cache=False).last_hidden_state
        return hidden


def draw_windows(stream: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows of a stream at random places, `[count, length]`."""
    starts = torch.randint(len(stream) - length, (count, 1), generator=generator)
    return stream[starts + torch.arange(length)]


def held_out_prompts(tokenizer: PreTrainedTokenizerFast, corpus: Corpus, seed: int) -> Tensor:
    """Pieces of files that neither the model nor the head was trained on, `[MEASURED_PROMPTS, length]`."""
    generator = torch.Generator().manual_seed(seed)
    return draw_windows(encode(tokenizer, corpus.held_out), MEASURED_PROMPTS, 2 * PROMPT_LENGTH, generator)


def generate_windows(path: Path, stream: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Pieces of `stream`, each with the target's greedy continuation: `[count, SEQUENCE_LENGTH]`."""
    prompts = draw_windows(stream, count, PROMPT_LENGTH, generator)
    params = SamplingParams(max_tokens=SEQUENCE_LENGTH - PROMPT_LENGTH, ignore_eos=True)
    with ModelRunner(path) as runner:
        outputs = generate(runner, prompts.tolist(), params)
    return torch.cat((prompts, torch.tensor([output.token_ids for output in outputs])), dim=1)


def losses(head: Head, target: Target, windows: Tensor) -> tuple[Tensor, list[float]]:
    """The loss of a batch of windows `[batch, length]`, and per pass the share of top tokens equal to the target's."""
    features = target.features(windows)
    wanted = features[:, 1:]
    logits = F.linear(wanted, target.output)
    probabilities, best = logits.softmax(dim=-1), logits.argmax(dim=-1)
    total, agreement, weight = torch.zeros(()), [], 1.0
    estimates = head(F.embedding(windows[:, 1:], target.embeddings), features[:, :-1], PASSES)
    for number, estimate in enumerate(estimates):
        estimate, valid = estimate[:, number:], slice(number, None)
        guessed = F.linear(estimate, target.output)
        entropy = F.cross_entropy(guessed.flatten(0, 1), probabilities[:, valid].flatten(0, 1))
        total = total + weight * (entropy + FEATURE_WEIGHT * F.smooth_l1_loss(estimate, wanted[:, valid]))
        agreement.append((guessed.argmax(dim=-1) == best[:, valid]).float().mean().item())
        weight *= PASS_WEIGHT
    return total, agreement


def train(head: Head, target: Target, stream: Tensor, generated: Tensor, steps: int, seed: int) -> None:
    """Trains in place."""
    generator = torch.Generator().manual_seed(seed)
    parameters = list(head.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True)
    with tqdm(total=steps, unit="step", desc="training", mininterval=5) as bar:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, WARMUP_STEPS, PEAK_LR)
            own = torch.randint(len(generated), (BATCH_SIZE // 2,), generator=generator)
            windows = torch.cat(
                (draw_windows(stream, BATCH_SIZE - BATCH_SIZE // 2, SEQUENCE_LENGTH, generator), generated[own])
            )
            loss, agreement = losses(head, target, windows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            shown = "/".join(f"{share:.2f}" for share in agreement)
            bar.set_postfix(loss=f"{loss.item():.3f}", agreement=shown, refresh=False)
            bar.update()


def save(head: Head, out: Path) -> None:
    """Writes `config.json` and `model.safetensors` (fp16)."""
    tensors = {
        f"model.{name.replace('/', '.')}.weight": parameter.detach().to(torch.float16).contiguous()
        for name, parameter in head.weights.items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(head.config, indent=2, sort_keys=True)
    (out / "config.json").write_text(text + "\n", encoding="utf-8")


def measure(target_path: Path, head_path: Path, prompts: Tensor) -> str:
    """Continues every prompt with drafts of the head, as a server does; returns how many drafts were accepted, in
    words."""
    asked = {"speculative_draft_model_path": head_path, "speculative_num_steps": NUM_DRAFTS}
    with LLM(target_path, speculative_algorithm="eagle", max_num_seqs=len(prompts), **asked) as llm:
        completions(llm, prompts.tolist(), MEASURED_TOKENS)
        verify_steps, right = llm.statistics[0].num_drafts, llm.statistics[0].accepted_per_position
    return (
        f"held-out source text, greedy, {NUM_DRAFTS} drafts: mean accepted length {1 + sum(right) / verify_steps:.2f} "
        f"(accepted drafts + 1) over {verify_steps} verify steps of {len(prompts)} prompts; accepted per place: "
        + ", ".join(f"{count / verify_steps:.1%}" for count in right)
    )


def run(args: argparse.Namespace) -> None:
    """Trains, saves to `args.out` and prints how well the saved head drafts."""
    prepare(args)
    target_path, out, steps, seed = args.target, args.out, args.steps, args.seed
    target = Target.load(target_path)
    corpus = read_corpus(seed)
    stream = encode(target.tokenizer, corpus.train[: 8 * steps])  # a smoke test need not read all of it
    generator = torch.Generator().manual_seed(seed)
    generated = generate_windows(target_path, stream, min(GENERATED_SEQUENCES, 8 * steps), generator)
    print(f"generated {generated.numel():,} tokens after {time.monotonic() - args.started:.0f} s")
    head = Head(head_config(target.model.config))
    with torch.no_grad():  # both halves of the input start with equal magnitude
        loudness = target.features(generated[:4]).square().mean() / target.embeddings.square().mean()
        head.weight("fc")[:, : head.config["hidden_size"]] *= loudness.sqrt()
    train(head, target, stream, generated, steps, seed)
    save(head, out)
    size = (out / "model.safetensors").stat().st_size
    print(f"wrote {out} ({size / 1e6:.2f} MB) in {(time.monotonic() - args.started) / 60:.1f} min")
    print(measure(target_path, out, held_out_prompts(target.tokenizer, corpus, seed)[: 8 * steps]))


def main() -> int:
    parser = make_parser(
        "Train the EAGLE-style draft head of examples/models/tiny-moe. No downloads; under 15 minutes on 2 CPU cores.",
        DEFAULT_STEPS,
    )
    parser.add_argument("--target", type=Path, default=DEFAULT_TARGET, metavar="DIR", help="the model to draft for")
    parser.add_argument("--measure", action="store_true", help="do not train; measure the head that is in --out")
    args = parse_args(parser, DEFAULT_OUT)
    if args.measure:
        tokenizer = AutoTokenizer.from_pretrained(args.target)
        print(measure(args.target, args.out, held_out_prompts(tokenizer, read_corpus(args.seed), args.seed)))
    else:
        run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
