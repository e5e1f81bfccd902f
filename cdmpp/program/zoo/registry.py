"""Names, families and inputs of the zoo's networks, as data."""

from __future__ import annotations

import difflib
import importlib
import json
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any

from cdmpp.errors import NetworkError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of one input of a network.

    Attributes
    ----------
    name
        Name of the input.
    shape
        Extents; the first one is the batch.
    dtype
        ``float32`` or ``int64``.
    high
        Exclusive upper bound of integer inputs (vocabulary or table size).
    sized
        Axes that the size of the network sets: height and width of an image, the length of a sequence.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    high: int = 2
    sized: tuple[int, ...] = ()

    def with_batch(self, batch: int) -> TensorSpec:
        """The same input with another first extent."""
        return replace(self, shape=(batch, *self.shape[1:]))

    def with_size(self, size: int) -> TensorSpec:
        """The same input with other extents along the sized axes."""
        return replace(
            self, shape=tuple(size if axis in self.sized else n for axis, n in enumerate(self.shape))
        )

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class ZooEntry:
    """One network of the zoo.

    Attributes
    ----------
    name
        What the user types; ``name@b4`` asks for batch 4, ``name@s160`` for images of 160 x 160 or sequences of 160.
    family
        Kind of network, for splits and tables.
    description
        One line.
    inputs
        Inputs at batch 1.
    builder
        ``module:function`` under :mod:`cdmpp.program.zoo`.
    arguments
        Keyword arguments of the builder.
    """

    name: str
    family: str
    description: str
    inputs: tuple[TensorSpec, ...]
    builder: str
    arguments: tuple[tuple[str, Any], ...] = ()

    def build(self, seed: int = 0) -> nn.Module:
        """The network in evaluation mode, its random weights made from ``seed`` alone (imports torch)."""
        import torch

        module, function = self.builder.split(":")
        make = partial(
            getattr(importlib.import_module(f"cdmpp.program.zoo.{module}"), function), **dict(self.arguments)
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make().eval()


def _image(size: int = 224, channels: int = 3) -> tuple[TensorSpec, ...]:
    return (TensorSpec("image", (1, channels, size, size), sized=(2, 3)),)


def _tokens(length: int, vocabulary: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec("input_ids", (1, length), "int64", vocabulary, sized=(1,)),)


def _entry(
    name: str, family: str, description: str, inputs: tuple[TensorSpec, ...], builder: str, **arguments: Any
) -> ZooEntry:
    return ZooEntry(name, family, description, inputs, builder, tuple(sorted(arguments.items())))


_ENTRIES: tuple[ZooEntry, ...] = (
    _entry("alexnet", "cnn", "AlexNet", _image(), "plain:alexnet"),
    _entry("vgg11", "cnn", "VGG-11", _image(), "plain:vgg", depth=11),
    _entry("vgg16", "cnn", "VGG-16", _image(), "plain:vgg", depth=16),
    _entry("squeezenet", "cnn-fire", "SqueezeNet 1.1", _image(), "plain:squeezenet"),
    _entry("resnet18", "resnet", "ResNet-18", _image(), "residual:resnet18"),
    _entry("resnet50", "resnet", "ResNet-50", _image(), "residual:resnet50"),
    _entry("resnext50", "resnet", "ResNeXt-50 32x4d", _image(), "residual:resnext50"),
    _entry("regnet_y_400mf", "regnet", "RegNetY-400MF", _image(), "residual:regnet_y_400mf"),
    _entry("mobilenet_v2", "depthwise", "MobileNet V2", _image(), "mobile:mobilenet_v2"),
    _entry("mobilenet_v3", "depthwise", "MobileNet V3 small", _image(), "mobile:mobilenet_v3_small"),
    _entry("efficientnet_b0", "depthwise", "EfficientNet-B0", _image(), "mobile:efficientnet_b0"),
    _entry("shufflenet_v2", "depthwise", "ShuffleNet V2 1.0x", _image(), "mobile:shufflenet_v2"),
    _entry("densenet121", "densenet", "DenseNet-121", _image(), "branched:densenet121"),
    _entry("googlenet", "inception", "GoogLeNet", _image(), "branched:googlenet"),
    _entry("inception_v3", "inception", "Inception V3", _image(299), "branched:inception_v3"),
    _entry("mobilevit_xxs", "mobilevit", "MobileViT-XXS", _image(256), "hf:mobilevit_xxs"),
    _entry("convnext_tiny", "convnext", "ConvNeXt-T", _image(), "hf:convnext_tiny"),
    _entry(
        "vit_tiny",
        "vit",
        "DeiT-Ti / ViT-Ti, 16x16 patches",
        _image(),
        "hf:vit",
        hidden=192,
        layers=12,
        heads=3,
    ),
    _entry("vit_small", "vit", "ViT-S/16", _image(), "hf:vit", hidden=384, layers=12, heads=6),
    _entry("vit_base", "vit", "ViT-B/16", _image(), "hf:vit", hidden=768, layers=12, heads=12),
    _entry("swin_tiny", "swin", "Swin-T", _image(), "hf:swin_tiny"),
    _entry(
        "bert_tiny",
        "bert",
        "BERT, 2 layers of 128",
        _tokens(128, 30522),
        "hf:bert",
        hidden=128,
        layers=2,
        heads=2,
    ),
    _entry(
        "bert_small",
        "bert",
        "BERT, 4 layers of 512",
        _tokens(128, 30522),
        "hf:bert",
        hidden=512,
        layers=4,
        heads=8,
    ),
    _entry("bert_base", "bert", "BERT base", _tokens(128, 30522), "hf:bert", hidden=768, layers=12, heads=12),
    _entry(
        "gpt2",
        "gpt",
        "GPT-2 small, prefill of 128",
        _tokens(128, 50257),
        "hf:gpt2",
        hidden=768,
        layers=12,
        heads=12,
    ),
    _entry(
        "llama_small",
        "llama",
        "Llama-like, 4 layers of 512, prefill of 128",
        _tokens(128, 32000),
        "hf:llama",
        hidden=512,
        layers=4,
        heads=8,
        kv_heads=4,
        intermediate=1376,
    ),
    _entry(
        "t5_small",
        "encoder-decoder",
        "T5-small, 2+2 layers",
        (*_tokens(128, 32128), TensorSpec("decoder_input_ids", (1, 32), "int64", 32128)),
        "hf:t5_small",
    ),
    _entry("mlp", "mlp", "Four linear layers", (TensorSpec("x", (1, 784)),), "perceptron:mlp"),
    _entry("mlp_mixer", "mixer", "MLP-Mixer S/16", _image(), "perceptron:mlp_mixer"),
    _entry("lstm", "recurrent", "LSTM, 8 steps of 256", (TensorSpec("x", (1, 8, 128)),), "recurrent:lstm"),
    _entry("gru", "recurrent", "GRU, 8 steps of 512", (TensorSpec("x", (1, 8, 128)),), "recurrent:gru"),
    _entry("unet", "segmentation", "U-Net, 4 levels", _image(128), "dense_prediction:unet"),
    _entry("segformer_b0", "segmentation", "SegFormer-B0", _image(256), "hf:segformer_b0"),
    _entry(
        "dcgan",
        "generative",
        "DCGAN generator, 64x64",
        (TensorSpec("z", (1, 100, 1, 1)),),
        "dense_prediction:dcgan",
    ),
    _entry("espcn", "generative", "ESPCN, 3x super-resolution", _image(112, 1), "dense_prediction:espcn"),
    _entry(
        "wavenet",
        "audio",
        "WaveNet-like dilated 1-D convolutions",
        (TensorSpec("audio", (1, 1, 4000), sized=(2,)),),
        "dense_prediction:wavenet",
    ),
    _entry(
        "resnet3d",
        "video",
        "ResNet-3D-8, 8 frames",
        (TensorSpec("video", (1, 3, 8, 112, 112), sized=(3, 4)),),
        "residual:resnet3d",
    ),
    _entry(
        "dlrm",
        "recommender",
        "DLRM, 8 tables",
        (TensorSpec("dense", (1, 13)), TensorSpec("sparse", (1, 8), "int64", 10_000)),
        "perceptron:dlrm",
    ),
    _entry(
        "gcn",
        "graph",
        "Three dense graph convolutions, 256 nodes",
        (TensorSpec("x", (1, 256, 128)), TensorSpec("adjacency", (1, 256, 256))),
        "perceptron:gcn",
    ),
)


def zoo_networks() -> dict[str, ZooEntry]:
    """All networks by name, in the order of their families. Imports neither torch nor TVM."""
    return {entry.name: entry for entry in _ENTRIES}


def zoo_entry(name: str) -> ZooEntry:
    """The entry of that name.

    Raises
    ------
    NetworkError
        No such network; the message suggests near names.
    """
    entries = zoo_networks()
    if name in entries:
        return entries[name]
    near = difflib.get_close_matches(name, entries, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "`cdmpp networks` lists them"
    raise NetworkError(f"unknown network {name!r}: not in the zoo and not a .onnx or .pt2 file; {hint}")


def task_counts() -> dict[str, int]:
    """Number of tasks of each network at batch 1, as counted when the zoo was last changed.

    Written by ``python -m cdmpp.program.zoo.count_tasks``.
    """
    text = resources.files("cdmpp.program.zoo").joinpath("task_counts.json").read_text(encoding="utf-8")
    counts: dict[str, int] = json.loads(text)
    return counts
