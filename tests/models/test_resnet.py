"""ResNet-18 and ResNet-50."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.models.model_checks import check_forward
from tests.models.resnet import resnet18, resnet50

pytestmark = pytest.mark.rotates(6)


def calibrated(model: nn.Module, images: Tensor) -> nn.Module:
    """In eval mode with the statistics of the images, so that activations keep their scale."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(images)
    return model.eval()


@pytest.mark.parametrize("build", [resnet18, resnet50])
def test_resnet(build: Callable[[], nn.Module]) -> None:
    images = torch.randn(2, 3, 64, 64)
    check_forward(calibrated(build(), images), images, calls=1)


def test_resnet18_full_size() -> None:
    images = torch.randn(1, 3, 224, 224)
    check_forward(calibrated(resnet18(), images), images, calls=1)


def test_resnet18_channels_last() -> None:
    images = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    model = calibrated(resnet18(), images).to(memory_format=torch.channels_last)
    check_forward(model, images)
