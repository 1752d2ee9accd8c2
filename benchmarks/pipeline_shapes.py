# SPDX-License-Identifier: BSD-3-Clause
"""Four models as rows of layers, their shapes written out: multiply-adds of a forward pass and
elements, of one image of 224 x 224 or one sequence of 1,024 tokens. Shortcuts stand where their
block begins; batch norms belong to their convolution, and cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from optfuse.pipeline import PlannedLayer


@dataclass(frozen=True)
class Shape:
    multiply_adds: int
    parameters: int
    inputs: int  # elements
    outputs: int
    channels: int  # of the input; 0: no layer with weights that could be divided


def convolution(
    channels: int, width: int, kernel: int, before: int, after: int, others: int
) -> Shape:
    """others: parameters beside the weight: a bias, or a batch norm's."""
    weight = channels * width * kernel**2
    sizes = channels * before**2, width * after**2
    return Shape(weight * after**2, weight + others, *sizes, channels)


def linear(inputs: int, outputs: int, rows: int = 1, bias: bool = True) -> Shape:
    weight = inputs * outputs
    parameters = weight + outputs * bias
    return Shape(weight * rows, parameters, inputs * rows, outputs * rows, inputs)


def vgg16() -> Iterator[Shape]:
    channels, extent = 3, 224
    for layers, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(layers):
            yield convolution(channels, width, 3, extent, extent, width)
            channels = width
        extent //= 2
    yield linear(512 * 7**2, 4096)
    yield linear(4096, 4096)
    yield linear(4096, 1000)


def resnet50() -> Iterator[Shape]:
    yield convolution(3, 64, 7, 224, 112, 2 * 64)
    channels, extent = 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            before = extent
            extent = extent // 2 if stage and not block else extent
            yield convolution(channels, width, 1, before, before, 2 * width)
            yield convolution(width, width, 3, before, extent, 2 * width)
            yield convolution(width, 4 * width, 1, extent, extent, 8 * width)
            if not block:
                yield convolution(channels, 4 * width, 1, before, extent, 8 * width)
            channels = 4 * width
    yield linear(2048, 1000)


def alexnet() -> Iterator[Shape]:
    yield convolution(3, 64, 11, 224, 55, 64)
    yield convolution(64, 192, 5, 27, 27, 192)
    yield convolution(192, 384, 3, 13, 13, 384)
    yield convolution(384, 256, 3, 13, 13, 256)
    yield convolution(256, 256, 3, 13, 13, 256)
    yield linear(256 * 6**2, 4096)
    yield linear(4096, 4096)
    yield linear(4096, 1000)


def transformer(blocks: int, width: int, tokens: int, vocabulary: int) -> Iterator[Shape]:
    """The products of attention are a layer without weights. The last layer has a weight of its
    own here: shared with the embedding it would have to be on the same process."""
    for _ in range(blocks):
        yield linear(width, 3 * width, tokens)
        yield Shape(2 * width * tokens**2, 0, 3 * width * tokens, width * tokens, 0)
        yield linear(width, width, tokens)
        yield linear(width, 4 * width, tokens)
        yield linear(4 * width, width, tokens)
    yield linear(width, vocabulary, tokens, bias=False)


def gpt2_small() -> Iterator[Shape]:
    return transformer(12, 768, 1024, 50257)


def bert_large() -> Iterator[Shape]:
    return transformer(24, 1024, 512, 30522)


def gpt_medium() -> Iterator[Shape]:
    return transformer(24, 1024, 1024, 50257)


MODELS: dict[str, Callable[[], Iterator[Shape]]] = {
    "VGG-16": vgg16,
    "ResNet-50": resnet50,
    "AlexNet": alexnet,
    "GPT-2 small": gpt2_small,
}
DEEP: dict[str, Callable[[], Iterator[Shape]]] = {
    "BERT large": bert_large,
    "GPT medium": gpt_medium,
    "ResNet-50": resnet50,
}


def layers(model: str, multiply_adds_a_second: float, batch: int = 1) -> tuple[PlannedLayer, ...]:
    """The costs of a batch of so many images or sequences. dX and dW take what the forward takes,
    where there are weights, dX of products without weights twice that. An update takes a
    multiply-add for each parameter."""
    found = []
    for i, shape in enumerate({**MODELS, **DEEP}[model]()):
        once = batch * shape.multiply_adds / multiply_adds_a_second
        found.append(
            PlannedLayer(
                str(i),
                once,
                once * (1 if shape.parameters else 2) * (i > 0),
                once * bool(shape.parameters),
                shape.parameters / multiply_adds_a_second,
                batch * shape.inputs,
                batch * shape.outputs,
                shape.parameters,
                shape.channels > 0,
                shape.channels,
            )
        )
    return tuple(found)
