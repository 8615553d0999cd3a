"""Names of ``torch.cuda``, ``torch.mps`` and ``torch.xpu`` for what WebGPU cannot do.

Code that calls them gets to know why, and what to do instead; an AttributeError would say neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_NO_SENSORS = (
    "WebGPU tells nothing of a GPU's sensors and load",
    "ask the vendor's tool, such as nvidia-smi, rocm-smi, intel_gpu_top or powermetrics",
)
_NO_PROCESSES = (
    "WebGPU does not tell what other processes do with a GPU",
    "torch.webgpu.memory_reserved() is what this one has taken; for others ask the vendor's tool",
)
_NO_GRAPHS = (
    "WebGPU cannot capture commands and submit them again",
    'use torch.compile(model, backend="webgpu"): its calls replay commands that were made before',
)
_NO_ALLOCATORS = (
    "WebGPU's memory has no addresses, so that no other allocator can provide it",
    "torch.webgpu.set_memory_limit() bounds what is taken, empty_cache() gives back what is free",
)
_NO_OTHER_STREAMS = (
    "a WebGPU device has one queue, which no other library can share",
    "use torch.webgpu.current_stream()",
)
_NO_TRACES = (
    "WebGPU cannot start the tracing tool of a GPU's vendor",
    "use torch_webgpu_compile.profile() or torch.profiler, which time kernels",
)

_REASONS: dict[tuple[str, str], tuple[str, ...]] = {
    _NO_SENSORS: ("clock_rate", "memory_usage", "power_draw", "temperature", "utilization"),
    _NO_PROCESSES: ("device_memory_used", "memory.list_gpu_processes"),
    _NO_GRAPHS: ("graph", "graph_pool_handle", "make_graphed_callables"),
    _NO_ALLOCATORS: (
        "memory.MemPool",
        "memory.caching_allocator_alloc",
        "memory.caching_allocator_delete",
        "memory.change_current_allocator",
        "memory.use_mem_pool",
    ),
    _NO_OTHER_STREAMS: ("ExternalStream", "get_stream_from_external"),
    _NO_TRACES: ("profiler.start", "profiler.stop", "profiler.profile"),
    ("kernels for WebGPU are written in WGSL", "use torch_webgpu_compile.wgsl_op"): (
        "compile_shader",
    ),
}


def functions(prefix: str = "") -> dict[str, Callable[..., Any]]:
    """Functions by name that raise NotImplementedError when they are called.

    Args:
        prefix: of a submodule, ``memory.``; without one, the functions that are in none.
    """
    return {
        name.removeprefix(prefix): _refusing(name, cause, next_step)
        for (cause, next_step), names in _REASONS.items()
        for name in names
        if name.startswith(prefix) and "." not in name.removeprefix(prefix)
    }


def _refusing(name: str, cause: str, next_step: str) -> Callable[..., Any]:
    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError(f"torch.webgpu.{name}: {cause}; {next_step}")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = f"Not possible: {cause}; {next_step}.\n\nRaises NotImplementedError."
    return refuse
