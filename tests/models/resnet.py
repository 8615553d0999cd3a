"""ResNet v1.5 (He et al. 2015; the stride is in the 3×3 convolution), as in torchvision.

torchvision is not a dependency of the tests: its wheels need the very torch build they were made
for, and next to another one they break every import of transformers.
"""

from __future__ import annotations

from torch import Tensor, nn


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Residual(nn.Module):
    """A residual block; ``bottleneck`` uses 1×1, 3×3, 1×1 convolutions, else two 3×3."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = width * 4 if bottleneck else width
        if bottleneck:
            self.body = nn.Sequential(
                _convolution(inputs, width, 1),
                nn.ReLU(inplace=True),
                _convolution(width, width, 3, stride),
                nn.ReLU(inplace=True),
                _convolution(width, outputs, 1),
            )
        else:
            self.body = nn.Sequential(
                _convolution(inputs, width, 3, stride),
                nn.ReLU(inplace=True),
                _convolution(width, outputs, 3),
            )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.body(x) + self.shortcut(x))


def resnet(depths: tuple[int, ...], bottleneck: bool, classes: int = 1000) -> nn.Sequential:
    """Input f32 (images, 3, height, width), output (images, classes)."""
    layers: list[nn.Module] = [
        _convolution(3, 64, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for block in range(depth):
            stride = 2 if block == 0 and stage > 0 else 1
            layers.append(Residual(channels, width, stride, bottleneck))
            channels = width * 4 if bottleneck else width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    model = nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet18(classes: int = 1000) -> nn.Sequential:
    """11.7 million parameters with 1,000 classes."""
    return resnet((2, 2, 2, 2), bottleneck=False, classes=classes)


def resnet50(classes: int = 1000) -> nn.Sequential:
    """25.6 million parameters with 1,000 classes."""
    return resnet((3, 4, 6, 3), bottleneck=True, classes=classes)
