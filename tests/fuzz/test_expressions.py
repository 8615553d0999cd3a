"""A share of `tests.fuzz.expressions`, and that it can find something."""

from __future__ import annotations

import pytest
import torch

from . import expressions


@pytest.mark.parametrize("batch", range(8))
def test_random_expressions(batch):
    wrong = expressions.wrong_of(expressions.draw_batch(0, batch))
    assert not wrong, "\n".join(wrong)


# Each was wrong with one driver's compiler: NVIDIA's or Mesa's.
_FOUND = (
    # x is a common factor of both terms; what is opaque twice is the same, and cancels.
    "(torch.addcdiv(2.5*x,x,2.5*x)*2)",
    "torch.lerp(((y/y)*y),x,((y/y)*y)).reciprocal()",
    "(z-((x/x)*x))",
    "torch.atan2(2.5*x,((y/2.5*x)-2.5*x))",
    # a - b = 0 is a = b, which infinities are.
    "((((z/4)-x)==0)*1.0).to(dtype).rsqrt()",
    "torch.addcmul(torch.hypot(y,z),((z.frac()==0)*1.0).to(dtype),torch.hypot(y,z))",
    # One of -1, 0 and 1 is chosen, and so is what it is multiplied by.
    "(((b.to(dtype).sign()*torch.hypot(z,2.5*x))-x.floor())*2)",
    "(x.sign()*y.log())",
    # The reciprocal of 3e38 is 0.
    "torch.hypot(x.nan_to_num(0.0),x.nan_to_num(0.0))",
    # A root is positive, but that of -0.
    "F.hardswish(x).rsqrt().sin()",
    "(-x.relu()).sqrt().reciprocal().tanh()",
)


@pytest.mark.parametrize("expression", _FOUND)
def test_expressions_that_were_wrong(expression):
    assert not expressions.wrong_of([expression])


def test_a_lost_nan_is_found(monkeypatch):
    def compiles_to_zero(function, **options):
        return lambda *operands: [torch.zeros_like(t) for t in function(*operands)]

    monkeypatch.setattr(torch, "compile", compiles_to_zero)
    assert len(expressions.wrong_of(["x-x", "x*2", "y.sin()", "(k%3).to(dtype)"])) == 3
