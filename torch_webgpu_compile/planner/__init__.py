"""Kernel calls to a `Plan`: memory, steps, deduplicated kernels."""

from __future__ import annotations

from .build import build_plan

__all__ = ["build_plan"]
