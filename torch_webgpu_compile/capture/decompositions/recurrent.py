"""Fused cells of LSTMs and GRUs, which PyTorch calls on devices other than the CPU.

Source: ATen ``native/cuda/RNN.cu``. Gates are (batch, 4 or 3 · hidden), in the order of PyTorch's
weights; 16-bit numbers are computed with as float32. Each takes the arguments of its ATen schema.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...torch_ops.dtypes import opmath

aten = torch.ops.aten


def _gates(gates: Tensor, *biases: Tensor | None) -> Tensor:
    total = opmath(gates)
    for bias in biases:
        if bias is not None:
            total = total + opmath(bias)
    return total


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``_thnn_fused_lstm_cell``: h, c and the activated gates (batch, 4 · hidden)."""
    gates = _gates(input_gates, input_bias) + _gates(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * opmath(cx) + i * g
    results = o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)
    h, c, workspace = (result.to(cx.dtype) for result in results)
    return h, c, workspace


def lstm_cell_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> Any:
    """``_thnn_fused_lstm_cell_backward_impl``: the gradients by gates, c and bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = opmath(workspace).chunk(4, 1)
    grad_h = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = torch.zeros_like(cy) if grad_cy is None else grad_cy
    t = opmath(cy).tanh()
    through = opmath(grad_h) * o * (1 - t * t) + opmath(grad_c)
    grad_gates = torch.cat(
        [
            through * g * i * (1 - i),
            through * opmath(cx) * f * (1 - f),
            through * i * (1 - g * g),
            opmath(grad_h) * t * o * (1 - o),
        ],
        1,
    )
    dtype = workspace.dtype
    grad_bias = grad_gates.sum(0).to(dtype) if has_bias else None
    return grad_gates.to(dtype), (through * f).to(dtype), grad_bias


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``_thnn_fused_gru_cell``: h, and what its backward needs (batch, 5 · hidden)."""
    ir, iz, in_ = _gates(input_gates, input_bias).chunk(3, 1)
    hr, hz, hn = _gates(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (in_ + r * hn).tanh()
    h = opmath(hx)
    workspace = torch.cat([r, z, n, h, hn], 1)
    return (n + z * (h - n)).to(hx.dtype), workspace.to(hx.dtype)


def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    """``_thnn_fused_gru_cell_backward``: by input gates, hidden gates, h and the two biases."""
    r, z, n, h, hn = opmath(workspace).chunk(5, 1)
    grad = opmath(grad_hy)
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_z = grad * (h - n) * (1 - z) * z
    grad_r = grad_n * hn * (1 - r) * r
    grad_input = torch.cat([grad_r, grad_z, grad_n], 1)
    grad_hidden = torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (None, None)
    results = grad_input, grad_hidden, grad * z, *biases
    return tuple(None if x is None else x.to(workspace.dtype) for x in results)


DECOMPOSITIONS: dict[Any, Any] = {
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
}
