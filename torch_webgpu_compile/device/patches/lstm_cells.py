"""Cells of LSTMs without biases, on tensors of the device.

Patched: the function ``torch._meta_registrations.rnn_cell_checkSizes``.

Why: it compares the devices of biases that are None. CPU tensors do not come there, whose cells
are composites.

Until: PyTorch's function leaves out what is None.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ..import_hooks import after_import


def install() -> None:
    """Patches the function once it is there."""
    after_import("torch._meta_registrations", _patch)


def _patch(module: Any) -> None:
    original = getattr(module, "rnn_cell_checkSizes", None)
    if original is None:
        return

    @wraps(original)
    def check(
        input_gates: Any, hidden_gates: Any, input_bias: Any, hidden_bias: Any, *rest: Any
    ) -> None:
        if input_bias is None and hidden_bias is None:
            input_bias = hidden_bias = input_gates.new_empty(input_gates.shape[1:])
        original(input_gates, hidden_gates, input_bias, hidden_bias, *rest)

    module.rnn_cell_checkSizes = check
