"""The zoo's models of transformers in one call: languages, vision, sound. `zoo_states` has those of several calls."""

from typing import Any

import torch
import transformers
from torch import nn
from zoo_entry import (
    CANNOT_MERGE,
    DRAWS_RANDOM,
    KEEPS_STATE,
    LANE_FAILED,
    LOSS,
    OVERLAPS,
    SEQUENCE,
    SIZES,
    Call,
    Entry,
    Outcome,
    given,
    growing,
    left_padded_tokens,
    of_family,
    one_of,
    padded_tokens,
    pixels,
    pretrained,
    token_ids,
    tokens,
)

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
    return _encoder(kind, arguments=arguments, **{**SIZES.base, **more})


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
    _encoder(
        "DistilBertModel", **SIZES.words, dim=16, hidden_dim=32, n_layers=2, n_heads=4, max_position_embeddings=32
    ),
    _bert("ElectraForTokenClassification", embedding_size=8),
    _bert("DebertaV2Model", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _bert(
        "ModernBertModel",
        global_attn_every_n_layers=2,
        local_attention=4,
        **SIZES.no_ends,
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
        **SIZES.words,
        d_model=16,
        **SIZES.heads,
        d_head=4,
        block_sizes=[1, 1],
        num_decoder_layers=1,
    ),
    _encoder("XLNetModel", **SIZES.xlnet),
    _encoding(
        "XLNetModel with mems",
        pretrained("XLNetModel", **SIZES.xlnet),
        with_memory,
        LANE_FAILED,
        collides=(3, "length of the memory"),
    ),
    _encoding(
        "ReformerModel, LSH attention",
        pretrained("ReformerModel", **SIZES.reformer),
        lambda batch: given(input_ids=token_ids(batch, 8)),
        "draws_random",
        collides=(8, "sequence"),
    ),
    Entry("BertForMaskedLM with labels", "labels", pretrained("BertForMaskedLM", **SIZES.base), labelled, LOSS),
    Entry(
        "BertModel in training", "training", growing(pretrained("BertModel", **SIZES.base)), padded_tokens, DROPS_OUT
    ),
    _decoder("GPT2LMHeadModel", SIZES.gpt),
    _decoder(
        "GPT2Model",
        {**SIZES.gpt, "output_attentions": True, "output_hidden_states": True},
        attn_implementation="eager",
        name="GPT2Model, all that there is",
    ),
    _decoder("GPTNeoXForCausalLM", {**SIZES.base, **SIZES.no_ends}),
    _decoder("OPTForCausalLM", {**SIZES.base, **SIZES.no_ends}, ffn_dim=32, word_embed_proj_dim=16),
    _decoder("BloomForCausalLM", {**SIZES.words, "hidden_size": 16, "n_layer": 2, "n_head": 4, **SIZES.no_ends}),
    _decoder("FalconForCausalLM", {**SIZES.base, **SIZES.no_ends}, alibi=False),
    _decoder("MptForCausalLM", {**SIZES.words, "d_model": 16, "n_layers": 2, "n_heads": 4, **SIZES.no_ends}),
    _decoder("LlamaForCausalLM", SIZES.llama),
    _decoder("LlamaModel", SIZES.llama, name="LlamaModel, embeddings and positions [1, S]", arguments=embedded),
    _decoder("LlamaModel", SIZES.llama, name="LlamaModel, a mask [1, 1, S, S]", arguments=square_mask),
    _decoder("MistralForCausalLM", SIZES.llama, sliding_window=4),
    _decoder("Qwen2ForCausalLM", SIZES.llama),
    _decoder("Qwen3ForCausalLM", SIZES.llama, head_dim=4),
    _decoder("GemmaForCausalLM", SIZES.llama, head_dim=4),
    _decoder("Gemma2ForCausalLM", SIZES.llama, head_dim=4, sliding_window=4),
    _decoder("PhiForCausalLM", SIZES.llama),
    _decoder("Phi3ForCausalLM", SIZES.llama),
    _decoder("CohereForCausalLM", SIZES.llama),
    _decoder("Olmo2ForCausalLM", SIZES.llama),
    _decoder("Qwen3MoeForCausalLM", SIZES.moe, head_dim=4),
    _decoder("Qwen2MoeForCausalLM", SIZES.moe, shared_expert_intermediate_size=8),
    _decoder("MixtralForCausalLM", SIZES.moe),
    _decoder(
        "MixtralForCausalLM",
        SIZES.moe,
        LOSS,
        "MixtralForCausalLM with the router's loss",
        output_router_logits=True,
        arguments=tokens,
    ),
    _decoder("OlmoeForCausalLM", SIZES.moe),
    _decoder("GraniteMoeForCausalLM", SIZES.moe),
    _decoder("Glm4MoeForCausalLM", {**SIZES.moe, **SIZES.routed}, n_group=1, head_dim=4),
    _decoder("GptOssForCausalLM", SIZES.moe, head_dim=4, sliding_window=4),
    _decoder("DeepseekV2ForCausalLM", SIZES.latent, topk_method="group_limited_greedy"),
    _decoder("DeepseekV3ForCausalLM", SIZES.latent),
    _decoding(
        "LlamaForCausalLM in bf16",
        lambda: pretrained("LlamaForCausalLM", **SIZES.llama)().bfloat16(),
        left_padded_tokens,
        acts=4,
    ),
    _decoder("LlamaForCausalLM", SIZES.llama, LOSS, "LlamaForCausalLM with labels", arguments=labelled),
    _pair("T5Model", SIZES.t5),
    _pair("T5ForConditionalGeneration", SIZES.t5),
    _pair("BartModel", SIZES.seq2seq),
    _pair("MarianMTModel", SIZES.seq2seq),
]


# --------------------------------------------------------------------------------------- vision, audio and multimodal

ONE_LAYER = {"num_hidden_layers": 1}
FRAMES = (4, "patches")
MATRIX = CANNOT_MERGE
"""Every image against every text."""
PATCHES = 5
"""Four patches of an image and a class token."""


def detr() -> nn.Module:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    sizes = {
        name: SIZES.seq2seq[name]
        for name in SIZES.seq2seq
        if name.startswith(("encoder_", "decoder_")) or name == "d_model"
    }
    config = transformers.DetrConfig(use_timm_backbone=False, backbone_config=backbone, num_queries=4, **sizes)
    return transformers.DetrForObjectDetection(config).eval()


def two_towers(kind: str) -> nn.Module:
    """CLIP and those like it: a text tower, a vision tower, and all pairs of both."""
    model = getattr(transformers, kind)
    text = {**SIZES.base, "max_position_embeddings": 16, "projection_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
    towers = {"text_config": text, "vision_config": {**SIZES.vit, "projection_dim": 8}}
    return model(model.config_class(**towers)).eval()


def llava() -> nn.Module:
    vision = transformers.CLIPVisionConfig(**SIZES.vit, projection_dim=8)
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**SIZES.llama),
        image_token_id=1,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def image_and_text(batch: int) -> Call:
    return given(input_ids=token_ids(batch), pixel_values=torch.randn(batch, 3, 16, 16))


def image_in_text(batch: int) -> Call:
    """Four of the tokens stand for the image."""
    ids = token_ids(batch, 8)
    ids[:, 1:5] = 1
    return given(input_ids=ids, pixel_values=torch.randn(batch, 3, 16, 16))


def frames(batch: int) -> Call:
    return given(pixel_values=torch.randn(batch, 2, 3, 16, 16))


def sound(batch: int) -> Call:
    return given(input_values=torch.randn(batch, 200))


def spectrogram(batch: int) -> Call:
    return given(input_features=torch.randn(batch, 8, 16), decoder_input_ids=token_ids(batch, 3))


_seen = of_family("vision", collides=(3, "channels"))
_multimodal, _heard = of_family("multimodal"), of_family("audio", collides=(8, "channels"))


def _vision(kind: str, **config: Any) -> Entry:
    return _seen(kind, config, pixels())


def _patches(kind: str, outcome: Outcome = OVERLAPS, **config: Any) -> Entry:
    """A transformer over patches."""
    return _seen(kind, {**SIZES.vit, **config}, pixels(), outcome, collides=(PATCHES, "patches"))


ENTRIES += [
    _patches("ViTForImageClassification"),
    _patches("BeitModel"),
    _patches("Dinov2Model"),
    _patches("YolosForObjectDetection", num_detection_tokens=3, image_size=[16, 16]),
    _patches(
        "ViTMAEModel", DRAWS_RANDOM, **{f"decoder_{name}": size for name, size in (SIZES.layers | ONE_LAYER).items()}
    ),
    _patches("CLIPVisionModel"),
    _patches("SiglipVisionModel"),
    _vision("SwinModel", image_size=16, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 4], window_size=2),
    _vision("ConvNextModel", num_channels=3, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    _vision("ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    _vision("PoolFormerModel", hidden_sizes=[8, 16], **SIZES.stages, padding=[1, 1]),
    _vision(
        "SegformerForSemanticSegmentation",
        **SIZES.stages,
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=3,
    ),
    _seen("DetrForObjectDetection", detr, pixels(32), collides=(4, "queries")),
    _seen("TimesformerModel", {**SIZES.vit, "num_frames": 2}, frames, collides=FRAMES),
    _seen("VivitModel", {**SIZES.vit, "num_frames": 2, "tubelet_size": [2, 8, 8]}, frames, collides=FRAMES),
    _multimodal("CLIPModel", lambda: two_towers("CLIPModel"), image_and_text, MATRIX),
    _multimodal("CLIPTextModelWithProjection", {**SIZES.base, "projection_dim": 8, "eos_token_id": 2}, tokens),
    _multimodal("LlavaForConditionalGeneration", llava, image_in_text, collides=(3, "channels")),
    _heard("WhisperForConditionalGeneration", SIZES.whisper, spectrogram, collides=(3, "decoder's length")),
    _heard("Wav2Vec2ForCTC", SIZES.speech, sound),
    _heard("HubertModel", SIZES.speech, sound),
    _heard(
        "ASTModel",
        SIZES.spectra,
        lambda batch: given(input_values=torch.randn(batch, 8, 8)),
        collides=(8, "length"),
    ),
]
