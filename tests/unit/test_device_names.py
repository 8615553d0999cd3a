"""Every public name of the modules of PyTorch's own devices: it is here, or there is a reason."""

from __future__ import annotations

import importlib
import inspect
import re
from types import ModuleType
from typing import Any

import pytest
import torch

webgpu: Any = torch.webgpu  # type: ignore[attr-defined]

# What torch.webgpu does not have, and why: names as regular expressions.
ABSENT = {
    r"\w+(Storage|Tensor)": "types of before PyTorch 0.4",
    r"(max_)?memory_cached|reset_max_memory_\w+|(current|set)_device_idx": "deprecated there",
    r"\w*(CUDA|XPU|Cuda|cuda|Green|Deferred)\w*|check_error|current_(blas|solver)_handle": "CUDA's",
    r"gds|green_contexts|has_half|has_magma|jiterator|nccl|nvtx|sparse|tunable": "CUDA's",
    r"get_(arch_list|gencode_flags|allocator_backend)|caching_allocator_(dis|en)able\w*": "CUDA's",
    r"graphs|Graph|graph_annotations|export_(dot|graph_data)": "of CUDA graphs: see `graph`",
    r"load_metallib|event": "Metal's",
    r"amp_definitely_not_available": "an inner function of PyTorch's",
    r"AcceleratorError": "errors of this device are torch_webgpu_compile.DeviceError",
    r"(current_)?(accelerator|device_index)|set_device_index": "torch.accelerator's alone",
    r"empty_host_cache|get_memory_info": "torch.accelerator's names of what is here",
}


def _public(module: ModuleType) -> set[str]:
    """What a module lists as its own, or has defined itself."""
    listed = set(getattr(module, "__all__", ()))
    own = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and getattr(value, "__module__", "").startswith(module.__name__)
    }
    return listed | own


@pytest.mark.parametrize("name", ["cuda", "mps", "xpu", "accelerator"])
def test_names_of_other_devices(name: str) -> None:
    names = _public(importlib.import_module(f"torch.{name}"))
    assert len(names) > 10
    missing = {name for name in names if name not in webgpu.__all__}
    assert not {name for name in missing if not any(re.fullmatch(a, name) for a in ABSENT)}


def test_only_public_names_are_listed() -> None:
    assert {name for name in dir(webgpu) if not name.startswith("__")} == set(webgpu.__all__)
    assert all(hasattr(webgpu, name) for name in webgpu.__all__)


@pytest.mark.parametrize("name", ["amp", "memory", "profiler", "random", "streams"])
def test_submodules(name: str) -> None:
    module = importlib.import_module(f"torch.webgpu.{name}")
    assert getattr(webgpu, name) is module
    of_cuda = importlib.import_module(f"torch.cuda.{name}")
    listed = set(getattr(of_cuda, "__all__", ())) or {"Event", "Stream"}
    missing = listed - set(dir(module))
    assert not {name for name in missing if not any(re.fullmatch(a, name) for a in ABSENT)}


def test_backends() -> None:
    module: Any = importlib.import_module("torch.backends.webgpu")
    assert torch.backends.webgpu is module  # type: ignore[attr-defined]
    assert module.is_built()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("temperature", "sensors.*nvidia-smi"),
        ("memory.list_gpu_processes", "other processes.*memory_reserved"),
        ("make_graphed_callables", 'capture commands.*torch.compile.model, backend="webgpu"'),
        ("memory.MemPool", "no other allocator.*set_memory_limit"),
        ("ExternalStream", "one queue.*current_stream"),
        ("compile_shader", "WGSL.*wgsl_op"),
        ("profiler.start", "tracing tool.*profile"),
    ],
)
def test_what_webgpu_cannot_do_says_so(name: str, message: str) -> None:
    place, _, last = name.rpartition(".")
    function = getattr(getattr(webgpu, place) if place else webgpu, last)
    with pytest.raises(NotImplementedError, match=rf"torch\.webgpu\.{name}: .*{message}"):
        function(1, device="webgpu")
    assert message.split(".")[0] in function.__doc__
