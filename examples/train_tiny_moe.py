"""Train the small Qwen3-MoE checkpoint that the examples and tests load, only on the text of Python's standard library.

The script reads the source text of the standard library it runs on, trains a byte-level BPE tokenizer of 2048 tokens
and a Qwen3-MoE language model of 3.35 M parameters (4 layers, 8 experts, top 2, grouped-query attention) on it, and
writes a Hugging Face checkpoint of 7 MB: `config.json`, `model.safetensors` (bf16, one tensor per expert and
projection), `tokenizer.json`, `tokenizer_config.json`, `generation_config.json`. Nothing is downloaded.

    python examples/train_tiny_moe.py                            # the committed checkpoint, examples/models/tiny-moe
    python examples/train_tiny_moe.py --steps 5 --out /tmp/tiny  # smoke test

The default run took 13.4 minutes on 2 CPU cores that other jobs used too, and ended at a loss of 2.40 on training text
and 2.92 on held-out files (nats per token over 256-token windows, weights already rounded to bf16; measured with
Python 3.11, torch 2.13, transformers 5.23).

The number of steps is fixed, never a time limit, and torch runs deterministic kernels: the same seed, thread count,
Python and library versions give the same bytes. Another Python version has another standard library, so another model.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func
from transformers.utils import logging as transformers_logging

from serving.workbench.bench.corpus import CorpusMissing, read_corpus

DEFAULT_OUT = Path(__file__).resolve().parent / "models" / "tiny-moe"
DEFAULT_STEPS = 2500
EXPECTED_MINUTES = 20  # a longer estimate prints a warning

END_OF_TEXT = "<|endoftext|>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"

VOCAB_SIZE = 2048
BATCH_SIZE = 8
SEQUENCE_LENGTH = 256
WARMUP_STEPS = 100
PEAK_LR = 3e-3
FINAL_LR_FRACTION = 0.05
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
EVALUATION_WINDOWS = 256


def byte_level_bpe(texts: list[str], vocab_size: int, special_tokens: list[str]) -> Tokenizer:
    """Trains a byte-level BPE tokenizer; the special tokens have the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Trains the tokenizer; its only special token, id 0, begins, ends and pads."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(texts, VOCAB_SIZE, [END_OF_TEXT]),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Joins all texts, each closed by the end-of-text token, into one stream of ids, int64 `[num_tokens]`."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return torch.tensor([id for encoding in encodings for id in (*encoding.ids, tokenizer.eos_token_id)])


def build_model(end_of_text_id: int, **changes: Any) -> Qwen3MoeForCausalLM:
    """Builds the untrained model in fp32, with the config that is saved, of which `changes` replace entries."""
    entries = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 192,
        "intermediate_size": 384,  # of dense layers; the model has none
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.01,
        "bos_token_id": end_of_text_id,
        "eos_token_id": end_of_text_id,
        "pad_token_id": end_of_text_id,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**entries, **changes}))
    # The fastest of transformers' implementations for training on a CPU ("eager" is 10% slower, "batched_mm" 40 times).
    model.set_experts_implementation("grouped_mm")
    model.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=end_of_text_id, eos_token_id=end_of_text_id, pad_token_id=end_of_text_id
    )
    return model


def next_token_loss(model: Qwen3MoeForCausalLM, windows: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Runs windows of ids, `[batch, length + 1]`; returns the mean loss in nats and each layer's router logits."""
    output = model(input_ids=windows[:, :-1], use_cache=False, output_router_logits=True)
    loss = F.cross_entropy(output.logits.flatten(0, 1), windows[:, 1:].flatten())
    return loss, output.router_logits


def balance_loss(model: Qwen3MoeForCausalLM, router_logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean over layers of the load-balancing loss. transformers pools it over layers, so that one layer's overloaded
    expert can be offset by another layer's idle one."""
    config = model.config
    per_layer = [
        load_balancing_loss_func((logits,), config.num_experts, config.num_experts_per_tok) for logits in router_logits
    ]
    return torch.stack(per_layer).mean()


def learning_rate(step: int, steps: int, warmup_steps: int = WARMUP_STEPS, peak: float = PEAK_LR) -> float:
    """Linear warm-up, then a cosine from `peak` down to a fraction of it at the last step."""
    warmup = min(warmup_steps, max(1, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (FINAL_LR_FRACTION + (1.0 - FINAL_LR_FRACTION) * cosine)


def train(model: Qwen3MoeForCausalLM, stream: torch.Tensor, steps: int, seed: int) -> None:
    """Trains in place on windows drawn at random from `stream`, int64 `[num_tokens]`."""
    generator = torch.Generator().manual_seed(seed)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=PEAK_LR,
        betas=(0.9, 0.95),
        fused=True,
    )
    offsets = torch.arange(SEQUENCE_LENGTH + 1)
    estimate_at = min(20, steps)
    model.train()
    started = time.monotonic()
    with tqdm(total=steps, unit="step", desc="training") as bar:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            starts = torch.randint(len(stream) - SEQUENCE_LENGTH, (BATCH_SIZE, 1), generator=generator)
            loss, router_logits = next_token_loss(model, stream[starts + offsets])
            (loss + model.config.router_aux_loss_coef * balance_loss(model, router_logits)).backward()
            torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            bar.update()
            if step + 1 == estimate_at:
                minutes = (time.monotonic() - started) / estimate_at * steps / 60
                warning = f" (expected less than {EXPECTED_MINUTES})" if minutes > EXPECTED_MINUTES else ""
                bar.write(f"estimated training time: {minutes:.1f} min{warning}", file=sys.stderr)


@torch.inference_mode()
def evaluate(model: Qwen3MoeForCausalLM, stream: torch.Tensor, most_windows: int) -> tuple[float, float]:
    """Mean next-token loss in nats over evenly spaced windows of `stream`, int64 `[num_tokens]`, and the largest share
    of the tokens that any expert of a layer received."""
    last_start = len(stream) - SEQUENCE_LENGTH - 1
    starts = torch.linspace(0, last_start, min(most_windows, len(stream) // SEQUENCE_LENGTH)).long()
    windows = stream[starts[:, None] + torch.arange(SEQUENCE_LENGTH + 1)]
    top_k, num_experts = model.config.num_experts_per_tok, model.config.num_experts
    counts = torch.zeros(model.config.num_hidden_layers, num_experts, dtype=torch.int64)
    total = 0.0
    model.eval()
    for batch in windows.split(BATCH_SIZE):
        loss, router_logits = next_token_loss(model, batch)
        total += loss.item() * len(batch)
        for layer, logits in enumerate(router_logits):
            counts[layer] += logits.topk(top_k).indices.flatten().bincount(minlength=num_experts)
    shares = counts / (len(windows) * SEQUENCE_LENGTH)
    return total / len(windows), shares.max().item()


def save_checkpoint(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the Hugging Face checkpoint; `model` is in bf16."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)
    # transformers 5 stores num_local_experts; published Qwen3-MoE checkpoints, and their readers, use num_experts.
    config_path = out / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def prepare(args: argparse.Namespace) -> None:
    """Makes the output folder, and the run reproducible; starts its clock."""
    args.started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)  # fail now if it is not writable, not after 15 minutes
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    transformers_logging.disable_progress_bar()


def train_and_save(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    streams: tuple[torch.Tensor, torch.Tensor],
    args: argparse.Namespace,
    most_windows: int,
) -> None:
    """Trains on the first of two streams, saves to `args.out` and prints the losses of the saved weights on both."""
    train(model, streams[0], args.steps, args.seed)
    model.to(torch.bfloat16)
    save_checkpoint(model, tokenizer, args.out)
    model.to(torch.float32)  # weights as stored, computed in fp32, which is how the checkpoint is used
    (train_loss, _), (held_out_loss, busiest) = (evaluate(model, each, most_windows) for each in streams)
    size = sum(path.stat().st_size for path in args.out.iterdir() if path.is_file())
    print(
        f"loss: train {train_loss:.3f}, held out {held_out_loss:.3f} nats per token\n"
        f"busiest expert of any layer: {busiest:.0%} of the held-out tokens "
        f"(balanced: {model.config.num_experts_per_tok / model.config.num_experts:.0%})\n"
        f"wrote {args.out} ({size / 1e6:.2f} MB) in {(time.monotonic() - args.started) / 60:.1f} min"
    )


def run(args: argparse.Namespace) -> None:
    prepare(args)
    steps = args.steps
    corpus = read_corpus(args.seed)
    texts = corpus.train[: 8 * steps]  # a smoke test need not read all of it
    tokenizer = train_tokenizer(texts)
    train_stream, held_out_stream = encode(tokenizer, texts), encode(tokenizer, corpus.held_out)
    model = build_model(tokenizer.eos_token_id)
    print(
        f"corpus: {len(texts)} files, {len(train_stream):,} tokens; held out: {len(corpus.held_out)} files, "
        f"{len(held_out_stream):,} tokens\n"
        f"model: {model.num_parameters():,} parameters; {steps} steps of {BATCH_SIZE} x {SEQUENCE_LENGTH} tokens"
    )
    train_and_save(model, tokenizer, (train_stream, held_out_stream), args, min(EVALUATION_WINDOWS, 8 * steps))


def make_parser(description: str, steps: int) -> argparse.ArgumentParser:
    """The flags of a training script, which takes `steps` steps by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write; the committed files if not given")
    parser.add_argument("--steps", type=int, default=steps, metavar="N", help="optimizer steps; others need --out")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seeds the file split, weights and batches")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="the weights' last bits depend on them")
    return parser


def parse_args(parser: argparse.ArgumentParser, committed: Path) -> argparse.Namespace:
    """The options; refuses other numbers of steps for the committed files, in `committed`."""
    args = parser.parse_args()
    for name in ("steps", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is not positive")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed {args.seed} is out of range: give 0 to 2**63 - 1")
    if args.out is None and args.steps != parser.get_default("steps"):
        parser.error(f"--steps {args.steps} would overwrite the committed files in {committed}: give --out DIR")
    args.out = args.out or committed
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out} is a file: give a directory")
    return args


def run_script(parser: argparse.ArgumentParser, committed: Path, run: Callable[[argparse.Namespace], None]) -> int:
    """Reads the flags and runs the script; returns its exit status."""
    args = parse_args(parser, committed)
    try:
        run(args)
    except (CorpusMissing, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    parser = make_parser(
        "Train a tiny Qwen3-MoE on the Python standard library's source and save it as a Hugging Face checkpoint. No "
        "downloads; under 20 minutes on 2 CPU cores.",
        DEFAULT_STEPS,
    )
    return run_script(parser, DEFAULT_OUT, run)


if __name__ == "__main__":
    sys.exit(main())
