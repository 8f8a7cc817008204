"""A small checkpoint whose tokenizer is of SentencePiece's kind, as in Llama 2 and Mixtral.

Spaces belong to tokens, rare characters are byte tokens, and the decoder strips the space of a text's first token.
"""

from __future__ import annotations

import json
from pathlib import Path

from checkpoints import make_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

__all__ = ["make_sentencepiece_checkpoint", "sentencepiece_tokenizer"]

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = [
    "The cat sat on the mat.",
    "Once upon a time there was a small house.",
    "A house on the hill, and a cat in it.",
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{% if not loop.last %}</s>{% endif %}"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer; a text begins with `<s>`."""
    trained = Tokenizer(models.BPE(unk_token=UNKNOWN))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = [UNKNOWN, BEGIN, END, *BYTES]
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    written = json.loads(trained.to_str())
    written["model"]["byte_fallback"] = True
    written["added_tokens"] = written["added_tokens"][: -len(BYTES)]  # bytes are tokens like others
    tokenizer = Tokenizer.from_str(json.dumps(written))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    begin = (BEGIN, tokenizer.token_to_id(BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[begin])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, bos_token=BEGIN, eos_token=END, chat_template=TEMPLATE
    )


def make_sentencepiece_checkpoint(path: Path) -> Path:
    """A random Llama at `path`, with this tokenizer."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.save_pretrained(path)
    return make_checkpoint(path, "Llama", vocab_size=len(tokenizer))
