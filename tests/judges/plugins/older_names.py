"""A pytest plugin: what the tests of older versions of PyTorch expect and newer have no more.

The tests themselves are not changed. What a name did is of no importance here: float32 products at
another precision on NVIDIA's or Intel's units, marks that say which tests fail there.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch


def _no() -> bool:
    return False


def _unchanged(*_: Any, **__: Any) -> Any:
    return lambda function: function


def _mark(op: str, variant: str = "", *, device_type: Any = None, dtypes: Any = None) -> Any:
    return (op, variant, device_type, dtypes, False)


def _binary() -> Any:
    module = importlib.import_module("torch.testing._internal.common_methods_invocations")
    return list(module.binary_ufuncs)


def _modules() -> Any:
    module = importlib.import_module("torch.testing._internal.common_nn")
    return module.get_new_module_tests()


_METHODS = "common_methods_invocations"
# For each name: the module, what it is there, and the tests that import it. Some of the modules
# take seconds to import, so only the tests that need them do.
_NAMES = {
    "tf32_is_not_fp32": ("common_cuda", lambda: _no, ("test",)),
    "bf32_on_and_off": ("common_mkldnn", lambda: _unchanged, ("test",)),
    "binary_ufuncs_and_refs": (_METHODS, _binary, ("test_binary_ufuncs",)),
    "skip": (_METHODS, lambda: _mark, ("test_ops", "test_decomp", "test_vmap", "test_aot")),
    "xfail": (_METHODS, lambda: _mark, ("test_ops", "test_decomp", "test_vmap", "test_aot")),
    "skipOps": (_METHODS, lambda: _unchanged, ("test_ops", "test_decomp", "test_vmap", "test_aot")),
    "new_module_tests": ("common_nn", _modules, ("test_nn.py",)),
}

for _name, (_module, _make, _tests) in _NAMES.items():
    if any(test in argument for test in _tests for argument in sys.argv):
        _holder = importlib.import_module(f"torch.testing._internal.{_module}")
        if not hasattr(_holder, _name):
            setattr(_holder, _name, _make())

_fx: Any = (
    importlib.import_module("torch._inductor.compile_fx")
    if any("inductor" in argument for argument in sys.argv)
    else torch
)
if _fx is not torch and not hasattr(_fx, "complex_memory_overlap"):
    _fx.complex_memory_overlap = None

_EVERYWHERE = ("test_aotdispatch", "test_proxy_tensor")

_devices: Any = importlib.import_module("torch.testing._internal.common_device_type")
_instantiate = _devices.instantiate_device_type_tests


def _instantiate_here(
    generic: type, scope: dict[str, Any], except_for: Any = None, only_for: Any = None, **more: Any
) -> None:
    """As the original, but what is for CPUs and CUDA is for this device, too.

    Older versions took the methods out of the generic class: ``super(self.__class__, self)`` does
    not end now. The classes that say so only set what is about CUDA.
    """
    for name in ("setUp", "tearDown"):
        method: Any = vars(generic).get(name)
        if method is not None and "__class__" in method.__code__.co_names:
            delattr(generic, name)
    if only_for == "cpu":  # as it is slow, but for the few that are about the CPU's kernels
        everywhere = any(test in argument for test in _EVERYWHERE for argument in sys.argv)
        only_for = None if everywhere else only_for
    elif only_for is not None and {"cpu", "cuda"} <= {*only_for}:
        only_for = None
    _instantiate(generic, scope, except_for=except_for, only_for=only_for, **more)


_devices.instantiate_device_type_tests = _instantiate_here
