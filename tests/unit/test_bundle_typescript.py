"""What `export` writes beside a bundle for pages: its types and the runtime."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from torch_webgpu_compile import export
from torch_webgpu_compile.bundle.typescript import declarations
from torch_webgpu_compile.bundle.verify import read_manifest

WANTED = """\
export type Bundle = {
  entries: {
    /** rows: 1 to 9; returns {sum: sum, all: [all.0, 3]} */
    forward: {
      inputs: {
        /** (rows, 2) */
        input: "float32";
      };
      results: {
        /** (2,) */
        sum: "float16" | "float32";
        /** (rows,) */
        "all.0": "bool";
      };
    };
  };
  states: {
    /** parameter (2, 2) */
    weight: "float16" | "float32";
  };
};
"""


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, input):
        x = input.to(self.weight.dtype) @ self.weight
        return {"sum": x.sum(0), "all": [(x > 0).all(-1), 3]}


def test_types_of_a_bundle(tmp_path):
    rows = torch.export.Dim("rows", min=1, max=9)
    shapes = ({0: rows},)
    both = ("float16", "float32")
    export(Rows(), (torch.ones(3, 2),), tmp_path, dynamic_shapes=shapes, precision=both)
    comment, _, text = (tmp_path / "bundle.d.ts").read_text().partition("\n")
    assert comment.startswith(f"/** The bundle {tmp_path.name}, for")
    assert text == WANTED


def test_no_name_ends_a_comment(tmp_path):
    export(Rows(), (torch.ones(3, 2),), tmp_path, runtime=False)
    manifest = replace(read_manifest(tmp_path), name="a */ export type Bundle = 1; /*\nb")
    first = declarations(manifest).splitlines()[0]
    assert first.count("*/") == 1
    assert first.endswith("*/")


def test_the_runtime_is_beside_the_bundle(tmp_path):
    export(Rows(), (torch.ones(3, 2),), tmp_path)
    assert b"export" in (tmp_path / "torch-webgpu.js").read_bytes()
    assert (tmp_path / "torch-webgpu-composed.js").exists()
    assert (tmp_path / "torch-webgpu.d.ts").exists()
    export(Rows(), (torch.ones(3, 2),), tmp_path, runtime=False)
    assert not list(tmp_path.glob("torch-webgpu*"))
    assert (tmp_path / "bundle.d.ts").exists()
