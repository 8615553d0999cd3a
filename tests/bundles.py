"""A bundle with everything that bundles can have, and how one is changed behind its hashes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_webgpu_compile import EntryPoint, export
from torch_webgpu_compile.bundle.hashing import file_of

Json = Any
Files = dict[str, Json]

WEIGHTS = "weights/float32-00001.safetensors"
FORWARD = "plans/float32-forward.json"
KERNELS = "kernels/float32.json"


class Sample(nn.Module):
    """State of every kind of use: read, prepared, written in place, replaced, and never written."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.narrow = nn.Parameter(torch.randn(8).bfloat16())
        self.register_buffer("cache", torch.zeros(6, 8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("first", torch.zeros(8))
        self.register_buffer("second", torch.ones(8))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """The softmax of the weight is prepared. ``ids``: (n,)."""
        self.seen += 1
        rows = self.embedding(ids)
        mixed = rows @ torch.softmax(self.weight, -1)
        return {"mixed": mixed, "half": mixed.bfloat16() * self.narrow, "columns": mixed.t()}

    def learn(self, gradient: Tensor) -> Tensor:
        """Changes what `forward` has prepared."""
        self.weight.data.sub_(gradient, alpha=0.5)
        return self.weight

    def remember(self, row: Tensor, position: Tensor) -> Tensor:
        """Writes one row of a state."""
        self.cache.index_copy_(0, position, row)
        return self.cache.sum(0)

    def exchange(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Two states get one value, in memory that is not theirs."""
        before = self.first + self.second
        total = (x * 2 + before).cumsum(0)
        self.first.copy_(total)
        self.second.copy_(total)
        return before, x

    def decide(self, x: Tensor) -> dict[str, Tensor]:
        """Data decide what runs, and the size of a result."""
        y = torch.cond(
            x.sum() > 0, lambda x: (x @ self.weight).sort(-1).values, lambda x: x.sin(), (x,)
        )
        torch._check(x[x > 8].shape[0] == 0)
        self.seen += 1
        return {"y": y, "some": x[x > 0] * 2}

    def draw(self, shape: Tensor) -> Tensor:
        """Random numbers."""
        return torch.rand_like(shape) + torch.rand_like(shape)


def export_sample(folder: Path, **options: Any) -> Sample:
    """Exports a `Sample`, which is returned."""
    torch.manual_seed(0)
    model = Sample()
    ids, n = torch.tensor([1, 5, 11]), torch.export.Dim("n", min=2, max=40)
    entries = {
        "forward": EntryPoint(model, (ids,), dynamic_shapes=({0: n},)),
        "learn": (model.learn, (torch.randn(8, 8),)),
        "remember": (model.remember, (torch.randn(1, 8), torch.tensor([2]))),
        "exchange": (model.exchange, (torch.randn(8),)),
        "decide": (model.decide, (torch.ones(2, 8),)),
        "draw": (model.draw, (torch.zeros(5),)),
    }
    with torch.no_grad():
        export(entries, folder, **options)
    return model


def edit(folder: Path, change: Callable[[Json, Files], Any]) -> None:
    """Changes the JSON of a bundle; the manifest gets the right hashes of what it becomes.

    Args:
        change: gets the manifest and the contents of the other files with JSON, by name.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    names = [name for name in manifest["files"] if name.endswith(".json")]
    files = {name: json.loads((folder / name).read_text()) for name in names}
    before = copy.deepcopy(files)
    change(manifest, files)
    listed = manifest.get("files")
    for name in names:
        if files[name] != before[name]:
            (folder / name).write_text(json.dumps(files[name]))
            if isinstance(listed, dict) and name in listed:
                listed[name] = asdict(file_of(folder / name))
    (folder / "manifest.json").write_text(json.dumps(manifest))
