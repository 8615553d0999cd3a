"""Composed plans in Chromium: equal to the same bundle in Python, and errors that change nothing."""

from __future__ import annotations

import torch
from torch.utils import _pytree

from tests.deciding import deciding
from tests.web.test_runtime import RUN, assert_equal, in_python
from torch_webgpu_compile import export


def test_data_decide_what_runs(in_page, site):
    model, calls = deciding()
    with torch.no_grad():
        folder = export(model.entries(), site[0] / "deciding")
    names = {"halve": ("x", "limit"), "choose": ("x",), "find": ("x",), "steps": ("rows",)}
    given = [
        [entry, {n: x.tolist() for n, x in zip(names[entry], inputs, strict=True)}]
        for entry, inputs in calls
    ]
    found = in_page(RUN, {"bundle": "deciding", "calls": given})
    assert_equal(found, in_python(folder, given))
    with torch.no_grad():
        for got, (entry, inputs) in zip(found, calls, strict=True):
            wanted = _pytree.tree_leaves(getattr(model, entry)(*inputs))
            for values, tensor in zip(got.values(), wanted, strict=True):
                close = torch.tensor(values, dtype=torch.float64), tensor.double().flatten()
                torch.testing.assert_close(*close, atol=1e-5, rtol=1e-5)
