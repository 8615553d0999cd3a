"""The families of rules; importing this module fills the table."""

from __future__ import annotations

from . import arithmetic, creation, fourier, functions, linear, products, reductions

FAMILIES = (arithmetic, creation, fourier, functions, linear, products, reductions)
