"""`CompileOptions`: every setting of a compilation, and the only place that reads the environment.

===============================  ====================  ==========================================
environment                      ``options={...}``     meaning
===============================  ====================  ==========================================
``TORCH_WEBGPU_DEBUG``           ``"debug"``           comma-separated stages to print to stderr:
                                                       fx, ir, schedule, wgsl, plan, or the name of
                                                       any pass of the compiler (`DEBUG_STAGES`)
``TORCH_WEBGPU_DUMP``            ``"dump"``            folder that gets a folder per graph
``TORCH_WEBGPU_FALLBACK``        ``"fallback"``        an operator without a kernel: warn (default),
                                                       error, silent
``TORCH_WEBGPU_CHECKED``         ``"checked"``         1: kernels keep the bounds checks
``TORCH_WEBGPU_CACHE``           ``"cache"``           folder of compiled plans, of what Dawn made
                                                       and of what was measured, by default in the
                                                       user's cache folder (`default_cache`);
                                                       0: none, 1: the default
``TORCH_WEBGPU_ADAPTER``         –                     part of the adapter's name, or its number
``TORCH_WEBGPU_PROVIDER``        –                     auto (default), wgpu or wgpudawn; see
                                                       `runtime.adapters.choose_provider`
``TORCH_WEBGPU_DEVICE``          –                     1: the device is known even beside CUDA,
                                                       0: never; see `device.autoload`
``TORCH_WEBGPU_PROGRESS``        ``"progress"``        a compilation of more than 2 s says so on
                                                       stderr: auto (default) on a terminal, 1
                                                       always, 0 never
``TORCH_WEBGPU_TRAINERS``        –                     0: accelerate, Trainer and Lightning do not
                                                       take the device; see `device.patches`
``TORCH_WEBGPU_HOLD_CLOCK``      –                     1: an NVIDIA GPU keeps its clock up between
                                                       calls; see `runtime.nvidia_clock`
–                                ``"fusion"``          False: one kernel per node (debugging)
–                                ``"target"``          a GPU that need not be here: a `Target`, or a
                                                       file of ``doctor --save-target``
===============================  ====================  ==========================================

``options`` override the environment. The adapter and the provider belong to the process, not to one
compilation, so they have no key in ``options``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from .errors import OptionError
from .target import Target

DEBUG_STAGES = (
    *("replace_attention", "replace_calls", "inline_operators", "keep_seeds"),
    *("recompute_constants", "recompute_masks", "split_log_softmax", "merge_common_calls"),
    *("take_views", "take_forwarded", "divide", "take_numbers", "take_seeds", "separate_complex"),
    *("fx", "ir"),
    *("store_float16_in_words", "split_attention", "drop_unit_symbols", "eliminate_common_nodes"),
    *("find_causal_masks", "bound_keys_by_mask", "recompute_statistics", "forward_cache_writes"),
    *("inline_producers", "choose_layouts", "split_contractions", "split_weight_gradients"),
    *("precompute_bf16_scales", "split_reductions", "hoist_parameter_work", "one_group_per_node"),
    *("fuse", "write_in_place", "order_groups", "join_connected_maps", "join_foreach"),
    *("join_small_maps", "repeat_lanes", "join_pairs", "join_siblings", "join_small_kernels"),
    *("harden", "schedule", "choose_tilings", "wgsl", "plan"),
)
"""``fx`` is the captured graph, ``schedule`` the last result of those passes that regroup kernels;
the others are the passes of `capture.graph.passes.CAPTURE_PASSES` and of `compiler.PASSES`."""
FALLBACK_POLICIES = ("warn", "error", "silent")
AUTO = "auto"
PROVIDERS = (AUTO, "wgpu", "wgpudawn")
PROGRESS_POLICIES = ("auto", "1", "0")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Settings of one compilation; see the module's table.

    Attributes:
        debug: stages whose results are printed to stderr.
        dump: folder for dumps, None for none.
        fallback: policy for operators that have no kernel.
        checked: keep the checks in kernels that the compiler has proved unnecessary.
        cache: folder of compiled plans and measurements, None for no cache on disk.
        progress: whether a long compilation says how far it is: ``auto``, ``1`` or ``0``.
        fusion: fuse nodes into common kernels.
        target: what to compile for, as `bundle.targets.target_of` takes it; None for the GPU here.
        mode: ``torch.compile``'s mode, one of `MODES`.
        adapter: part of the wanted adapter's name or its index, "" for the best one; several, with
            commas, are those of ``webgpu:0``, ``webgpu:1`` and so on.
        provider: the WebGPU implementation, one of `PROVIDERS`.
        deterministic: results are the same bits in every run.
        fill_empty: ``torch.empty`` gives NaN and largest integers.
        in_place: an argument that is the only one to change shares no memory with others, so that
            it may be written where it is.

    PyTorch has switches of its own for the two before the last: see `tensors.determinism`. The last
    one is what is known of an eager call.
    """

    debug: frozenset[str] = frozenset()
    dump: str | None = None
    fallback: str = "warn"
    checked: bool = False
    cache: str | None = None
    progress: str = "auto"
    fusion: bool = True
    target: str | Target | None = None
    mode: str = "default"
    adapter: str = ""
    provider: str = AUTO
    deterministic: bool = False
    fill_empty: bool = False
    in_place: bool = False

    @property
    def runs_every_stage(self) -> bool:
        """Whether somebody reads what stages give, or measures kernels: none may be left out."""
        return bool(self.debug) or self.dump is not None or self.autotune

    def shows(self, stage: str) -> bool:
        """Whether somebody wants to read what a stage gave."""
        return self.dump is not None or stage in self.debug

    @property
    def adapters(self) -> list[str]:
        """The wanted adapters, one for each ``webgpu`` device; empty where none is asked for."""
        return [part.strip() for part in self.adapter.split(",") if part.strip()]

    @property
    def first_adapter(self) -> str:
        """The wanted adapter of what is not a ``webgpu`` device; "" for the best one."""
        return next(iter(self.adapters), "")

    @property
    def autotune(self) -> bool:
        """Whether kernels may be chosen by measurement at compile time."""
        return self.mode.startswith("max-autotune")


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"{name}={value!r} is not valid; use one of: {', '.join(choices)}")
    return value


def _stages(name: str, value: Any) -> frozenset[str]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise OptionError(f"{name}={value!r} is not a list of: {', '.join(DEBUG_STAGES)}")
    return frozenset(_choice(name, stage, DEBUG_STAGES) for stage in value if stage != "")


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value in (0, 1, "0", "1"):
        return bool(int(value))
    raise OptionError(f"{name}={value!r} is not valid; use 0 or 1")


def _folder(name: str, value: Any) -> str | None:
    if value is None or isinstance(value, (str, os.PathLike)):
        path = "" if value is None else os.fspath(value)
        return path or None
    raise OptionError(f"{name}={value!r} is not a path")


def _target(name: str, value: Any) -> str | Target | None:
    return value if isinstance(value, Target) else _folder(name, value)


def _cache(name: str, value: Any) -> str | None:
    if value in (0, 1, "0", "1"):
        return default_cache() if _flag(name, value) else None
    return _folder(name, value)


_USER_CACHES = {"win32": ("LOCALAPPDATA", "AppData/Local"), "darwin": ("", "Library/Caches")}


def default_cache(
    environment: Mapping[str, str] | None = None, platform: str = sys.platform
) -> str | None:
    """The default of ``TORCH_WEBGPU_CACHE``: a folder, which need not exist; None without a home.

    None for root in the home folder of another user, too: folders that root makes there would shut
    that user out.
    """
    variables = os.environ if environment is None else environment
    name, below_home = _USER_CACHES.get(platform, ("XDG_CACHE_HOME", ".cache"))
    caches = variables.get(name, "")
    if not os.path.isabs(caches):  # the standard says so of XDG_CACHE_HOME
        home = os.path.expanduser("~")
        if not _is_own_home(home):
            return None
        caches = os.path.join(home, below_home)
    return os.path.join(caches, "torch_webgpu_compile", "plans")


@cache
def _is_own_home(home: str) -> bool:
    """Whether a home folder is there and this user's, asked once: each fallback reads options."""
    try:
        status = os.stat(home)
    except OSError:
        return False
    is_of_another = os.name == "posix" and os.geteuid() == 0 != status.st_uid
    return os.path.isabs(home) and not is_of_another


def _progress(name: str, value: Any) -> str:
    return _choice(
        name, str(int(value)) if isinstance(value, (bool, int)) else value, PROGRESS_POLICIES
    )


Parser = Callable[[str, Any], Any]

_ENVIRONMENT: dict[str, tuple[str, Parser]] = {
    "TORCH_WEBGPU_DEBUG": ("debug", _stages),
    "TORCH_WEBGPU_DUMP": ("dump", _folder),
    "TORCH_WEBGPU_FALLBACK": ("fallback", partial(_choice, choices=FALLBACK_POLICIES)),
    "TORCH_WEBGPU_CHECKED": ("checked", _flag),
    "TORCH_WEBGPU_CACHE": ("cache", _cache),
    "TORCH_WEBGPU_PROGRESS": ("progress", _progress),
    "TORCH_WEBGPU_ADAPTER": ("adapter", lambda _, value: str(value)),
    "TORCH_WEBGPU_PROVIDER": ("provider", partial(_choice, choices=PROVIDERS)),
}
_NOT_OPTIONS = ("adapter", "provider")  # they belong to the process
_OPTIONS: dict[str, Parser] = {
    **{field: parse for field, parse in _ENVIRONMENT.values() if field not in _NOT_OPTIONS},
    "fusion": _flag,
    "target": _target,
}

# Flags of the process: `device.autoload`, `device.patches.accelerator` and `holds_clock` read them.
_HOLD_CLOCK = "TORCH_WEBGPU_HOLD_CLOCK"
_OF_THE_PROCESS = ("TORCH_WEBGPU_DEVICE", "TORCH_WEBGPU_TRAINERS", _HOLD_CLOCK)


def holds_clock() -> bool:
    """Whether an NVIDIA GPU is to keep its clock up. Raises OptionError for another value."""
    return _flag(_HOLD_CLOCK, os.environ.get(_HOLD_CLOCK) or "0")


def from_environment(environment: Mapping[str, str] | None = None) -> CompileOptions:
    """The options that environment variables ask for; an empty value counts as unset.

    Raises OptionError for a value that is not valid, or an unknown ``TORCH_WEBGPU_*`` name.
    """
    variables = os.environ if environment is None else environment
    found: dict[str, Any] = {}
    for name, value in variables.items():
        if not name.startswith("TORCH_WEBGPU_") or value == "":
            continue
        if name in _OF_THE_PROCESS:
            _flag(name, value)
            continue
        if name not in _ENVIRONMENT:
            known = ", ".join(sorted([*_ENVIRONMENT, *_OF_THE_PROCESS]))
            raise OptionError(f"unknown environment variable {name}; known: {known}")
        field, parse = _ENVIRONMENT[name]
        found[field] = parse(name, value)
    if "cache" not in found:
        found["cache"] = default_cache(variables)
    return CompileOptions(**found)


def resolve(
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> CompileOptions:
    """The options of ``torch.compile(mode=mode, options=options)`` over the environment's.

    Raises OptionError for an unknown mode, key or value.
    """
    found: dict[str, Any] = {}
    if mode is not None:
        found["mode"] = _choice("mode", mode, MODES)
    for key, value in (options or {}).items():
        if key not in _OPTIONS:
            raise OptionError(f"unknown option {key!r}; known: {', '.join(sorted(_OPTIONS))}")
        found[key] = _OPTIONS[key](key, value)
    return replace(from_environment(environment), **found)
