"""The accuracy page: complete, within its limits, and not worse than it says on this adapter."""

from __future__ import annotations

import json

import pytest
import torch

from tests.accuracy import FOLDER, adapter_name, measure, page
from tests.accuracy_table import BY_NAME, EXEMPT, FUNCTIONS
from torch_webgpu_compile.device.autoload import register
from torch_webgpu_compile.lowering.registry import LOWERINGS, register_all

pytestmark = pytest.mark.rotates(6)

register()
RECORDED = json.loads((FOLDER / "accuracy.json").read_text())
ROWS = {row["name"]: row for row in RECORDED["functions"]}
# A smaller sample meets other arguments than the page's did, among them worse ones.
FACTOR = 1.5


def pointwise_functions() -> set[str]:
    """The lowered pointwise operators of one or two tensors, without ``.default``."""
    register_all()
    found = set()
    for overload in LOWERINGS:
        schema = overload._schema
        tensors = [a for a in schema.arguments if str(a.type) == "Tensor"]
        one = len(schema.returns) == 1 and len(tensors) in (1, 2)
        chosen = overload._overloadname in ("default", "Tensor", "Tensor_Tensor")
        if torch.Tag.pointwise in overload.tags and one and chosen:
            found.add(str(overload).removeprefix("aten.").removesuffix(".default"))
    return found


def test_every_scalar_function_is_measured() -> None:
    measured = {name.partition("(")[0] for name in BY_NAME}
    assert pointwise_functions() - set(EXEMPT) == measured
    assert not set(EXEMPT) & measured


def test_the_page_has_every_function() -> None:
    assert list(ROWS) == [function.name for function in FUNCTIONS], "python -m tests.accuracy"
    for function in FUNCTIONS:
        assert ROWS[function.name]["limit_ulp"] == function.ulps
        assert not ROWS[function.name]["exceeds"], function.name


def test_the_page_is_what_the_numbers_say() -> None:
    recorded = (FOLDER / "accuracy.md").read_text()
    written = page(RECORDED["functions"], RECORDED["adapter"], RECORDED["torch"])
    assert recorded == written, "python -m tests.accuracy"


@pytest.mark.parametrize("name", list(BY_NAME))
def test_within_the_limit_and_no_worse_than_recorded(name: str) -> None:
    row, recorded = measure(BY_NAME[name], 2000, "webgpu"), ROWS[name]
    assert not row["exceeds"], row
    if adapter_name() == RECORDED["adapter"]:
        key = "tolerance" if BY_NAME[name].ulps is None else "ulp"
        assert row["device"][key] <= FACTOR * recorded["device"][key] + 0.01, row
