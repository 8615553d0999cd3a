"""The table of patches of PyTorch and other libraries, and how they are installed.

Each patch is a file of a folder ``patches``. Its docstring has three paragraphs that begin with
``Patched:``, what is replaced; ``Why:``, what happens without it; and ``Until:``, the condition
under which the file can go. At the time that its row names it is imported, which installs the
functions that it declares to be `around` others, and its ``install`` is called, if it has one.
Nothing else of other libraries is replaced in this package; ``tests/unit/test_patches.py`` looks.

They reach into what may change with any version, so each may fail. One that does is left out with a
warning that says what no longer works, and nothing else fails for it, unless its row is critical.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from .errors import PyTorchVersionError

_PACKAGE = __name__.rpartition(".")[0]


class When(Enum):
    """The time at which a patch is installed. Other libraries are patched after their import."""

    BEFORE_DEVICE = "before PyTorch knows the device, at the end of ``import torch``"
    DEVICE = "as soon as PyTorch knows the device"
    KERNELS = "before the first operator on the device"
    AUTOCAST = "before ``torch.autocast`` is first used on the device"
    BACKEND = "when Dynamo loads the backend"
    CAPTURE = "as long as a graph is captured; ``install`` is a context"


class Patch(NamedTuple):
    """A row of the table.

    Attributes:
        module: the file, as a module of this package.
        critical: without it the process would end, so there is no device.
    """

    module: str
    when: When
    critical: bool = False

    @property
    def name(self) -> str:
        """The name of its file."""
        return self.module.rpartition(".")[2]

    @property
    def full(self) -> str:
        """The file, as ``import`` names it."""
        return f"{_PACKAGE}.{self.module}"


def _of_device(names: str, when: When = When.DEVICE, critical: bool = False) -> list[Patch]:
    return [Patch(f"device.patches.{name}", when, critical) for name in names.split()]


# In this order.
TABLE = (
    *_of_device("guard storage_methods", When.BEFORE_DEVICE, critical=True),
    *_of_device(
        # PyTorch
        "pinning accelerator generic_streams sending process_groups data_parallel copies_between "
        "default_backend several_devices uninitialized_parameters "
        # libraries
        "safetensors accelerate transformers transformers_models speculation decoding generation "
        "sampling continuous_batching serving gguf torchao lightning random_states "
        # PyTorch
        "generator_class precompiling cache_artifacts device_mesh compiled_optimizers "
        "flex_attention grad_scaler nested_attention associative_scan collect_env legacy_profiler "
        "inductor lstm_cells dlpack backward_thread"
    ),
    *_of_device("printing distributed", When.KERNELS),
    *_of_device("autocast_cache", When.AUTOCAST),
    Patch("capture.patches.dynamo_defaults", When.BACKEND),
    Patch("capture.patches.compiling_flag", When.CAPTURE),
    Patch("capture.patches.region_schemas", When.CAPTURE),
    Patch("capture.patches.autograd_functions", When.CAPTURE),
    Patch("capture.patches.own_rules", When.CAPTURE),
    Patch("capture.patches.fusible_operators", When.CAPTURE),
)

_warned: set[str] = set()


def install(when: When) -> None:
    """Installs the patches of a time; warns of those that cannot be.

    Raises:
        PyTorchVersionError: one of them is critical.
    """
    for patch in TABLE:
        if patch.when is not when:
            continue
        try:
            module = import_module(patch.full)
            if hasattr(module, "install"):
                module.install()
        except Exception as error:
            if patch.critical:
                raise PyTorchVersionError(
                    f"its patch {patch.name!r} of PyTorch cannot be installed "
                    f"({type(error).__name__}: {error}). {_why(patch.full)}"
                ) from error
            _leave_out(patch.full, error)


def attempt(patch: str, function: Callable[[], object]) -> None:
    """Calls a function that is a part of a patch; warns of the patch, once, if it fails.

    Args:
        patch: the patch's module.
    """
    try:
        function()
    except Exception as error:
        _leave_out(patch, error)


@contextmanager
def replaced(
    patch: str, owner: Callable[[], Any], name: str, make: Callable[[Any], Any]
) -> Iterator[None]:
    """Has ``owner().name`` be ``make(original)`` as long as the context.

    What fails at it is left out, with one warning.

    Args:
        patch: the patch's module.
    """
    try:
        holder = owner()
        original = getattr(holder, name)
        value = make(original)
    except Exception as error:
        _leave_out(patch, error)
        yield
        return
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, original)


def warn(message: str) -> None:
    """Warns, unless the message is "". Where warnings are errors, it prints: no import of PyTorch
    or another library may fail for one.
    """
    if not message:
        return
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning as error:
        print(f"RuntimeWarning: {error}", file=sys.stderr)


def _leave_out(patch: str, error: Exception) -> None:
    """Warns of a patch that fails, once."""
    name = patch.rpartition(".")[2]
    if name in _warned:
        return
    _warned.add(name)
    warn(
        f"torch-webgpu-compile goes on without its patch {name!r}, as what it patches has other "
        f"insides in this version ({type(error).__name__}: {error}). {_why(patch)} Update "
        "torch-webgpu-compile, or report this"
    )


def _why(patch: str) -> str:
    """The paragraph ``Why:`` of a patch, which says what happens without it."""
    try:
        loader: Any = find_spec(patch).loader  # type: ignore[union-attr]
        source = loader.get_source(patch)  # not `__doc__`, which there may not be
        paragraphs = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")
    except Exception:
        return "Without it something else may fail."
    whys = [" ".join(text.split()) for text in paragraphs if text.startswith("Why:")]
    return whys[0] if whys else paragraphs[0]
