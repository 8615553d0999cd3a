"""The dtypes in which autocast runs operators, by the rules of CUDA.

They are the lists of ``aten/src/ATen/autocast_mode.h``, with which PyTorch itself registers CUDA's.
A name is an operator, or an operator, a dot and an overload. Not every version of PyTorch has them
all. What is in no list computes in the dtype of its arguments, or in what PyTorch promotes them to.
"""

from __future__ import annotations

from ...torch_private import _dispatch_get_registrations_for_dispatch_key

# The dtype of the context: matrix products, and what is made of them.
LOWER_PRECISION = (
    "_convolution.deprecated",
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "_scaled_dot_product_flash_attention",
    "scaled_dot_product_attention",
)

# float32 as the argument ``dtype``, unless the caller gives another.
FLOAT32_BY_ARGUMENT = (
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
)

# float32 as the argument ``dtype`` of another overload.
FLOAT32_BY_OVERLOAD = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}

# The widest dtype among the arguments: their kernels want arguments of one dtype.
WIDEST = (
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
)

# Errors, with what to use instead.
REFUSED = {
    "binary_cross_entropy": (
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using "
        "torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
        "safe to autocast."
    )
}


def float32() -> set[str]:
    """Whatever else CUDA casts, to float32: it leaves float16's range, or its precision matters."""
    others = {*LOWER_PRECISION, *FLOAT32_BY_ARGUMENT, *FLOAT32_BY_OVERLOAD, *WIDEST, *REFUSED}
    names = map(str, _dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
    cast = {name.removeprefix("aten::") for name in names if name.startswith("aten::")}
    cast.add("rms_norm")  # PyTorch has it from 2.12 on
    of_cuda = {name for name in cast if "cudnn_" in name or "name" in name.lower()}
    return cast - others - of_cuda
