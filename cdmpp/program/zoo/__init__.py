"""The zoo: networks built from configs with random, seeded weights; nothing is downloaded.

Listing it imports neither torch nor TVM; building a network does.
"""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import NetworkError

if TYPE_CHECKING:
    from torch import nn

#: Number of tasks of each network at batch 1.
TASK_COUNTS = Path(__file__).with_name("task_counts.json")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of one input of a network."""

    name: str
    #: The first extent is the batch.
    shape: tuple[int, ...]
    #: ``float32`` or ``int64``.
    dtype: str = "float32"
    #: Exclusive upper bound of integer inputs (vocabulary or table size).
    high: int = 2
    #: Axes that the size of the network sets: height and width of an image, the length of a sequence.
    sized: tuple[int, ...] = ()

    def of(self, batch: int, size: int | None = None) -> TensorSpec:
        """The same input of another batch, and of another size along the sized axes."""
        extents = {0: batch} | ({} if size is None else dict.fromkeys(self.sized, size))
        return replace(self, shape=tuple(extents.get(axis, n) for axis, n in enumerate(self.shape)))

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class ZooEntry:
    """One network of the zoo."""

    #: What the user types; ``name@b4`` asks for batch 4, ``name@s160`` for images of 160 x 160 or sequences of 160.
    name: str
    #: Kind of network, for splits and tables.
    family: str
    description: str
    #: Inputs at batch 1.
    inputs: tuple[TensorSpec, ...]
    #: ``module:function`` (or class) in this package, and its keyword arguments.
    builder: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def build(self, seed: int = 0) -> nn.Module:
        """The network in evaluation mode, its random weights made from ``seed`` alone (imports torch)."""
        import torch

        module, function = self.builder.split(":")
        make = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network: nn.Module = make(**self.arguments).eval()
            return network


def _image(size: int = 224, channels: int = 3) -> tuple[TensorSpec, ...]:
    return (TensorSpec("image", (1, channels, size, size), sized=(2, 3)),)


def _tensor(name: str, *shape: int, sized: tuple[int, ...] = ()) -> TensorSpec:
    return TensorSpec(name, (1, *shape), sized=sized)


def _entry(name: str, family: str, description: str, builder: str, *inputs: TensorSpec, **arguments: Any) -> ZooEntry:
    """An entry; of an image of 224 x 224 if no inputs are given, of convolutions if no module is."""
    builder = builder if ":" in builder else f"convolutional:{builder}"
    return ZooEntry(name, family, description, inputs or _image(), builder, arguments)


def _hf_image(
    name: str, family: str, description: str, model: str, size: int = 224, classes: int = 1000, **settings: Any
) -> ZooEntry:  # fmt: skip
    what = {"model": model, "output": "logits", "keywords": ("pixel_values",), "num_labels": classes}
    return _entry(name, family, description, "others:huggingface", *_image(size), **what, **settings)


def _vit(name: str, description: str, hidden: int, heads: int) -> ZooEntry:
    """Vision transformer with 16x16 patches (Dosovitskiy 2020; the tiny one is DeiT's, Touvron 2020)."""
    settings = {"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": 4 * hidden}
    return _hf_image(
        name, "vit", description, "ViTForImageClassification", num_hidden_layers=12,
        attn_implementation="eager", **settings,
    )  # fmt: skip


def _hf_tokens(
    name: str, family: str, description: str, model: str, vocabulary: int, output: str = "last_hidden_state",
    **settings: Any,
) -> ZooEntry:  # fmt: skip
    tokens = TensorSpec("input_ids", (1, 128), "int64", vocabulary, sized=(1,))
    what = {"model": model, "output": output, "keywords": ("input_ids",), "attn_implementation": "eager"}
    return _entry(name, family, description, "others:huggingface", tokens, **what, **settings)


def _bert(name: str, description: str, hidden: int, layers: int, heads: int) -> ZooEntry:
    """BERT encoder (Devlin 2018) with its pooler."""
    return _hf_tokens(
        name, "bert", description, "BertModel", 30522, "pooler_output", hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, intermediate_size=4 * hidden,
    )  # fmt: skip


_ENTRIES: tuple[ZooEntry, ...] = (
    _entry("alexnet", "cnn", "AlexNet", "alexnet"),
    _entry("vgg11", "cnn", "VGG-11", "vgg", depths=(1, 1, 2, 2, 2)),
    _entry("vgg16", "cnn", "VGG-16", "vgg", depths=(2, 2, 3, 3, 3)),
    _entry("squeezenet", "cnn-fire", "SqueezeNet 1.1", "squeezenet"),
    _entry("resnet18", "resnet", "ResNet-18", "resnet", depths=(2, 2, 2, 2), bottleneck=False),
    _entry("resnet50", "resnet", "ResNet-50", "resnet", depths=(3, 4, 6, 3)),
    _entry("resnext50", "resnet", "ResNeXt-50 32x4d", "resnet", depths=(3, 4, 6, 3), groups=32, group_width=4),
    _entry("regnet_y_400mf", "regnet", "RegNetY-400MF", "regnet_y_400mf"),
    _entry("mobilenet_v2", "depthwise", "MobileNet V2", "mobilenet_v2"),
    _entry("mobilenet_v3", "depthwise", "MobileNet V3 small", "mobilenet_v3_small"),
    _entry("efficientnet_b0", "depthwise", "EfficientNet-B0", "efficientnet_b0"),
    _entry("shufflenet_v2", "depthwise", "ShuffleNet V2 1.0x", "shufflenet_v2"),
    _entry("densenet121", "densenet", "DenseNet-121", "densenet121"),
    _entry("googlenet", "inception", "GoogLeNet", "googlenet"),
    _entry("inception_v3", "inception", "Inception V3", "inception_v3", *_image(299)),
    # Mehta 2021: inverted residuals with SiLU, transformers over unfolded patches
    _hf_image(
        "mobilevit_xxs", "mobilevit", "MobileViT-XXS", "MobileViTForImageClassification", 256, image_size=256,
        hidden_sizes=[64, 80, 96], neck_hidden_sizes=[16, 16, 24, 48, 64, 80, 320], expand_ratio=2.0,
    ),
    _hf_image("convnext_tiny", "convnext", "ConvNeXt-T", "ConvNextForImageClassification"),  # Liu 2022
    _vit("vit_tiny", "DeiT-Ti / ViT-Ti, 16x16 patches", 192, 3),
    _vit("vit_small", "ViT-S/16", 384, 6),
    _vit("vit_base", "ViT-B/16", 768, 12),
    _hf_image("swin_tiny", "swin", "Swin-T", "SwinForImageClassification", attn_implementation="eager"),  # Liu 2021
    _bert("bert_tiny", "BERT, 2 layers of 128", 128, 2, 2),
    _bert("bert_small", "BERT, 4 layers of 512", 512, 4, 8),
    _bert("bert_base", "BERT base", 768, 12, 12),
    # Radford 2019; the whole sequence at once
    _hf_tokens(
        "gpt2", "gpt", "GPT-2 small, prefill of 128", "GPT2Model", 50257, n_embd=768, n_layer=12, n_head=12,
        use_cache=False,
    ),
    # Touvron 2023: RMSNorm, rotary positions, SwiGLU, grouped-query attention
    _hf_tokens(
        "llama_small", "llama", "Llama-like, 4 layers of 512, prefill of 128", "LlamaModel", 32000, hidden_size=512,
        intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, use_cache=False,
    ),
    # Raffel 2019
    _entry(
        "t5_small", "encoder-decoder", "T5-small, 2+2 layers", "others:huggingface",
        TensorSpec("input_ids", (1, 128), "int64", 32128, sized=(1,)),
        TensorSpec("decoder_input_ids", (1, 32), "int64", 32128), model="T5Model", output="last_hidden_state",
        keywords=("input_ids", "decoder_input_ids"), num_layers=2, num_decoder_layers=2, use_cache=False,
    ),
    _entry("mlp", "mlp", "Four linear layers", "others:mlp", _tensor("x", 784)),
    _entry("mlp_mixer", "mixer", "MLP-Mixer S/16", "others:Mixer", width=512, depth=8, patch=16, tokens=196),
    _entry("lstm", "recurrent", "LSTM, 8 steps of 256", "others:Unrolled", _tensor("x", 8, 128), cell="LSTMCell", width=256),
    _entry("gru", "recurrent", "GRU, 8 steps of 512", "others:Unrolled", _tensor("x", 8, 128), cell="GRUCell", width=512),
    _entry("unet", "segmentation", "U-Net, 4 levels", "unet", *_image(128), width=32, levels=4, classes=21),
    # Xie 2021, 150 classes
    _hf_image("segformer_b0", "segmentation", "SegFormer-B0", "SegformerForSemanticSegmentation", 256, 150),
    _entry("dcgan", "generative", "DCGAN generator, 64x64", "dcgan", _tensor("z", 100, 1, 1)),
    _entry("espcn", "generative", "ESPCN, 3x super-resolution", "espcn", *_image(112, 1)),
    _entry("wavenet", "audio", "WaveNet-like dilated 1-D convolutions", "wavenet", _tensor("audio", 1, 4000, sized=(2,))),
    _entry("resnet3d", "video", "ResNet-3D-8, 8 frames", "resnet3d", _tensor("video", 3, 8, 112, 112, sized=(3, 4))),
    _entry(
        "dlrm", "recommender", "DLRM, 8 tables", "others:Dlrm", _tensor("dense", 13),
        TensorSpec("sparse", (1, 8), "int64", 10_000), tables=8, rows=10_000, width=64,
    ),
    _entry(
        "gcn", "graph", "Three dense graph convolutions, 256 nodes", "others:Gcn", _tensor("x", 256, 128),
        _tensor("adjacency", 256, 256), features=128, hidden=64, classes=16,
    ),
)  # fmt: skip


def zoo_networks() -> dict[str, ZooEntry]:
    """All networks by name, in the order of their families. Imports neither torch nor TVM."""
    return {entry.name: entry for entry in _ENTRIES}


def zoo_entry(name: str) -> ZooEntry:
    """The entry of that name (NetworkError: no such network; the message suggests near names)."""
    entries = zoo_networks()
    if name in entries:
        return entries[name]
    near = difflib.get_close_matches(name, entries, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "`cdmpp networks` lists them"
    raise NetworkError(f"unknown network {name!r}: not in the zoo and not a .onnx or .pt2 file; {hint}")


def task_counts() -> dict[str, int]:
    """Number of tasks of each network at batch 1, counted when the zoo was last changed: counting takes minutes.

    Written by ``python -m cdmpp.program.tasks``.
    """
    counts: dict[str, int] = json.loads(TASK_COUNTS.read_text(encoding="utf-8"))
    return counts
