"""Fourier transforms of complex tensors: without kernels, they run on the host."""

from __future__ import annotations
