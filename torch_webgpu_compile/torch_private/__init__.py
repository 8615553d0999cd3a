"""PyTorch's private names: the only module that imports them, but for patches (`patches.table`).

PyTorch may rename or drop any of them in any version. Each is a row of `symbols.SYMBOLS`, which
says what needs it and what is lost without it. ``from ..torch_private import OpOverload`` imports
PyTorch's module then, and not before: so this module costs nothing where no name is asked for.

A new name is a row, and a line below for the type checker; ``tests/unit/test_torch_private.py``
compares them, and says who imports a private name elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .missing import stand_in
from .symbols import SYMBOLS, resolve

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    from functorch.compile import aot_module_simplified, min_cut_rematerialization_partition
    from torch import (
        Tensor,
        _check,
        _disable_functionalization,
        _enable_functionalization,
        _from_functional_tensor,
        _int_mm,
        _is_functional_tensor,
        _native_multi_head_attention,
        _neg_view,
        _to_functional_tensor,
        _transformer_encoder_layer_fwd,
    )
    from torch._C import (
        DisableTorchFunction,
        DispatchKey,
        DispatchKeySet,
        Generator,
        StorageBase,
        TensorBase,
        _AutoDispatchBelowADInplaceOrView,
        _construct_storage_from_data_pointer,
        _current_autograd_node,
        _DisableAutocast,
        _DisableTorchDispatch,
        _dispatch_get_all_op_names,
        _dispatch_get_registrations_for_dispatch_key,
        _dispatch_has_computed_kernel_for_dispatch_key,
        _dispatch_has_kernel_for_dispatch_key,
        _dispatch_tls_local_exclude_set,
        _dispatch_tls_local_include_set,
        _ensureCUDADeviceGuardSet,
        _ExcludeDispatchKeyGuard,
        _ForceDispatchKeyGuard,
        _get_cudnn_sdp_enabled,
        _get_deterministic_algorithms,
        _get_flash_sdp_enabled,
        _get_math_sdp_enabled,
        _get_mem_efficient_sdp_enabled,
        _get_mkldnn_enabled,
        _get_nnpack_enabled,
        _get_overrideable_sdp_enabled,
        _get_privateuse1_backend_name,
        _get_sdp_priority_order,
        _is_any_autocast_enabled,
        _len_torch_dispatch_stack,
        _SDPBackend,
        _set_mkldnn_enabled,
        _set_nnpack_enabled,
        _should_allow_numbers_as_tensors,
        _storage_Use_Count,
    )
    from torch._C._autograd import DeviceType
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )
    from torch._C._dynamo.guards import TensorGuards
    from torch._C._functorch import is_functorch_wrapped_tensor
    from torch._C._nn import scaled_dot_product_attention
    from torch._decomp import core_aten_decompositions, decomposition_table
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo import compiled_autograd
    from torch._dynamo import config as dynamo_config
    from torch._dynamo.aot_compile_types import SerializableCallable
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
    from torch._dynamo.precompile_context import BackendCacheArtifact, PrecompileContext
    from torch._dynamo.source import ConstantSource, RandomValueSource
    from torch._dynamo.utils import counters as dynamo_counters
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.autograd_cache import (  # type: ignore[attr-defined]
        BundledAOTAutogradCacheArtifact,
    )
    from torch._functorch._aot_autograd.runtime_wrappers import (
        AOTDispatchAutograd,
        CachedAutogradLazyBackwardCompileInfo,
    )
    from torch._functorch._aot_autograd.schemas import (
        MutationType,
        OutputType,
        SerializableAOTDispatchCompiler,
    )
    from torch._functorch.partitioners import _size_of
    from torch._guards import TracingContext, detect_fake_mode
    from torch._higher_order_ops.auto_functionalize import (
        AsStridedViewInfo,
        SliceViewInfo,
        get_mutable_args,
        read_view_information_from_args,
    )
    from torch._higher_order_ops.flex_attention import (
        _permute_strides,
        sdpa_dense,
        sdpa_dense_backward,
    )
    from torch._inductor.output_code import OutputCode
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from torch._prims import convert_element_type
    from torch._prims_common import suggest_memory_format
    from torch._refs import linspace as linspace_reference
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
        unset_fake_temporarily,
    )
    from torch._VF import lstm as _lstm
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
    from torch.autograd import forward_ad
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter
    from torch.fx._lazy_graph_module import _LazyGraphModule
    from torch.fx.experimental import _config as shapes_config
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        GuardOnDataDependentSymNode,
        ShapeEnv,
        StrictMinMaxConstraint,
        free_unbacked_symbols,
        guard_or_false,
        statically_known_true,
    )
    from torch.storage import _dtype_to_storage_type_map, _LegacyStorage
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _disable_current_modes,
        _pop_mode_temporarily,
        is_traceable_wrapper_subclass,
    )
    from torch.utils._pytree import (
        TreeSpec,
        tree_any,
        tree_flatten,
        tree_flatten_with_path,
        tree_leaves,
        tree_map,
        tree_map_only,
        tree_structure,
        tree_unflatten,
    )
    from torch.utils._sympy.functions import (
        CeilDiv,
        CleanDiv,
        FloatPow,
        FloatTrueDiv,
        FloorDiv,
        FloorToInt,
        Identity,
        IntTrueDiv,
        Max,
        Min,
        Mod,
        ModularIndexing,
        OpaqueUnaryFn_sqrt,
        PowByNatural,
        PythonMod,
        ToFloat,
        TruncToInt,
    )
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.printers import PythonPrinter
    from torch.utils._sympy.value_ranges import ValueRanges
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    # Their stubs lack these, or they may be None.
    AOTDispatchAutogradCompileSpec: Callable[..., Any] | None
    _BACKENDS: dict[str, Any] | None
    _compile_session_context: Callable[..., Any] | None
    _empty_strided_cpu: Callable[..., Tensor] | None
    _LinAlgError: type[Exception]
    _make_wrapper_subclass: Callable[..., Any]
    _sync: Callable[[Tensor], None]
    _top_saved_tensors_default_hooks: Callable[[bool], object] | None
    _use_count: Callable[[Tensor], int]
    callback_handler: Any
    cuda_is_compiled: Callable[[], bool] | None
    skip_code: Callable[[CodeType], None] | None
    xpu_is_compiled: Callable[[], bool] | None
else:

    def __getattr__(name):
        symbol = SYMBOLS.get(name)
        if symbol is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            found = resolve(symbol)
        except (ImportError, AttributeError):  # perhaps only until PyTorch is imported whole
            return stand_in(symbol)
        globals()[name] = found
        return found
