"""Cells of LSTMs without biases, on tensors of the device.

Patched: the function ``torch._meta_registrations.rnn_cell_checkSizes``.

Why: it compares the devices of biases that are None. CPU tensors do not come there, whose cells
are composites.

Until: PyTorch's function leaves out what is None.
"""

from __future__ import annotations

from typing import Any

from ..import_hooks import around


@around("torch._meta_registrations:rnn_cell_checkSizes")
def check(
    original: Any,
    input_gates: Any,
    hidden_gates: Any,
    input_bias: Any,
    hidden_bias: Any,
    *rest: Any,
) -> None:
    if input_bias is None and hidden_bias is None:
        input_bias = hidden_bias = input_gates.new_empty(input_gates.shape[1:])
    original(input_gates, hidden_gates, input_bias, hidden_bias, *rest)
