# SPDX-License-Identifier: BSD-3-Clause
"""The models that are worth a GPU, in the sizes of their papers."""

from __future__ import annotations

import torch
from models import GPT, conv, initialize
from torch import Tensor, nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """Narrow, filter, widen by four, beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *conv(inputs, width, 1),
            nn.ReLU(),
            *conv(width, width, 3, stride),
            nn.ReLU(),
            *conv(width, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """He et al., "Deep Residual Learning for Image Recognition",
    arXiv 1512.03385, table 1, 50 layers, the stride in the 3x3 convolutions."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [*conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        channels = 64
        for width, blocks, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(blocks):
                layers.append(Bottleneck(channels, width, first if i == 0 else 1))
                channels = 4 * width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Encoder(nn.Module):
    """Transformer layers without a mask; norms before or after each part."""

    def __init__(self, width: int, layers: int, heads: int, norm_first: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width,
                    heads,
                    4 * width,
                    dropout=0.0,
                    activation="gelu",
                    batch_first=True,
                    norm_first=norm_first,
                )
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layers(x))


class ViT(nn.Module):
    """ViT-S/16: Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv
    2010.11929, in the small size of Touvron et al., arXiv 2012.12877."""

    def __init__(
        self,
        classes: int = 1000,
        image: int = 224,
        patch: int = 16,
        width: int = 384,
        layers: int = 12,
        heads: int = 6,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.label = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn((image // patch) ** 2 + 1, width) * 0.02)
        self.encoder = Encoder(width, layers, heads, norm_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        label = self.label.expand(len(x), -1, -1)
        y = self.encoder(torch.cat([label, tokens], 1) + self.positions)
        return self.head(y[:, 0])


class GPT2(GPT):
    """GPT-2 small, 124 M parameters: head and embedding share their weight."""

    def __init__(
        self,
        vocabulary: int = 50257,
        length: int = 1024,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
    ) -> None:
        super().__init__(vocabulary, length, width, layers, heads)
        self.head.weight = self.tokens.weight


class BERT(nn.Module):
    """BERT-base: Devlin et al., arXiv 1810.04805, 110 M parameters, as it is
    trained to restore masked tokens."""

    def __init__(
        self,
        vocabulary: int = 30522,
        length: int = 512,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.norm = nn.LayerNorm(width)
        self.encoder = Encoder(width, layers, heads, norm_first=False)
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, vocabulary)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.tokens(x) + self.positions[: x.shape[1]])
        return self.head(self.transform(self.encoder(y)))
