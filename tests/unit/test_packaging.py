"""The wheel: what is in it, and what it tells PyTorch."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.rotates(2)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_the_whole_package(wheel: zipfile.ZipFile) -> None:
    package = ROOT / "torch_webgpu_compile"
    suffixes = {".py", ".jinja", ".typed", ".js", ".ts", ".html", ".css", ".json", ".txt"}
    expected = {
        path.relative_to(ROOT).as_posix() for path in package.rglob("*") if path.suffix in suffixes
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == expected
    assert any(name.endswith(".wgsl.jinja") for name in packed)


def test_wheel_registers_the_backend(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    text = wheel.read(name).decode()
    assert "[torch_dynamo_backends]\nwebgpu = torch_webgpu_compile.backend:webgpu" in text


def test_wheel_says_what_it_needs(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    lines = wheel.read(name).decode().splitlines()
    needed = {line for line in lines if line.startswith("Requires-Dist") and "extra" not in line}
    assert {line.split()[1].split(">")[0] for line in needed} == {
        "jinja2",
        "numpy",
        "safetensors",
        "torch",
        "wgpu",
    }


def test_importing_the_package_is_light() -> None:
    """Neither Dynamo nor a WebGPU implementation, which open the GPU's driver."""
    code = """
import sys, torch, torch_webgpu_compile
heavy = {"wgpu", "jinja2", "torch._dynamo", "torch._inductor"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
