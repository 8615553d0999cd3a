"""The modules whose import fills the table of lowerings."""

from __future__ import annotations

from importlib import import_module

FAMILIES = (
    "views",
    "creation",
    "pointwise",
    "comparison",
    "activations",
    "reductions",
    "normalization",
    "matmul",
    "flash_attention",
    "convolution",
    "pooling",
    "pooling_backward",
    "fractional_pooling",
    "factorizations",
    "joining",
    "indexing",
    "embedding_bags",
    "scans",
    "searching",
    "sorting",
    "modes",
    "resampling",
    "fixed_point_resampling",
    "products",
    "scatter_reductions",
    "special",
    "bessel",
    "fourier",
)


def register_all() -> None:
    """Imports every op family; a second call does nothing."""
    for family in FAMILIES:
        import_module(f"{__package__}.{family}")
