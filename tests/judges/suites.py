"""The suites: where their tests are, and how each is told the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Side:
    """How a suite is run on one device."""

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    match: str = ""


@dataclass(frozen=True)
class Suite:
    """A suite of tests: what passes on the CPU (`reference`) has to pass here (`subject`)."""

    title: str
    files: tuple[str, ...]
    reference: Side
    subject: Side
    match: str = ""
    plugins: tuple[str, ...] = ()
    conftest: bool = False
    """Whether the suite's own conftest.py is loaded."""
    skipped_too: bool = False
    """Whether what the CPU skips, as it is no accelerator, is run on the device."""


def _only(device: str) -> Side:
    return Side({"PYTORCH_TESTING_DEVICE_ONLY_FOR": device})


_DEVICE_GENERIC = (
    *("test_torch.py", "test_nn.py", "test_tensor_creation_ops.py", "test_indexing.py"),
    *("test_linalg.py", "test_unary_ufuncs.py", "test_scatter_gather_ops.py", "test_modules.py"),
    *("test_optim.py", "test_serialization.py", "test_dataloader.py", "test_foreach.py"),
    *("test_reductions.py", "test_binary_ufuncs.py", "test_shape_ops.py", "test_view_ops.py"),
    *("test_type_promotion.py", "test_sort_and_select.py", "test_autograd.py", "test_ops.py"),
    *("test_testing.py", "test_spectral_ops.py", "test_segment_reductions.py", "test_complex.py"),
    *("test_masked.py", "test_maskedtensor.py", "test_prims.py", "test_transformers.py"),
    *("test_nestedtensor.py", "test_native_mha.py", "test_numpy_interop.py", "test_dlpack.py"),
    *("test_namedtensor.py", "test_ops_gradients.py", "test_ops_fwd_gradients.py"),
    *("test_decomp.py", "test_meta.py", "test_proxy_tensor.py", "test_fake_tensor.py"),
    *("test_stateless.py", "test_content_store.py", "test_subclass.py", "test_schema_check.py"),
    *("test_expanded_weights.py", "test_comparison_utils.py", "test_sparse.py"),
    *("test_sparse_csr.py", "test_jit_fuser_te.py", "distributions/test_distributions.py"),
    *("nn/test_convolution.py", "nn/test_dropout.py", "nn/test_embedding.py"),
    *("nn/test_init.py", "nn/test_lazy_modules.py", "nn/test_load_state_dict.py"),
    *("nn/test_module_hooks.py", "nn/test_multihead_attention.py", "nn/test_packed_sequence.py"),
    *("nn/test_parametrization.py", "nn/test_pooling.py", "nn/test_pruning.py"),
    *("functorch/test_vmap.py", "functorch/test_ops.py", "functorch/test_eager_transforms.py"),
    *("functorch/test_aotdispatch.py", "functorch/test_control_flow.py"),
)

# transformers runs some tests in a process of their own, by a path that it does not find.
_IN_ONE_PROCESS = {"_INSIDE_SUB_PROCESS": "1"}

_METRICS = (
    *("regression", "classification", "text", "image", "audio", "nominal", "clustering"),
    *("retrieval", "segmentation", "shape", "pairwise", "wrappers", "bases"),
)

SUITES = {
    "device": Suite(
        "PyTorch's device-generic tests",
        _DEVICE_GENERIC,
        _only("cpu"),
        _only("privateuse1"),
        match="DEV::",
        plugins=("older_names",),
    ),
    "inductor": Suite(
        "PyTorch's tests of Inductor, of tensors on the device",
        ("inductor/test_torchinductor.py",),
        Side({"JUDGE_BACKEND": "aot_eager"}, match="CpuTests::"),
        Side({"JUDGE_BACKEND": "webgpu"}, match="GPUTests::"),
        match="DEVTests::",
        plugins=("older_names", "instead_of_inductor"),
    ),
    "inductor-cpu": Suite(
        "PyTorch's tests of Inductor, of tensors on the CPU",
        ("inductor/test_torchinductor.py",),
        Side({"JUDGE_BACKEND": "aot_eager"}, match="CpuTests::"),
        Side({"JUDGE_BACKEND": "webgpu"}, match="CpuTests::"),
        match="DEVTests::",
        plugins=("older_names", "instead_of_inductor"),
    ),
    "kornia": Suite(
        "kornia's tests",
        ("tests",),
        Side({"JUDGE_DEVICE": "cpu"}, ("--device=cpu", "--dtype=float32")),
        Side({"JUDGE_DEVICE": "webgpu"}, ("--device=webgpu", "--dtype=float32")),
        match="DEV",
        plugins=("named_device",),
        conftest=True,
    ),
    "diffusers": Suite(
        "diffusers' fast tests",
        ("tests/models", "tests/pipelines", "tests/schedulers", "tests/hooks", "tests/lora"),
        Side({"DIFFUSERS_TEST_DEVICE": "cpu"}),
        Side({"DIFFUSERS_TEST_DEVICE": "webgpu"}),
        conftest=True,
        skipped_too=True,
    ),
    "transformers": Suite(
        "transformers' tests of all models",
        ("transformers_models.py",),
        Side({"TRANSFORMERS_TEST_DEVICE": "cpu", **_IN_ONE_PROCESS}),
        Side({"TRANSFORMERS_TEST_DEVICE": "webgpu", **_IN_ONE_PROCESS}),
        plugins=("transformers_mixin",),
        skipped_too=True,
    ),
    "accelerate": Suite(
        "accelerate's tests",
        ("tests",),
        Side({"JUDGE_DEVICE": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}),
        Side({"JUDGE_DEVICE": "webgpu"}),
        plugins=("hugging_face_device",),
        skipped_too=True,
    ),
    "peft": Suite(
        "peft's tests",
        ("tests",),
        Side({"JUDGE_DEVICE": "cpu"}),
        Side({"JUDGE_DEVICE": "webgpu"}),
        plugins=("hugging_face_device",),
        skipped_too=True,
    ),
    "torchmetrics": Suite(
        "torchmetrics' tests",
        tuple(f"tests/unittests/{folder}" for folder in _METRICS),
        Side({"JUDGE_DEVICE": "cpu"}),
        Side({"JUDGE_DEVICE": "webgpu"}),
        plugins=("named_device",),
        conftest=True,
    ),
}
"""By the name that the command takes."""
