"""The zoo's vision, audio and multimodal models."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from zoo_entry import OVERLAPS, Call, Entry, Outcome, given, of_family, pixels, tiny, token_ids, tokens

from ubatch import DeclineReason as Why

FRAMES = (4, "patches")
MATRIX = Why.CANNOT_MERGE
"""Every image against every text."""
PATCHES = 5
"""Four patches of an image and a class token."""


def detr() -> nn.Module:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    sizes = {
        name: tiny.SEQ2SEQ[name]
        for name in tiny.SEQ2SEQ
        if name.startswith(("encoder_", "decoder_")) or name == "d_model"
    }
    config = transformers.DetrConfig(use_timm_backbone=False, backbone_config=backbone, num_queries=4, **sizes)
    return transformers.DetrForObjectDetection(config).eval()


def two_towers(kind: str) -> nn.Module:
    """CLIP and those like it: a text tower, a vision tower, and all pairs of both."""
    model = getattr(transformers, kind)
    text = {**tiny.BASE, "max_position_embeddings": 16, "projection_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
    towers = {"text_config": text, "vision_config": {**tiny.VIT, "projection_dim": 8}}
    return model(model.config_class(**towers)).eval()


def llava() -> nn.Module:
    vision = transformers.CLIPVisionConfig(**tiny.VIT, projection_dim=8)
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**tiny.LLAMA),
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
    return _seen(kind, {**tiny.VIT, **config}, pixels(), outcome, collides=(PATCHES, "patches"))


ENTRIES = [
    _patches("ViTForImageClassification"),
    _patches("BeitModel"),
    _patches("Dinov2Model"),
    _patches("YolosForObjectDetection", num_detection_tokens=3, image_size=[16, 16]),
    _patches(
        "ViTMAEModel",
        Why.DRAWS_RANDOM,
        **{f"decoder_{name}": size for name, size in (tiny.LAYERS | tiny.ONE_LAYER).items()},
    ),
    _patches("CLIPVisionModel"),
    _patches("SiglipVisionModel"),
    _vision("SwinModel", image_size=16, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 4], window_size=2),
    _vision("ConvNextModel", num_channels=3, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    _vision("ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    _vision("PoolFormerModel", hidden_sizes=[8, 16], **tiny.STAGES, padding=[1, 1]),
    _vision(
        "SegformerForSemanticSegmentation",
        **tiny.STAGES,
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=3,
    ),
    _seen("DetrForObjectDetection", detr, pixels(32), collides=(4, "queries")),
    _seen("TimesformerModel", {**tiny.VIT, "num_frames": 2}, frames, collides=FRAMES),
    _seen("VivitModel", {**tiny.VIT, "num_frames": 2, "tubelet_size": [2, 8, 8]}, frames, collides=FRAMES),
    _multimodal("CLIPModel", lambda: two_towers("CLIPModel"), image_and_text, MATRIX),
    _multimodal("CLIPTextModelWithProjection", {**tiny.BASE, "projection_dim": 8, "eos_token_id": 2}, tokens),
    _multimodal("LlavaForConditionalGeneration", llava, image_in_text, collides=(3, "channels")),
    _heard("WhisperForConditionalGeneration", tiny.WHISPER, spectrogram, collides=(3, "decoder's length")),
    _heard("Wav2Vec2ForCTC", tiny.SPEECH, sound),
    _heard("HubertModel", tiny.SPEECH, sound),
    _heard(
        "ASTModel",
        {**tiny.LAYERS, "patch_size": 4, "max_length": 8, "num_mel_bins": 8, **tiny.STRIDES},
        lambda batch: given(input_values=torch.randn(batch, 8, 8)),
        collides=(8, "length"),
    ),
]
