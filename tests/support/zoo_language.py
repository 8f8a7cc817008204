"""The zoo's language models: encoders, decoders with the caches that they return, encoder-decoders."""

from __future__ import annotations

from typing import Any

import torch
from zoo_entry import (
    SEQUENCE,
    Call,
    Entry,
    Outcome,
    given,
    growing,
    left_padded_tokens,
    of_family,
    one_of,
    padded_tokens,
    pretrained,
    tiny,
    token_ids,
    tokens,
)

from ubatch import DeclineReason as Why

SQUEEZED = ("q_groups", "k_groups", "v_groups", "post_attention_groups", "intermediate_groups", "output_groups")
DROPS_OUT = "dropout_in_training"
NOTES_LENGTH = one_of("overlaps", Why.MODULE_KEEPS_STATE)
"""It notes the length of the sequence in an attribute."""
DECODED = 3
"""Tokens of a decoder's row, where an encoder reads `SEQUENCE`."""


def encoded_and_decoded(batch: int) -> Call:
    return given(**padded_tokens(batch).kwargs, decoder_input_ids=token_ids(batch, DECODED))


def labelled(batch: int) -> Call:
    ids = token_ids(batch)
    return given(input_ids=ids, labels=ids)


def documents(batch: int) -> Call:
    """Words with the boxes on the page where they stand."""
    corners = torch.randint(0, 400, (batch, SEQUENCE, 2))
    return given(input_ids=token_ids(batch), bbox=torch.cat([corners, corners + 100], -1))


def with_memory(batch: int) -> Call:
    """XLNet's `mems`, one of `[length, batch, hidden]` per layer."""
    return given(input_ids=token_ids(batch), mems=[torch.randn(3, batch, 16) for _ in range(2)])


def embedded(batch: int) -> Call:
    return given(inputs_embeds=torch.randn(batch, SEQUENCE, 16), position_ids=torch.arange(SEQUENCE)[None])


def square_mask(batch: int) -> Call:
    """A mask for all rows, `[1, 1, S, S]`."""
    mask = torch.ones(SEQUENCE, SEQUENCE).tril().log()[None, None]
    return given(input_ids=token_ids(batch), attention_mask=mask)


_encoding, _decoding = of_family("encoder"), of_family("decoder")


def _encoder(
    kind: str, outcome: Outcome = "overlaps", arguments: Any = padded_tokens, name: str | None = None, **config: Any
) -> Entry:
    return _encoding(name or kind, pretrained(kind, **config), arguments, outcome)


def _bert(kind: str, arguments: Any = padded_tokens, **more: Any) -> Entry:
    return _encoder(kind, arguments=arguments, **{**tiny.BASE, **more})


def _decoder(
    kind: str, base: dict[str, Any], outcome: Outcome = "overlaps", name: str | None = None, **more: Any
) -> Entry:
    arguments = more.pop("arguments", left_padded_tokens)
    return _decoding(name or kind, pretrained(kind, **{**base, **more}), arguments, outcome)


def _pair(kind: str, base: dict[str, Any]) -> Entry:
    collides = (DECODED, "decoder's length")
    return Entry(kind, "encoder-decoder", pretrained(kind, **base), encoded_and_decoded, collides=collides)


ENTRIES = [
    _bert("BertModel"),
    _bert("BertForSequenceClassification", num_labels=3),
    _bert("RobertaModel"),
    _bert("AlbertModel", embedding_size=8),
    _encoder("DistilBertModel", **tiny.WORDS, dim=16, hidden_dim=32, n_layers=2, n_heads=4, max_position_embeddings=32),
    _bert("ElectraForTokenClassification", embedding_size=8),
    _bert("DebertaV2Model", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _bert(
        "ModernBertModel",
        global_attn_every_n_layers=2,
        local_attention=4,
        **tiny.NO_ENDS,
        cls_token_id=1,
        sep_token_id=2,
    ),
    _bert("MPNetModel"),
    _bert("FNetModel", arguments=tokens),
    _bert("LongformerModel", attention_window=4, max_position_embeddings=64),
    _bert("NystromformerModel", num_landmarks=SEQUENCE, segment_means_seq_len=SEQUENCE),
    _bert("SqueezeBertModel", embedding_size=16, **dict.fromkeys(SQUEEZED, 1)),
    _bert("LayoutLMModel", arguments=documents, max_2d_position_embeddings=512),
    _encoder(
        "FunnelModel",
        NOTES_LENGTH,
        **tiny.WORDS,
        d_model=16,
        **tiny.HEADS,
        d_head=4,
        block_sizes=[1, 1],
        num_decoder_layers=1,
    ),
    _encoder("XLNetModel", **tiny.XLNET),
    _encoding(
        "XLNetModel with mems",
        pretrained("XLNetModel", **tiny.XLNET),
        with_memory,
        Why.LANE_FAILED,
        collides=(3, "length of the memory"),
    ),
    _encoding(
        "ReformerModel, LSH attention",
        pretrained("ReformerModel", **tiny.REFORMER),
        lambda batch: given(input_ids=token_ids(batch, 8)),
        "draws_random",
        collides=(8, "sequence"),
    ),
    Entry(
        "BertForMaskedLM with labels",
        "labels",
        pretrained("BertForMaskedLM", **tiny.BASE),
        labelled,
        Why.ZERO_DIM_OUTPUT,
    ),
    Entry("BertModel in training", "training", growing(pretrained("BertModel", **tiny.BASE)), padded_tokens, DROPS_OUT),
    _decoder("GPT2LMHeadModel", tiny.GPT),
    _decoder(
        "GPT2Model",
        {**tiny.GPT, "output_attentions": True, "output_hidden_states": True},
        attn_implementation="eager",
        name="GPT2Model, all that there is",
    ),
    _decoder("GPTNeoXForCausalLM", {**tiny.BASE, **tiny.NO_ENDS}),
    _decoder("OPTForCausalLM", {**tiny.BASE, **tiny.NO_ENDS}, ffn_dim=32, word_embed_proj_dim=16),
    _decoder("BloomForCausalLM", {**tiny.WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 4, **tiny.NO_ENDS}),
    _decoder("FalconForCausalLM", {**tiny.BASE, **tiny.NO_ENDS}, alibi=False),
    _decoder("MptForCausalLM", {**tiny.WORDS, "d_model": 16, "n_layers": 2, "n_heads": 4, **tiny.NO_ENDS}),
    _decoder("LlamaForCausalLM", tiny.LLAMA),
    _decoder("LlamaModel", tiny.LLAMA, name="LlamaModel, embeddings and positions [1, S]", arguments=embedded),
    _decoder("LlamaModel", tiny.LLAMA, name="LlamaModel, a mask [1, 1, S, S]", arguments=square_mask),
    _decoder("MistralForCausalLM", tiny.LLAMA, sliding_window=4),
    _decoder("Qwen2ForCausalLM", tiny.LLAMA),
    _decoder("Qwen3ForCausalLM", tiny.LLAMA, head_dim=4),
    _decoder("GemmaForCausalLM", tiny.LLAMA, head_dim=4),
    _decoder("Gemma2ForCausalLM", tiny.LLAMA, head_dim=4, sliding_window=4),
    _decoder("PhiForCausalLM", tiny.LLAMA),
    _decoder("Phi3ForCausalLM", tiny.LLAMA),
    _decoder("CohereForCausalLM", tiny.LLAMA),
    _decoder("Olmo2ForCausalLM", tiny.LLAMA),
    _decoder("Qwen3MoeForCausalLM", tiny.MOE, head_dim=4),
    _decoder("Qwen2MoeForCausalLM", tiny.MOE, shared_expert_intermediate_size=8),
    _decoder("MixtralForCausalLM", tiny.MOE),
    _decoder(
        "MixtralForCausalLM",
        tiny.MOE,
        Why.ZERO_DIM_OUTPUT,
        "MixtralForCausalLM with the router's loss",
        output_router_logits=True,
        arguments=tokens,
    ),
    _decoder("OlmoeForCausalLM", tiny.MOE),
    _decoder("GraniteMoeForCausalLM", tiny.MOE),
    _decoder("Glm4MoeForCausalLM", {**tiny.MOE, **tiny.ROUTED}, n_group=1, head_dim=4),
    _decoder("GptOssForCausalLM", tiny.MOE, head_dim=4, sliding_window=4),
    _decoder("DeepseekV2ForCausalLM", tiny.LATENT, topk_method="group_limited_greedy"),
    _decoder("DeepseekV3ForCausalLM", tiny.LATENT),
    _decoding(
        "LlamaForCausalLM in bf16",
        lambda: pretrained("LlamaForCausalLM", **tiny.LLAMA)().bfloat16(),
        left_padded_tokens,
        acts=4,
    ),
    _decoder("LlamaForCausalLM", tiny.LLAMA, Why.ZERO_DIM_OUTPUT, "LlamaForCausalLM with labels", arguments=labelled),
    _pair("T5Model", tiny.T5),
    _pair("T5ForConditionalGeneration", tiny.T5),
    _pair("BartModel", tiny.SEQ2SEQ),
    _pair("MarianMTModel", tiny.SEQ2SEQ),
]
