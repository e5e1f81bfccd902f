"""Transformers and modern vision networks from Hugging Face's model code with random weights.

Only the model *code* of the ``transformers`` package is used: every network is built from a config, nothing
is downloaded. Attention is the ``eager`` one, so that it appears as matmul, softmax and matmul.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class _Wrapped(nn.Module):
    """Calls a transformers model with keyword arguments and returns one tensor."""

    def __init__(
        self, model: nn.Module, keywords: tuple[str, ...], pick: Callable[[Any], torch.Tensor]
    ) -> None:
        super().__init__()
        self.model = model
        self.keywords = keywords
        self.pick = pick

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        inputs = dict(zip(self.keywords, args, strict=True))
        return self.pick(self.model(**inputs))


def _config(config_class: Any, **settings: Any) -> Any:
    """A transformers config; its classes declare only a part of what they take."""
    return config_class(**settings)


def _logits(output: Any) -> torch.Tensor:
    return output.logits


def _last_hidden(output: Any) -> torch.Tensor:
    return output.last_hidden_state


def _pooled(output: Any) -> torch.Tensor:
    return output.pooler_output


def bert(hidden: int, layers: int, heads: int) -> nn.Module:
    """BERT encoder (Devlin 2018) with its pooler."""
    from transformers import BertConfig, BertModel

    config = _config(
        BertConfig,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        attn_implementation="eager",
    )
    return _Wrapped(BertModel(config), ("input_ids",), _pooled)


def gpt2(hidden: int, layers: int, heads: int) -> nn.Module:
    """GPT-2 decoder (Radford 2019), whole sequence at once (prefill), hidden states out."""
    from transformers import GPT2Config, GPT2Model

    config = _config(
        GPT2Config, n_embd=hidden, n_layer=layers, n_head=heads, use_cache=False, attn_implementation="eager"
    )
    return _Wrapped(GPT2Model(config), ("input_ids",), _last_hidden)


def llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> nn.Module:
    """Llama decoder (Touvron 2023): RMSNorm, rotary positions, SwiGLU, grouped-query attention."""
    from transformers import LlamaConfig, LlamaModel

    config = _config(
        LlamaConfig,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        use_cache=False,
        attn_implementation="eager",
    )
    return _Wrapped(LlamaModel(config), ("input_ids",), _last_hidden)


def t5_small() -> nn.Module:
    """T5-small (Raffel 2019), two layers each of encoder and decoder."""
    from transformers import T5Config, T5Model

    config = _config(T5Config, num_layers=2, num_decoder_layers=2, use_cache=False)
    return _Wrapped(T5Model(config), ("input_ids", "decoder_input_ids"), _last_hidden)


def vit(hidden: int, layers: int, heads: int) -> nn.Module:
    """Vision transformer with 16x16 patches (Dosovitskiy 2020; the tiny one is DeiT's, Touvron 2020)."""
    from transformers import ViTConfig, ViTForImageClassification

    config = _config(
        ViTConfig,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        num_labels=1000,
        attn_implementation="eager",
    )
    return _Wrapped(ViTForImageClassification(config), ("pixel_values",), _logits)


def swin_tiny() -> nn.Module:
    """Swin-T (Liu 2021), shifted windows of 7x7."""
    from transformers import SwinConfig, SwinForImageClassification

    config = _config(SwinConfig, num_labels=1000, attn_implementation="eager")
    return _Wrapped(SwinForImageClassification(config), ("pixel_values",), _logits)


def convnext_tiny() -> nn.Module:
    """ConvNeXt-T (Liu 2022)."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = _config(ConvNextConfig, num_labels=1000)
    return _Wrapped(ConvNextForImageClassification(config), ("pixel_values",), _logits)


def segformer_b0() -> nn.Module:
    """SegFormer-B0 (Xie 2021) for 256x256 images, 150 classes."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = _config(SegformerConfig, num_labels=150)
    return _Wrapped(SegformerForSemanticSegmentation(config), ("pixel_values",), _logits)


def mobilevit_xxs() -> nn.Module:
    """MobileViT-XXS (Mehta 2021): inverted residuals with SiLU, transformers over unfolded patches."""
    from transformers import MobileViTConfig, MobileViTForImageClassification

    config = _config(
        MobileViTConfig,
        image_size=256,
        hidden_sizes=[64, 80, 96],
        neck_hidden_sizes=[16, 16, 24, 48, 64, 80, 320],
        expand_ratio=2.0,
        num_labels=1000,
    )
    return _Wrapped(MobileViTForImageClassification(config), ("pixel_values",), _logits)
