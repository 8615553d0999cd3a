"""The table of PyTorch's private names: who needs each, and what is lost without it.

A name is private if a component of its dotted path begins with an underscore, or if it is in
`UNDOCUMENTED`. Operators (``torch.ops.aten._to_copy``) are not: PyTorch keeps their schemas. Nor
does this count attributes of objects, such as ``tensor._version``: no import shows them.
"""

from __future__ import annotations

from enum import Enum, auto
from importlib import import_module
from typing import Any, NamedTuple

from .versions import TRIED

UNDOCUMENTED = ("functorch", "torch.fx.experimental")
"""Modules that are private although no underscore says so."""


class Loss(Enum):
    """What happens on a version of PyTorch without a name."""

    FATAL = auto()
    """Importing the module that needs it raises `MissingFromPyTorch`: nothing is compiled."""

    USE = auto()
    """What needs it raises `MissingFromPyTorch` when it is used; all else works."""

    REPLACED = auto()
    """It is None, and whoever needs it does something else."""


class Symbol(NamedTuple):  # cheaper to import than a dataclass, as ``import torch`` does
    """One private name.

    Attributes:
        path: the module, a colon, and the attribute in it; a module alone is the name itself.
        purpose: what needs it, for a person who reads that it is missing.
        name: under which `torch_private` has it.
        versions: of PyTorch, those that have it.
        is_variable: it changes, so that ``name`` is what it is an attribute of.
    """

    path: str
    purpose: str
    loss: Loss
    name: str
    versions: tuple[tuple[int, int], ...] = TRIED
    is_variable: bool = False

    @property
    def dotted(self) -> str:
        """The path as it is written in Python."""
        return self.path.replace(":", ".")


def _rows(
    module: str,
    names: str,
    purpose: str,
    loss: Loss = Loss.FATAL,
    versions: tuple[tuple[int, int], ...] = TRIED,
) -> list[Symbol]:
    """Rows of one module: ``path`` or ``path=name`` for each, divided by spaces."""
    rows = []
    for text in names.split():
        path, _, name = text.partition("=")
        whole = f"{module}:{path}" if path != "." else module
        rows.append(Symbol(whole, purpose, loss, name or path.rpartition(".")[2], versions))
    return rows


_CALLS_OF_SIZES = "conditions on sizes that are symbols"
_DISPATCH = "calling operators past some of PyTorch's dispatch keys"
_SKIPS = "keeping Dynamo from tracing this package"

SYMBOLS: dict[str, Symbol] = {
    row.name: row
    for row in (
        # ---- operators, nested values and modes
        *_rows(
            "torch._ops",
            "HigherOrderOperator OpOverload OpOverloadPacket",
            "telling operators from other functions, and their schemas",
        ),
        *_rows(
            "torch.utils._pytree",
            "TreeSpec tree_any tree_flatten tree_flatten_with_path tree_leaves tree_map "
            "tree_map_only tree_structure tree_unflatten",
            "arguments and results that are nested",
        ),
        *_rows(
            "torch.utils._python_dispatch",
            "TorchDispatchMode _disable_current_modes _pop_mode_temporarily "
            "is_traceable_wrapper_subclass",
            "recording the operators of a call",
        ),
        *_rows("torch._dispatch.python", "enable_python_dispatcher", "recording with symbols"),
        *_rows("torch.fx._lazy_graph_module", "_LazyGraphModule", "graphs without Python code"),
        *_rows("torch._prims", "convert_element_type", "operators on the parts of complex numbers"),
        *_rows("torch._prims_common", "suggest_memory_format", "layouts of what operators return"),
        *_rows("torch._refs", "linspace=linspace_reference", "`linspace`", Loss.USE),
        *_rows(
            "torch._decomp",
            "core_aten_decompositions decomposition_table",
            "decomposing operators into core ATen",
        ),
        *_rows("torch", "_check", "checks of sizes in operators of this package"),
        *_rows(
            "torch",
            "_disable_functionalization _enable_functionalization _from_functional_tensor "
            "_is_functional_tensor _sync _to_functional_tensor",
            "making recorded calls functional",
        ),
        # ---- functions of PyTorch that are operators
        *_rows("torch", "_int_mm", "quantized products", Loss.USE),
        *_rows("torch", "_neg_view", "tensors that are negated lazily", Loss.USE),
        *_rows(
            "torch",
            "_native_multi_head_attention _transformer_encoder_layer_fwd",
            "the fast path of `nn.TransformerEncoder`",
            Loss.USE,
        ),
        *_rows("torch._VF", "lstm=_lstm", "LSTMs", Loss.USE),
        *_rows("torch._C", "_nn.scaled_dot_product_attention", "attention", Loss.USE),
        # ---- fake tensors and symbols
        *_rows(
            "torch._subclasses.fake_tensor",
            "DataDependentOutputException DynamicOutputShapeException FakeTensor FakeTensorMode "
            "UnsupportedFakeTensorException UnsupportedOperatorException "
            "in_kernel_invocation_manager unset_fake_temporarily",
            "tracing on tensors without values",
        ),
        *_rows("torch._guards", "TracingContext detect_fake_mode", "the state of a compilation"),
        *_rows(
            "torch.fx.experimental.symbolic_shapes",
            "DimDynamic GuardOnDataDependentSymNode ShapeEnv StrictMinMaxConstraint "
            "free_unbacked_symbols resolve_unbacked_bindings guard_or_false statically_known_true",
            _CALLS_OF_SIZES,
        ),
        *_rows("torch.fx.experimental._config", ".=shapes_config", _CALLS_OF_SIZES),
        *_rows(
            "torch.fx.experimental.proxy_tensor",
            "make_fx",
            "the score functions of `flex_attention`",
            Loss.USE,
        ),
        *_rows(
            "torch.utils._sympy.functions",
            "CeilDiv CleanDiv FloatPow FloatTrueDiv FloorDiv FloorToInt Identity IntTrueDiv Max "
            "Min Mod ModularIndexing OpaqueUnaryFn_sqrt PowByNatural PythonMod ToFloat TruncToInt",
            "arithmetic on sizes",
        ),
        *_rows("torch.utils._sympy.numbers", "int_oo", _CALLS_OF_SIZES),
        *_rows("torch.utils._sympy.printers", "PythonPrinter", "arithmetic on sizes"),
        *_rows("torch.utils._sympy.value_ranges", "ValueRanges", _CALLS_OF_SIZES),
        # ---- Dynamo and AOTAutograd
        *_rows("torch._dynamo.backends.common", "aot_autograd", "graphs of Dynamo"),
        *_rows(
            "torch._dynamo.backends.registry",
            "_BACKENDS",
            "the name of the backend, where the package is not installed",
            Loss.REPLACED,
        ),
        *_rows("torch._dynamo.callback", "callback_handler", "opening the GPU while Dynamo traces"),
        *_rows("torch._dynamo", "config=dynamo_config", "Dynamo's settings"),
        *_rows("torch._dynamo.eval_frame", "skip_code", _SKIPS),
        *_rows("torch._dynamo.utils", "counters=dynamo_counters", "`explain`", Loss.USE),
        *_rows(
            "torch._dynamo.precompile_context",
            "BackendCacheArtifact PrecompileContext",
            "PyTorch's precompile cache",
        ),
        *_rows("torch._dynamo.source", "ConstantSource RandomValueSource", _CALLS_OF_SIZES),
        *_rows(
            "torch._C._dynamo.eval_frame",
            "_FrameAction _FrameExecStrategy set_code_exec_strategy",
            _SKIPS,
        ),
        *_rows(
            "torch._C._dynamo.guards",
            "TensorGuards",
            "the known calls of the device",
        ),
        *_rows(
            "torch._C._dynamo.guards",
            "_empty_strided_cpu",
            "results in host memory, a few microseconds faster",
            Loss.REPLACED,
        ),
        *_rows(
            "functorch.compile",
            "min_cut_rematerialization_partition",
            "what a backward graph computes again",
        ),
        *_rows("torch._functorch.partitioners", "_size_of", "what a backward graph computes again"),
        *_rows(
            "torch.compiler",
            "_compile_session_context",
            "knowing that Dynamo says itself that it compiles",
            Loss.REPLACED,
            versions=((2, 13), (2, 14)),
        ),
        *_rows(
            "torch._functorch._aot_autograd.schemas",
            "MutationType OutputType",
            "arguments that a graph changes or returns",
        ),
        *_rows(
            "torch._higher_order_ops.auto_functionalize",
            "AsStridedViewInfo SliceViewInfo get_mutable_args read_view_information_from_args",
            "custom operators that change their arguments",
            Loss.USE,
        ),
        *_rows(
            "torch._higher_order_ops.flex_attention",
            "_permute_strides sdpa_dense sdpa_dense_backward",
            "`flex_attention`",
            Loss.USE,
        ),
        # ---- the dispatcher
        *_rows(
            "torch._C",
            "DisableTorchFunction DispatchKey DispatchKeySet _AutoDispatchBelowADInplaceOrView "
            "_DisableAutocast _DisableTorchDispatch _ExcludeDispatchKeyGuard "
            "_ForceDispatchKeyGuard _dispatch_get_all_op_names "
            "_dispatch_get_registrations_for_dispatch_key "
            "_dispatch_has_computed_kernel_for_dispatch_key _dispatch_has_kernel_for_dispatch_key "
            "_dispatch_tls_local_exclude_set _dispatch_tls_local_include_set "
            "_len_torch_dispatch_stack _should_allow_numbers_as_tensors",
            _DISPATCH,
        ),
        *_rows(
            "torch._C._functorch",
            "is_functorch_wrapped_tensor",
            "telling tensors of `torch.func` transforms",
        ),
        *_rows(
            "torch._C._autograd",
            "_top_saved_tensors_default_hooks",
            "keeping what a backward graph needs, where no hook reads it",
            Loss.REPLACED,
        ),
        *_rows("torch._C", "_current_autograd_node", "errors of backward passes"),
        Symbol(
            "torch.autograd.forward_ad:_current_level",
            "telling forward-mode derivatives",
            Loss.FATAL,
            "forward_ad",
            is_variable=True,
        ),
        *_rows(
            "torch.autograd.grad_mode",
            "_unsafe_preserve_version_counter",
            "writes that autograd is not to see",
        ),
        *_rows(
            "torch.amp.autocast_mode",
            "_enter_autocast _exit_autocast",
            "graphs with regions of autocast",
            Loss.USE,
        ),
        *_rows("torch._C", "_is_any_autocast_enabled", "graphs with regions of autocast"),
        # ---- tensors and storages in C++
        *_rows("torch._C", "Generator StorageBase TensorBase", "what C++ knows of a tensor"),
        *_rows("torch", "Tensor._make_wrapper_subclass", "tensors of the device"),
        *_rows("torch", "Tensor._use_count", "memory of results that nobody else has"),
        *_rows("torch._C", "_storage_Use_Count", "memory of results that nobody else has"),
        *_rows("torch._C", "_construct_storage_from_data_pointer", "tensors of the device"),
        *_rows(
            "torch",
            "ops.aten.set_.source_Storage_storage_offset._handle.redispatch_boxed=set_storage_boxed",
            "tensors of the device",
        ),
        *_rows("torch._C", "_autograd.DeviceType", "the device's number in C++"),
        *_rows("torch._C", "_LinAlgError", "errors of factorizations"),
        # ---- settings and builds
        *_rows(
            "torch._C",
            "_SDPBackend _get_cudnn_sdp_enabled _get_flash_sdp_enabled _get_math_sdp_enabled "
            "_get_mem_efficient_sdp_enabled _get_overrideable_sdp_enabled _get_sdp_priority_order",
            "which attention is allowed",
        ),
        *_rows("torch._C", "_get_deterministic_algorithms", "deterministic kernels"),
        *_rows(
            "torch._C",
            "_get_mkldnn_enabled _get_nnpack_enabled _set_mkldnn_enabled _set_nnpack_enabled",
            "graphs for any size",
        ),
        *_rows(
            "torch._C",
            "_ensureCUDADeviceGuardSet",
            "compiling in several threads where PyTorch has CUDA and there is no GPU of it",
            Loss.USE,
        ),
        *_rows("torch._C", "_get_privateuse1_backend_name", "registering the device"),
        *_rows(
            "torch",
            "cuda._is_compiled=cuda_is_compiled xpu._is_compiled=xpu_is_compiled",
            "not asking for accelerators that PyTorch was built without",
            Loss.REPLACED,
        ),
        *_rows(
            "torch.utils.backend_registration",
            "_setup_privateuseone_for_python_backend",
            "registering the device",
        ),
    )
}


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
