"""The table of PyTorch's private names: who needs each, and what is lost without it.

A name is private if a component of its dotted path begins with an underscore, or if it is in
`UNDOCUMENTED`. Operators (``torch.ops.aten._to_copy``) are not: PyTorch keeps their schemas. Nor
does this count attributes of objects, such as ``tensor._version`` or an operator's ``_op_dk``: no
import shows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from importlib import import_module
from typing import Any, NamedTuple

UNDOCUMENTED = ("functorch", "torch.fx.experimental")
"""Modules that are private although no underscore says so."""


class Loss(Enum):
    """What happens on a version of PyTorch without a name."""

    FATAL = auto()
    """Importing the module that needs it raises `PyTorchVersionError`."""

    USE = auto()
    """What needs it raises `PyTorchVersionError` when it is used; all else works.

    In ``except`` and ``isinstance`` it matches nothing.
    """

    REPLACED = auto()
    """It is None, and whoever needs it does something else."""


class Symbol(NamedTuple):  # cheaper to import than a dataclass, as ``import torch`` does
    """One private name.

    Attributes:
        path: the module, a colon, and the attribute in it.
        purpose: what needs it, for a person who reads that it is missing.
        name: under which `torch_private` has it.
        is_variable: it changes, so that ``name`` is what it is an attribute of.
    """

    path: str
    purpose: str
    loss: Loss
    name: str
    is_variable: bool = False

    @property
    def dotted(self) -> str:
        """The path as it is written in Python."""
        return self.path.replace(":", ".")


# Each table: the module; its names, as ``path`` or ``path=name``; what needs them.
# Without one of these nothing is compiled, or there is no device.
_FATAL = (
    # operators, nested values, modes
    ("torch._ops", "HigherOrderOperator OpOverload OpOverloadPacket", "knowing operators"),
    (
        "torch.utils._pytree",
        "TreeSpec tree_any tree_flatten tree_leaves tree_map tree_map_only tree_structure "
        "tree_unflatten",
        "arguments and results that are nested",
    ),
    (
        "torch.utils._python_dispatch",
        "TorchDispatchMode _disable_current_modes _pop_mode_temporarily "
        "is_traceable_wrapper_subclass",
        "recording the operators of a call",
    ),
    ("torch._dispatch.python", "enable_python_dispatcher", "recording the operators of a call"),
    ("torch.fx._lazy_graph_module", "_LazyGraphModule", "recording the operators of a call"),
    (
        "torch",
        "_disable_functionalization _enable_functionalization _from_functional_tensor "
        "_is_functional_tensor _sync _to_functional_tensor",
        "recording in-place operators as functional ones",
    ),
    ("torch._decomp", "core_aten_decompositions decomposition_table", "decompositions"),
    ("torch._prims", "convert_element_type", "decompositions"),
    ("torch._prims_common", "suggest_memory_format", "layouts of what operators return"),
    ("torch", "_check", "checks of sizes in operators of this package"),
    # fake tensors and symbols
    (
        "torch._subclasses.fake_tensor",
        "FakeTensor FakeTensorMode unset_fake_temporarily",
        "tracing on tensors without values",
    ),
    ("torch._guards", "TracingContext detect_fake_mode", "tracing on tensors without values"),
    (
        "torch.fx.experimental.symbolic_shapes",
        "DimDynamic ShapeEnv guard_or_false statically_known_true",
        "sizes that are symbols",
    ),
    ("torch._dynamo.source", "ConstantSource RandomValueSource", "sizes that are symbols"),
    (
        "torch.utils._sympy.functions",
        "CeilDiv CleanDiv FloatPow FloatTrueDiv FloorDiv FloorToInt Identity IntTrueDiv Max Min "
        "Mod ModularIndexing OpaqueUnaryFn_sqrt PowByNatural PythonMod ToFloat TruncToInt",
        "arithmetic on sizes",
    ),
    ("torch.utils._sympy.numbers", "int_oo", "arithmetic on sizes"),
    ("torch.utils._sympy.printers", "PythonPrinter", "arithmetic on sizes"),
    ("torch.utils._sympy.value_ranges", "ValueRanges", "arithmetic on sizes"),
    # Dynamo and AOTAutograd
    ("torch._dynamo.backends.common", "aot_autograd", "graphs of Dynamo"),
    ("functorch.compile", "aot_module_simplified", "graphs of Dynamo"),
    ("torch._dynamo", "config=dynamo_config", "graphs of Dynamo"),
    ("torch._dynamo", "compiled_autograd", "gradients that Dynamo traces"),
    (
        "torch._functorch._aot_autograd.schemas",
        "MutationType OutputType",
        "arguments that a graph changes or returns",
    ),
    (
        "torch._C._dynamo.eval_frame",
        "_FrameAction _FrameExecStrategy set_code_exec_strategy",
        "keeping Dynamo from tracing this package",
    ),
    # the dispatcher
    (
        "torch._C",
        "DisableTorchFunction DispatchKey DispatchKeySet _AutoDispatchBelowADInplaceOrView "
        "_DisableAutocast _DisableTorchDispatch _ExcludeDispatchKeyGuard _ForceDispatchKeyGuard "
        "_dispatch_get_all_op_names _dispatch_get_registrations_for_dispatch_key "
        "_dispatch_has_computed_kernel_for_dispatch_key _dispatch_has_kernel_for_dispatch_key "
        "_dispatch_tls_local_exclude_set _dispatch_tls_local_include_set "
        "_is_any_autocast_enabled _len_torch_dispatch_stack _should_allow_numbers_as_tensors",
        "kernels that PyTorch's dispatcher calls, and calling it",
    ),
    ("torch.autograd.forward_ad", "_current_level=forward_ad", "knowing forward-mode derivatives"),
    ("torch._C._functorch", "is_functorch_wrapped_tensor", "knowing tensors of `torch.func`"),
    ("torch._C", "_get_deterministic_algorithms", "deterministic kernels"),
    # the device
    ("torch._C", "_get_privateuse1_backend_name", "registering the device"),
    (
        "torch.utils.backend_registration",
        "_setup_privateuseone_for_python_backend",
        "registering the device",
    ),
    ("torch._C", "_autograd.DeviceType", "registering the device"),
    (
        "torch._C",
        "Generator StorageBase TensorBase _construct_storage_from_data_pointer _storage_Use_Count",
        "tensors of the device",
    ),
    ("torch", "Tensor._make_wrapper_subclass Tensor._use_count", "tensors of the device"),
    ("torch._C._dynamo.guards", "TensorGuards", "eager calls that were seen before"),
    (
        "torch._C",
        "_SDPBackend _get_cudnn_sdp_enabled _get_flash_sdp_enabled _get_math_sdp_enabled "
        "_get_mem_efficient_sdp_enabled _get_overrideable_sdp_enabled _get_sdp_priority_order",
        "attention on the device",
    ),
)

# Without one of these what needs it raises an error, and all else works.
_USE = (
    ("functorch.compile", "min_cut_rematerialization_partition", "compiled training"),
    ("torch._functorch", "config=functorch_config", "compiled training"),
    ("torch._functorch.partitioners", "_size_of", "compiled training with attention masks"),
    (
        "torch._functorch._aot_autograd.runtime_wrappers",
        "AOTDispatchAutograd CachedAutogradLazyBackwardCompileInfo",
        "training graphs that a process before has compiled",
    ),
    ("torch.autograd.grad_mode", "_unsafe_preserve_version_counter", "optimizers on lists"),
    ("torch._C", "_current_autograd_node", "`torch.autograd.detect_anomaly`"),
    ("torch._C", "_LinAlgError", "errors of factorizations"),
    ("torch._C", "_ensureCUDADeviceGuardSet", "compiling in threads with a PyTorch for CUDA"),
    ("torch._C", "_nn.scaled_dot_product_attention", "attention in compiled graphs"),
    ("torch._VF", "lstm=_lstm", "compiled LSTMs"),
    ("torch", "_int_mm", "quantized products"),
    ("torch", "_neg_view", "tensors that are negated lazily"),
    (
        "torch",
        "_native_multi_head_attention _transformer_encoder_layer_fwd",
        "the fast path of `nn.TransformerEncoder`",
    ),
    ("torch._refs", "linspace=linspace_reference", "compiled `linspace`"),
    ("torch.amp.autocast_mode", "_enter_autocast _exit_autocast", "autocast in compiled graphs"),
    ("torch.fx.experimental.proxy_tensor", "make_fx", "score functions of attention"),
    (
        "torch._higher_order_ops.flex_attention",
        "_permute_strides sdpa_dense sdpa_dense_backward",
        "`flex_attention`",
    ),
    (
        "torch._higher_order_ops.auto_functionalize",
        "AsStridedViewInfo SliceViewInfo get_mutable_args read_view_information_from_args",
        "custom operators that change their arguments",
    ),
    (
        "torch.fx.experimental.symbolic_shapes",
        "free_unbacked_symbols",
        "sizes that data decides",
    ),
    (
        "torch._subclasses.fake_tensor",
        "DataDependentOutputException DynamicOutputShapeException UnsupportedFakeTensorException "
        "UnsupportedOperatorException",
        "sizes that data decides",
    ),
    (
        "torch.fx.experimental.symbolic_shapes",
        "GuardOnDataDependentSymNode StrictMinMaxConstraint",
        "`export`",
    ),
    ("torch.fx.experimental", "_config=shapes_config", "`export`"),
    ("torch.utils._pytree", "tree_flatten_with_path", "`export`"),
    (
        "torch._C",
        "_get_mkldnn_enabled _get_nnpack_enabled _set_mkldnn_enabled _set_nnpack_enabled",
        "`export`, and compiled LSTMs",
    ),
    ("torch.storage", "_LegacyStorage _dtype_to_storage_type_map", "`torch.webgpu.FloatStorage`"),
    ("torch._dynamo.utils", "counters=dynamo_counters", "`explain`"),
    (
        "torch._dynamo.precompile_context",
        "BackendCacheArtifact PrecompileContext",
        "PyTorch's precompile cache",
    ),
    (
        "torch._functorch._aot_autograd.autograd_cache",
        "BundledAOTAutogradCacheArtifact",
        "`aot_compile`",
    ),
    (
        "torch._functorch._aot_autograd.schemas",
        "SerializableAOTDispatchCompiler",
        "`aot_compile`",
    ),
    ("torch._inductor.output_code", "OutputCode", "`aot_compile`"),
    ("torch._dynamo.aot_compile_types", "SerializableCallable", "`aot_compile`"),
)

# Without one of these its user does something else: it is None.
_REPLACED = (
    (
        "torch._C._dynamo.guards",
        "_empty_strided_cpu",
        "results in host memory, a few microseconds faster",
    ),
    (
        "torch._C._autograd",
        "_top_saved_tensors_default_hooks",
        "saving less for a backward graph, where no hook reads it",
    ),
    ("torch.compiler", "_compile_session_context", "knowing that Dynamo says that it compiles"),
    ("torch._dynamo.exc", "FailOnRecompileLimitHit Unsupported", "steps of `generate`"),
    ("torch._dynamo.callback", "callback_handler", "opening the GPU while Dynamo traces; its time"),
    ("torch._dynamo.eval_frame", "skip_code", "keeping Dynamo from hooks of optimizers"),
    (
        "torch._dynamo.backends.registry",
        "_BACKENDS",
        "telling Dynamo of the backend, where the package is not installed",
    ),
    (
        "torch._functorch._aot_autograd.runtime_wrappers",
        "AOTDispatchAutogradCompileSpec",
        "training graphs that a process before has compiled; it is newer than they are",
    ),
    (
        "torch",
        "cuda._is_compiled=cuda_is_compiled xpu._is_compiled=xpu_is_compiled",
        "not asking for accelerators that PyTorch was built without",
    ),
)

_VARIABLES = {"forward_ad"}


def _rows() -> Iterator[Symbol]:
    for loss, table in ((Loss.FATAL, _FATAL), (Loss.USE, _USE), (Loss.REPLACED, _REPLACED)):
        for module, names, purpose in table:
            for text in names.split():
                path, _, other = text.partition("=")
                name = other or path.rpartition(".")[2]
                yield Symbol(f"{module}:{path}", purpose, loss, name, name in _VARIABLES)


SYMBOLS = {row.name: row for row in _rows()}


def resolve(symbol: Symbol) -> Any:
    """Imports what a row names.

    Raises:
        ImportError, AttributeError: this version of PyTorch has no such name.
    """
    module, _, attributes = symbol.path.partition(":")
    found: Any = import_module(module)
    owner = found
    for attribute in filter(None, attributes.split(".")):
        owner, found = found, getattr(found, attribute)
    return owner if symbol.is_variable else found
