"""A pytest plugin: PyTorch's tests of Inductor with another backend wherever they call Inductor.

``JUDGE_BACKEND`` names it: ``webgpu``, or ``aot_eager``, which fails where a test is about Inductor
itself. "GPU" in these tests is the device ``webgpu``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch._inductor.compile_fx as compile_fx_module
import torch.testing._internal.inductor_utils as inductor_utils
from torch._dynamo.backends import registry

registry.lookup_backend("inductor")  # which registers it, once
_call: Any = registry.lookup_backend(os.environ["JUDGE_BACKEND"])


def _compile_fx(model: Any, example_inputs: Any, *_: Any, **__: Any) -> Any:
    return _call(model, example_inputs)


class _Wrapper(torch._TorchCompileInductorWrapper):  # type: ignore[misc]
    def __call__(self, model_: Any, inputs_: Any) -> Any:
        return _call(model_, inputs_)


_utils: Any = inductor_utils
_utils.HAS_CPU = _utils.RUN_CPU = True
_utils.HAS_GPU = _utils.RUN_GPU = True
_utils.HAS_MULTIGPU = False
_utils.GPU_TYPE = "webgpu"
_module: Any = compile_fx_module
_module.compile_fx = _compile_fx
_registry: Any = registry
_registry._COMPILER_FNS["inductor"] = _compile_fx
_torch: Any = torch
_torch._TorchCompileInductorWrapper = _Wrapper
