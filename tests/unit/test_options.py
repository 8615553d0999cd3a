from __future__ import annotations

import pytest
import torch

from torch_webgpu_compile import options
from torch_webgpu_compile.errors import OptionError


def test_defaults():
    found = options.resolve(environment={})
    assert found == options.CompileOptions(cache=options.default_cache({}))


@pytest.mark.parametrize("value", ["1", 1, True])
def test_the_default_cache_is_asked_for(value):
    environment = {"TORCH_WEBGPU_CACHE": "0"}
    assert options.resolve(None, {"cache": value}, environment).cache == options.default_cache()
    assert options.from_environment({"TORCH_WEBGPU_CACHE": "1"}).cache == options.default_cache()


def test_environment_is_parsed():
    found = options.from_environment(
        {
            "TORCH_WEBGPU_DEBUG": "ir, wgsl",
            "TORCH_WEBGPU_DUMP": "/somewhere",
            "TORCH_WEBGPU_FALLBACK": "error",
            "TORCH_WEBGPU_CHECKED": "1",
            "TORCH_WEBGPU_CACHE": "0",
            "TORCH_WEBGPU_ADAPTER": "llvmpipe",
            "TORCH_WEBGPU_PROVIDER": "wgpudawn",
            "UNRELATED": "x",
        }
    )
    assert found.debug == {"ir", "wgsl"}
    assert found.dump == "/somewhere"
    assert found.fallback == "error"
    assert found.checked
    assert found.cache is None
    assert found.adapter == "llvmpipe"
    assert found.provider == "wgpudawn"


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("TORCH_WEBGPU_DEBUG", "fx,wgls", "wgsl"),
        ("TORCH_WEBGPU_FALLBACK", "warning", "warn, error, silent"),
        ("TORCH_WEBGPU_CHECKED", "yes", "0 or 1"),
        ("TORCH_WEBGPU_PROVIDER", "dawn", "wgpu, wgpudawn"),
        ("TORCH_WEBGPU_DEBUGG", "fx", "TORCH_WEBGPU_DEBUG"),
    ],
)
def test_misspelt_environment_lists_the_valid_ones(name, value, valid):
    with pytest.raises(OptionError, match=valid):
        options.from_environment({name: value})


def test_options_override_the_environment():
    environment = {"TORCH_WEBGPU_FALLBACK": "error", "TORCH_WEBGPU_CHECKED": "1"}
    found = options.resolve(None, {"fallback": "silent", "debug": ["fx"]}, environment)
    assert found.fallback == "silent"
    assert found.checked
    assert found.debug == {"fx"}


def test_unknown_option_lists_the_known_ones():
    with pytest.raises(OptionError, match=r"'fusio'.*fusion"):
        options.resolve(None, {"fusio": False}, {})


@pytest.mark.parametrize("mode", [None, *options.MODES])
def test_modes(mode):
    found = options.resolve(mode, None, {})
    assert found.autotune == (mode is not None and mode.startswith("max-autotune"))


def test_unknown_mode():
    with pytest.raises(OptionError, match="reduce-overhead"):
        options.resolve("fastest", None, {})


def test_torch_compile_hands_mode_and_options_over_as_keywords():
    seen = []

    def backend(module, inputs, **keywords):
        seen.append(keywords)
        return module.forward

    def double(x):
        return x * 2

    torch._dynamo.reset()
    for keywords in ({"mode": "max-autotune"}, {"options": {"fallback": "error"}}, {}):
        torch._dynamo.reset()
        torch.compile(double, backend=backend, **keywords)(torch.ones(2))
    assert seen == [{"mode": "max-autotune"}, {"options": {"fallback": "error"}}, {}]
