"""Options of compiled functions: modes, the plan cache, dumps, fallbacks, and errors."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import torch_webgpu_compile
from tests.compiling import compiled
from tests.providers import has_float64
from torch_webgpu_compile import counters
from torch_webgpu_compile.errors import OptionError, UnsupportedOp
from torch_webgpu_compile.options import DEBUG_STAGES
from torch_webgpu_compile.plan import cache as plan_cache

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modes(mode):
    x = torch.randn(4, 4)
    torch.testing.assert_close(compiled(lambda x: x.exp().sum(0), mode=mode)(x), x.exp().sum(0))


def test_without_fusion():
    def f(x):
        return torch.softmax(x * 2 + 1, -1).sum(0)

    x = torch.randn(4, 9)
    compiled(f)(x)
    fused = counters.dispatches
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(f, options={"fusion": False})(x), f(x))
    assert counters.dispatches - fused > fused


def test_checked_kernels():
    x = torch.randn(4, 9)
    got = compiled(lambda x: x.sum(0), options={"checked": True})(x)
    torch.testing.assert_close(got, x.sum(0))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"mode": "fast"}, "max-autotune"),
        ({"options": {"falback": "warn"}}, "fallback"),
        ({"options": {"fallback": "loud"}}, "silent"),
    ],
)
def test_wrong_options(keywords, message):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message) as info:
        compiled(lambda x: x + 1, **keywords)(torch.ones(2))
    assert isinstance(info.value.inner_exception, OptionError)


def test_plans_are_cached(tmp_path):
    def f(x):
        return torch.softmax(x * 3 + 2, -1)

    x = torch.randn(5, 11)
    for hits, forget in ((0, True), (1, True), (2, False)):
        torch._dynamo.reset()
        torch.testing.assert_close(compiled(f, options={"cache": str(tmp_path)})(x), f(x))
        assert counters.plan_cache_hits == hits
        if forget:
            plan_cache.clear()
    assert len(list(tmp_path.glob("*.plan"))) == 1


def test_a_damaged_cache_is_ignored(tmp_path):
    def f(x):
        return torch.softmax(x * 5 + 2, -1)

    x = torch.randn(5, 11)
    compiled(f, options={"cache": str(tmp_path)})(x)
    (file,) = tmp_path.glob("*.plan")
    file.write_text("{")
    plan_cache.clear()
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(f, options={"cache": str(tmp_path)})(x), f(x))
    assert counters.plan_cache_hits == 0


def test_dump(tmp_path):
    compiled(lambda x: torch.softmax(x * 7, -1), options={"dump": str(tmp_path)})(torch.ones(2, 3))
    (folder,) = tmp_path.iterdir()
    names = {path.name for path in folder.iterdir()}
    assert {"00_fx.txt", "01_ir.txt", "plan.json"} <= names
    stages = [name[3:-4] for name in sorted(names) if name.endswith(".txt")]
    assert stages == sorted(stages, key=DEBUG_STAGES.index)
    assert {"fuse", "order_groups", "plan"} <= set(stages)
    (wgsl,) = folder.glob("*.wgsl")
    text = wgsl.read_text()
    assert "aten._softmax.default" in text
    assert "test_compiled_options.py" in text


def test_debug_prints(capsys):
    compiled(lambda x: x * 9, options={"debug": ["ir", "plan"]})(torch.ones(2))
    printed = capsys.readouterr().err
    assert ": ir" in printed
    assert ": plan" in printed
    assert ": wgsl" not in printed


# ---- fallbacks and failures


def unsupported(x):
    return torch.linalg.eigvalsh(x @ x.t()) + 1


def test_a_fallback_warns_once_and_is_counted():
    from torch_webgpu_compile import fallbacks

    fallbacks.reset_warnings()
    x = torch.randn(4, 4)
    with pytest.warns(
        torch_webgpu_compile.FallbackWarning, match=r"eigh.*test_compiled_options"
    ) as w:
        got = compiled(unsupported)(x)
    assert (w[0].filename, w[0].lineno) == (__file__, unsupported.__code__.co_firstlineno + 1)
    torch.testing.assert_close(got, unsupported(x), atol=1e-4, rtol=1e-4)
    assert sum(counters.fallbacks.values()) == 1
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(unsupported)(x)


def test_a_fallback_of_an_eager_call_warns_once_at_its_line():
    from torch_webgpu_compile import fallbacks
    from torch_webgpu_compile.device.eager import dispatch

    fallbacks.reset_warnings()
    dispatch.forget()
    x = torch.randn(4, 4)
    with pytest.warns(torch_webgpu_compile.FallbackWarning) as w:
        unsupported(x.to("webgpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if has_float64():
            unsupported(x.to("webgpu", torch.float64))
    (warning,) = w
    assert str(warning.message).count("has no WebGPU kernel") == 1
    assert (warning.filename, warning.lineno) == (
        __file__,
        unsupported.__code__.co_firstlineno + 1,
    )


def test_a_misspelt_environment_value_is_one_clear_error(monkeypatch):
    monkeypatch.setenv("TORCH_WEBGPU_FALLBACK", "wran")
    with pytest.raises(OptionError, match=r"TORCH_WEBGPU_FALLBACK='wran'.*warn, error, silent"):
        torch_webgpu_compile.explain(torch.sin, torch.ones(3))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"OptionError.*'wran'"):
        compiled(torch.sin)(torch.ones(3))


def test_other_programs_are_only_warned_of_a_misspelt_environment_value(monkeypatch):
    """PyTorch asks for accelerators in the middle of anything."""
    from torch_webgpu_compile.tensors import devices

    monkeypatch.setenv("TORCH_WEBGPU_FALLBACK", "wran")
    monkeypatch.setattr(devices, "_ordinals", None)
    with pytest.warns(RuntimeWarning, match="no webgpu device: TORCH_WEBGPU_FALLBACK"):
        assert torch.webgpu.device_count() == 0


def test_a_fallback_can_be_an_error():
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as info:
        compiled(unsupported, options={"fallback": "error"})(torch.randn(4, 4))
    error = info.value.inner_exception
    assert isinstance(error, UnsupportedOp)
    assert "eigh" in error.op
    assert "float32" in error.cause
    assert "test_compiled_options.py" in error.source


def test_a_silent_fallback():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(unsupported, options={"fallback": "silent"})(torch.randn(4, 4))


def test_a_failed_call_leaves_the_function_usable(monkeypatch):
    from torch_webgpu_compile.runtime.device import Device

    model = nn.Linear(4, 4)
    f = compiled(model)
    x = torch.randn(2, 4)
    with torch.no_grad():
        f(x)
        with monkeypatch.context() as patch:

            def fail(*_):
                raise torch_webgpu_compile.DeviceError("no")

            patch.setattr(Device, "start_download", fail)
            with pytest.raises(torch_webgpu_compile.DeviceError):
                f(x)
        torch.testing.assert_close(f(x), model(x))


def test_a_failed_call_leaves_buffers_as_they_were(monkeypatch):
    from torch_webgpu_compile.runtime.device import Device

    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.zeros(8, 4))

        def forward(self, x, at):
            self.rows[at] = x  # where it is on the GPU, before the download fails
            return self.rows.sum(0)

    def fail(*_):
        raise torch_webgpu_compile.DeviceError("no")

    model, twin = Cache(), Cache()
    f, x = compiled(model), torch.ones(1, 4)
    with torch.no_grad():
        for place, is_failing in ((1, False), (2, True), (3, False)):
            with monkeypatch.context() as patch:
                if is_failing:
                    patch.setattr(Device, "start_download", fail)
                    with pytest.raises(torch_webgpu_compile.DeviceError):
                        f(x, torch.tensor([place]))
                else:
                    at = torch.tensor([place])
                    torch.testing.assert_close(f(x, at), twin(x, at))
        torch.testing.assert_close(model.rows, twin.rows)


def test_other_devices_are_refused():
    x = torch.ones(2, device="meta")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"meta.*\.cpu\(\)"):
        compiled(lambda x: x + 1)(x)
