"""Trains a small network that tells points in a circle from others, and exports it.

python export.py FOLDER
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import torch_webgpu_compile


def circle() -> nn.Module:
    """Reads points, f32 (n, 2) of -1 to 1; gives the odds that each is inside, f32 (n, 1)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(500):
        points = torch.rand(256, 2) * 2 - 1
        inside = (points.norm(dim=-1, keepdim=True) < 0.7).float()
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy(model(points), inside).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


if __name__ == "__main__":
    shapes = ({0: torch.export.Dim("points", max=4096)},)
    example = (torch.zeros(8, 2),)
    torch_webgpu_compile.export(circle(), example, sys.argv[1], dynamic_shapes=shapes)
