"""Signatures: where sizes come from, which results share memory, what stays on the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from torch_webgpu_compile import dtypes
from torch_webgpu_compile.callables.signature import Signature
from torch_webgpu_compile.captured import Phase
from torch_webgpu_compile.errors import UnsupportedOp
from torch_webgpu_compile.plan.model import HostStep, Plan, PlanBuffer, PlanInput, PlanOutput
from torch_webgpu_compile.symbolic.nested import HostBuffer
from torch_webgpu_compile.symbolic.sizes import as_expr, contiguous_strides, product, symbol

S = symbol("s0", 2)


def buffer(name, role, *sizes, dtype=dtypes.float32):
    sizes = tuple(as_expr(size) for size in sizes)
    nbytes = product(sizes) * dtype.itemsize
    return PlanBuffer(name, role, dtype, sizes, contiguous_strides(sizes), as_expr(0), nbytes)


def output(name, sizes, strides=None, offset=0, mutates=None):
    sizes = tuple(as_expr(size) for size in sizes)
    strides = contiguous_strides(sizes) if strides is None else tuple(map(as_expr, strides))
    return PlanOutput(name, sizes, strides, as_expr(offset), mutates=mutates)


def plan(buffers, inputs, outputs):
    steps = tuple(
        HostStep("aten.clone.default", (o.buffer,), (HostBuffer(i.buffer),), ())
        for i in inputs
        for o in outputs
        if i.buffer
    )
    return Plan("p", (), {b.name: b for b in buffers}, steps, tuple(inputs), tuple(outputs))


def test_sizes_come_from_integers():
    made = plan(
        [buffer("x", "input", S, 3), buffer("y", "output", S)],
        [PlanInput(size=S), PlanInput("x")],
        [output("y", (S,))],
    )
    variant = Signature(made).variant([5, torch.zeros(5, 3)])
    assert variant.sizes == {"s0": 5}
    assert variant.uploads[0].nbytes == 60
    assert variant.tensors[0].sizes == (5,)


def test_sizes_come_from_shapes_when_there_is_no_integer():
    made = plan(
        [buffer("x", "input", S * 2 + 1), buffer("y", "output", S)],
        [PlanInput("x")],
        [output("y", (S,))],
    )
    assert Signature(made).variant([torch.zeros(11)]).sizes == {"s0": 5}


def test_sizes_come_from_strides_and_offsets():
    k, o = symbol("s1", 2), symbol("s2", 2)
    x = buffer("x", "input", 3, 4)
    x = replace(x, strides=(k, as_expr(1)), offset=o)
    y = replace(buffer("y", "output", 3, 4), nbytes=k + o)
    made = plan([x, y], [PlanInput("x")], [output("y", (3, 4))])
    memory = torch.zeros(200)
    signature = Signature(made)
    assert signature.variant([memory.as_strided((3, 4), (9, 1), 7)]).sizes == {"s1": 9, "s2": 7}
    shifted = memory.as_strided((3, 4), (9, 1), 64 + 5)
    assert signature.variant([shifted]).sizes == {"s1": 9, "s2": 5}


def test_a_size_from_nowhere_is_refused():
    made = plan([buffer("y", "output", S)], [], [output("y", (S,))])
    with pytest.raises(UnsupportedOp, match=r"s0.*dynamic=False"):
        Signature(made)


def test_variants_are_made_once_per_size():
    made = plan(
        [buffer("x", "input", S), buffer("y", "output", S)], [PlanInput("x")], [output("y", (S,))]
    )
    signature = Signature(made)
    first = signature.variant([torch.zeros(4)])
    assert signature.variant([torch.ones(4)]) is first
    assert signature.variant([torch.zeros(5)]) is not first


def test_results_that_share_a_buffer_share_a_tensor():
    made = plan(
        [buffer("x", "input", 4), buffer("y", "output", 2, 3)],
        [PlanInput("x")],
        [output("y", (2, 3)), output("y", (3, 2), (1, 3)), output("y", (3,), (1,), 3)],
    )
    (tensor,) = Signature(made).variant([torch.zeros(4)]).tensors
    assert tensor.sizes == (6,)
    assert [position for position, _ in tensor.results] == [0, 1, 2]
    assert tensor.results[2][1] == ((3,), (1,), 3)


def test_saved_results_stay_on_the_gpu_unless_somebody_sees_them():
    made = plan(
        [buffer("x", "input", 4), buffer("y", "output", 4), buffer("z", "output", 4)],
        [PlanInput("x")],
        [output("y", (4,)), output("y", (4,)), output("z", (4,))],
    )
    variant = Signature(made, Phase("forward", saved=frozenset({1, 2}))).variant([torch.zeros(4)])
    assert variant.saved_buffers == (("z", 16),)


def test_inputs_that_nothing_reads_are_not_uploaded():
    made = Plan(
        "p",
        (),
        {b.name: b for b in (buffer("x", "input", 4), buffer("y", "output", 4))},
        (),
        (PlanInput("x"),),
        (output("y", (4,)),),
    )
    assert Signature(made).variant([torch.zeros(4)]).uploads == ()


def test_mutations():
    made = plan(
        [buffer("x", "input", 4, 2), buffer("y", "output", 4, 2)],
        [PlanInput("x")],
        [output("y", (4, 2), mutates=0)],
    )
    (mutation,) = (
        Signature(made, static_inputs=frozenset({0})).variant([torch.zeros(4, 2)]).mutations
    )
    assert mutation.keep
    assert mutation.dense
    (mutation,) = Signature(made).variant([torch.zeros(4, 2)]).mutations
    assert not mutation.keep
