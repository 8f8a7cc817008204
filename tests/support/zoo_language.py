"""The zoo's language models: encoders, decoders with the caches that they return, encoder-decoders."""

from __future__ import annotations

from typing import Any

import torch
from zoo_entry import (
    KEEPS_STATE,
    LANE_FAILED,
    LOSS,
    SEQUENCE,
    VOCABULARY,
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
    token_ids,
    tokens,
)

WORDS: dict[str, Any] = {"vocab_size": VOCABULARY}
BASE: dict[str, Any] = {
    **WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
GPT: dict[str, Any] = {**WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, **NO_ENDS}
LLAMA: dict[str, Any] = {**BASE, **NO_ENDS, "num_key_value_heads": 2}
MOE: dict[str, Any] = {
    **LLAMA,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "n_shared_experts": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT: dict[str, Any] = {
    **LLAMA,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    **ROUTED,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "moe_intermediate_size": 8,
}
SEQ2SEQ: dict[str, Any] = {
    **WORDS,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    **NO_ENDS,
    "forced_eos_token_id": None,
    "init_std": 0.2,
}
T5: dict[str, Any] = {
    **WORDS,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "eos_token_id": None,
}
HEADS: dict[str, Any] = {"n_head": 4, "d_inner": 32}
XLNET: dict[str, Any] = {**WORDS, **HEADS, "d_model": 16, "n_layer": 2, "mem_len": 8}
REFORMER: dict[str, Any] = {
    **WORDS,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "attention_head_size": 8,
    "feed_forward_size": 32,
    "attn_layers": ["lsh"],
    "axial_pos_embds": False,
    "max_position_embeddings": 32,
    "lsh_attn_chunk_length": 4,
    "num_buckets": 2,
    "is_decoder": False,
}
SQUEEZED = ("q_groups", "k_groups", "v_groups", "post_attention_groups", "intermediate_groups", "output_groups")
DROPS_OUT = "dropout_in_training"
NOTES_LENGTH = one_of("overlaps", KEEPS_STATE)
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
    return _encoder(kind, arguments=arguments, **{**BASE, **more})


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
    _encoder("DistilBertModel", **WORDS, dim=16, hidden_dim=32, n_layers=2, n_heads=4, max_position_embeddings=32),
    _bert("ElectraForTokenClassification", embedding_size=8),
    _bert("DebertaV2Model", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _bert(
        "ModernBertModel", global_attn_every_n_layers=2, local_attention=4, **NO_ENDS, cls_token_id=1, sep_token_id=2
    ),
    _bert("MPNetModel"),
    _bert("FNetModel", arguments=tokens),
    _bert("LongformerModel", attention_window=4, max_position_embeddings=64),
    _bert("NystromformerModel", num_landmarks=SEQUENCE, segment_means_seq_len=SEQUENCE),
    _bert("SqueezeBertModel", embedding_size=16, **dict.fromkeys(SQUEEZED, 1)),
    _bert("LayoutLMModel", arguments=documents, max_2d_position_embeddings=512),
    _encoder(
        "FunnelModel", NOTES_LENGTH, **WORDS, d_model=16, **HEADS, d_head=4, block_sizes=[1, 1], num_decoder_layers=1
    ),
    _encoder("XLNetModel", **XLNET),
    _encoding(
        "XLNetModel with mems",
        pretrained("XLNetModel", **XLNET),
        with_memory,
        LANE_FAILED,
        collides=(3, "length of the memory"),
    ),
    _encoding(
        "ReformerModel, LSH attention",
        pretrained("ReformerModel", **REFORMER),
        lambda batch: given(input_ids=token_ids(batch, 8)),
        "draws_random",
        collides=(8, "sequence"),
    ),
    Entry("BertForMaskedLM with labels", "labels", pretrained("BertForMaskedLM", **BASE), labelled, LOSS),
    Entry("BertModel in training", "training", growing(pretrained("BertModel", **BASE)), padded_tokens, DROPS_OUT),
    _decoder("GPT2LMHeadModel", GPT),
    _decoder(
        "GPT2Model",
        {**GPT, "output_attentions": True, "output_hidden_states": True},
        attn_implementation="eager",
        name="GPT2Model, all that there is",
    ),
    _decoder("GPTNeoXForCausalLM", {**BASE, **NO_ENDS}),
    _decoder("OPTForCausalLM", {**BASE, **NO_ENDS}, ffn_dim=32, word_embed_proj_dim=16),
    _decoder("BloomForCausalLM", {**WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 4, **NO_ENDS}),
    _decoder("FalconForCausalLM", {**BASE, **NO_ENDS}, alibi=False),
    _decoder("MptForCausalLM", {**WORDS, "d_model": 16, "n_layers": 2, "n_heads": 4, **NO_ENDS}),
    _decoder("LlamaForCausalLM", LLAMA),
    _decoder("LlamaModel", LLAMA, name="LlamaModel, embeddings and positions [1, S]", arguments=embedded),
    _decoder("LlamaModel", LLAMA, name="LlamaModel, a mask [1, 1, S, S]", arguments=square_mask),
    _decoder("MistralForCausalLM", LLAMA, sliding_window=4),
    _decoder("Qwen2ForCausalLM", LLAMA),
    _decoder("Qwen3ForCausalLM", LLAMA, head_dim=4),
    _decoder("GemmaForCausalLM", LLAMA, head_dim=4),
    _decoder("Gemma2ForCausalLM", LLAMA, head_dim=4, sliding_window=4),
    _decoder("PhiForCausalLM", LLAMA),
    _decoder("Phi3ForCausalLM", LLAMA),
    _decoder("CohereForCausalLM", LLAMA),
    _decoder("Olmo2ForCausalLM", LLAMA),
    _decoder("Qwen3MoeForCausalLM", MOE, head_dim=4),
    _decoder("Qwen2MoeForCausalLM", MOE, shared_expert_intermediate_size=8),
    _decoder("MixtralForCausalLM", MOE),
    _decoder(
        "MixtralForCausalLM",
        MOE,
        LOSS,
        "MixtralForCausalLM with the router's loss",
        output_router_logits=True,
        arguments=tokens,
    ),
    _decoder("OlmoeForCausalLM", MOE),
    _decoder("GraniteMoeForCausalLM", MOE),
    _decoder("Glm4MoeForCausalLM", {**MOE, **ROUTED}, n_group=1, head_dim=4),
    _decoder("GptOssForCausalLM", MOE, head_dim=4, sliding_window=4),
    _decoder("DeepseekV2ForCausalLM", LATENT, topk_method="group_limited_greedy"),
    _decoder("DeepseekV3ForCausalLM", LATENT),
    _decoding(
        "LlamaForCausalLM in bf16",
        lambda: pretrained("LlamaForCausalLM", **LLAMA)().bfloat16(),
        left_padded_tokens,
        acts=4,
    ),
    _decoder("LlamaForCausalLM", LLAMA, LOSS, "LlamaForCausalLM with labels", arguments=labelled),
    _pair("T5Model", T5),
    _pair("T5ForConditionalGeneration", T5),
    _pair("BartModel", SEQ2SEQ),
    _pair("MarianMTModel", SEQ2SEQ),
]
