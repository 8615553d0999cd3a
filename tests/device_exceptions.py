"""Operators that the device's samples treat in a way of their own, each with the reason."""

from __future__ import annotations

from typing import Any

import torch

# Operators whose results hold whatever memory held, or that are about something else than values.
EXCEPTIONS = {
    "empty": "its values are undefined",
    "empty_like": "its values are undefined",
    "empty_permuted": "its values are undefined",
    "empty_strided": "its values are undefined",
    "new_empty": "its values are undefined",
    "new_empty_strided": "its values are undefined",
    "as_strided.partial_views": "its samples read memory that the sample itself does not hold",
    "to_sparse": "sparse tensors",
    "sparse.mm.reduce": "sparse tensors",
    "sparse.sampled_addmm": "sparse tensors",
    "torch.ops.aten._safe_softmax.default": "not a function of torch",
}
"""By operator name, with the reason."""

ERRORS_NOT_RAISED = {
    "kthvalue": "out= may be the input: it is read before anything is written",
    "narrow_copy": "the CPU raises an internal assertion, other devices an IndexError",
}
"""By operator name, with the reason."""

OUT_OF_CPU = {
    "avg_pool3d": "the CPU kernel ignores the strides of out=",
    "nn.functional.avg_pool3d": "the CPU kernel ignores the strides of out=",
    "narrow_copy": "the CPU kernel ignores the strides of out=",
    "nn.functional.gelu": "the CPU kernel ignores the strides of out=",
}
"""Operators whose ``out=`` is not compared, with the reason."""

NOT_COMPILED = {
    "_native_batch_norm_legit": "sizes of statistics that are not used are those of CUDA's kernels",
    "hash_tensor": "uint64 tensors",
    "linalg.eig": "complex results of an operator on the host",
    "linalg.eigvals": "complex results of an operator on the host",
    "native_batch_norm": "sizes of statistics that are not used are those of CUDA's kernels",
}
"""Operators that are not compiled whole, or to other results, with the reason."""

IN_FLOAT64 = frozenset(
    {"cdouble", "double", "float_power", "to"}  # results
    | {"log_softmax.with_dtype", "nn.functional.softmin.with_dtype", "softmax.with_dtype"}
    | {"linalg.matrix_rank", "linalg.matrix_rank.hermitian", "pinverse"}  # tolerances
    | {"logspace", "logspace.tensor_overload"}  # powers
    | {"renorm"}  # norms, of its gradient
)
"""Operators of float32 with float64 in between: on the host where the device has none."""

STRIDES_OF_OUT = {
    "cholesky_inverse": "its kernels make an empty out= column-major, its meta function row-major",
}
"""Operators that may leave a resized ``out=`` with other strides than the CPU, with the reason."""
if torch.__version__ < (2, 13):
    STRIDES_OF_OUT["fft.ifft"] = "its meta function does not have the strides of its kernels"
    STRIDES_OF_OUT["fft.ihfft"] = "its meta function does not have the strides of its kernels"

# PyTorch's CPU kernels of these for complex tensors are wrong under any `TorchDispatchMode`.
WRONG_WHEN_WATCHED = frozenset(
    {"pinverse", "linalg.pinv", "linalg.pinv.singular", "linalg.pinv.hermitian"}
    | {"linalg.lstsq", "linalg.lstsq.grad_oriented"}
)
# Results that an out= of any dtype takes here; the CPU wants one dtype.
OUT_OF_ANY_DTYPE = frozenset(
    {"all", "any", "bucketize", "isin", "isneginf", "isposinf", "searchsorted", "signbit"}
)

# Functions of Python that copy their results to out=, wherever it is.
OUT_ANYWHERE = frozenset({"lu"})

# Results that are determined up to a sign, a phase, or the order of equal elements.
OPEN = frozenset({"svd", "linalg.svd", "linalg.eigh", "linalg.eig", "svd_lowrank", "pca_lowrank"})


def name_of(info: Any) -> str:
    """An OpInfo's name with its variant."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
