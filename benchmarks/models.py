# SPDX-License-Identifier: BSD-3-Clause
"""The models that the benchmark trains, written from their papers; the last ones for a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


def conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution that keeps the extent (divided by its stride), normalized."""
    pad = size // 2
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, pad, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    )


class InvertedResidual(nn.Module):
    """Widen, filter each channel by itself, narrow; the narrow ends are added."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        widen = [*conv(inputs, wide, 1), nn.ReLU6()] if expansion > 1 else []
        depthwise = [*conv(wide, wide, 3, stride, groups=wide), nn.ReLU6()]
        self.body = nn.Sequential(*widen, *depthwise, *conv(wide, outputs, 1))
        self.skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.skip else self.body(x)


class MobileNetV2(nn.Module):
    """Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks",
    arXiv 1801.04381, table 2: expansion, channels, repeats, first stride."""

    STAGES = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        blocks: list[nn.Module] = [*conv(3, 32, 3, 2), nn.ReLU6()]
        channels = 32
        for expansion, outputs, repeats, first in self.STAGES:
            for i in range(repeats):
                stride = first if i == 0 else 1
                blocks.append(InvertedResidual(channels, outputs, stride, expansion))
                channels = outputs
        blocks += [*conv(channels, 1280, 1), nn.ReLU6()]
        self.features = nn.Sequential(*blocks)
        self.head = nn.Linear(1280, classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Residual(nn.Module):
    """A body beside a shortcut, which is projected where shapes change."""

    def __init__(self, body: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def basic(inputs: int, width: int, stride: int) -> Residual:
    """Two 3x3 convolutions."""
    body = [*conv(inputs, width, 3, stride), nn.ReLU(), *conv(width, width, 3)]
    return Residual(nn.Sequential(*body), inputs, width, stride)


def bottleneck(inputs: int, width: int, stride: int) -> Residual:
    """Narrow, filter, widen by four; the stride is in the 3x3 convolution."""
    body = [*conv(inputs, width, 1), nn.ReLU(), *conv(width, width, 3, stride), nn.ReLU()]
    body += conv(width, 4 * width, 1)
    return Residual(nn.Sequential(*body), inputs, 4 * width, stride)


class ResNet(nn.Module):
    """He et al., "Deep Residual Learning for Image Recognition",
    arXiv 1512.03385, table 1; 18 layers with shortcuts of option B, or 50."""

    def __init__(
        self, block: Callable[..., Residual], widen: int, counts: tuple[int, ...], classes: int
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [*conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        channels = 64
        for i, count in enumerate(counts):
            for j in range(count):
                layers.append(block(channels, 64 << i, 2 if i > 0 and j == 0 else 1))
                channels = widen * (64 << i)
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


def ResNet18(classes: int = 1000) -> ResNet:
    return ResNet(basic, 1, (2, 2, 2, 2), classes)


def ResNet50(classes: int = 1000) -> ResNet:
    return ResNet(bottleneck, 4, (3, 4, 6, 3), classes)


class VGG(nn.Module):
    """VGG-11 with batch norm and half its channels, for images of 64 x 64; most parameters are
    in the first layer of its head."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        inputs, parts = 3, list[nn.Module]()
        for widths in ((32,), (64,), (128, 128), (256, 256), (256, 256)):
            for width in widths:
                parts += [conv(inputs, width, 3), nn.ReLU()]
                inputs = width
            parts.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*parts)
        hidden = (nn.Linear(inputs * 4, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU())
        self.head = nn.Sequential(*hidden, nn.Linear(2048, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


class Lifted(nn.Module):
    """A Linear makes a map of size x size of the whole image, and convolutions work on that, as in
    decoders and generators: the first layer has the parameters, the others compute."""

    def __init__(self, size: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.lift = nn.Linear(size * size, width * size * size)
        self.shape = width, size, size
        body: list[nn.Module] = []
        for _ in range(layers):
            body += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(width, classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        lifted = self.lift(x.flatten(1)).unflatten(1, self.shape)
        return self.head(self.body(lifted).mean((2, 3)))


class MLP(nn.Module):
    """Hidden layers, Linear(width) and ReLU, between a stem and a head."""

    def __init__(
        self, width: int = 512, layers: int = 20, inputs: int = 64, classes: int = 10
    ) -> None:
        super().__init__()
        hidden: list[nn.Module] = []
        for _ in range(layers):
            hidden += [nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), *hidden)
        self.head = nn.Linear(width, classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.flatten(1)))


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """A character-level transformer with its norms before each part; after
    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019."""

    def __init__(
        self, vocabulary: int, length: int = 128, width: int = 256, layers: int = 6, heads: int = 8
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x) + self.positions[: x.shape[1]]
        return self.head(self.norm(self.blocks(y)))


def GPT2() -> GPT:
    """GPT-2 small, 124 M parameters: head and embedding share their weight."""
    model = GPT(vocabulary=50257, length=1024, width=768, layers=12, heads=12)
    model.head.weight = model.tokens.weight
    return model


class ViT(nn.Module):
    """ViT-S/16: Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv
    2010.11929, in the small size of Touvron et al., arXiv 2012.12877."""

    def __init__(self, classes: int = 1000, image: int = 224, patch: int = 16) -> None:
        super().__init__()
        width = 384
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.label = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn((image // patch) ** 2 + 1, width) * 0.02)
        how = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, **how)
        norm = nn.LayerNorm(width)
        self.encoder = nn.TransformerEncoder(layer, 12, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        label = self.label.expand(len(x), -1, -1)
        y = self.encoder(torch.cat([label, tokens], 1) + self.positions)
        return self.head(y[:, 0])


def initialize(model: nn.Module) -> None:
    """He initialization of what feeds a ReLU; the rest starts as PyTorch has it."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear) and module.in_features == module.out_features:
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
