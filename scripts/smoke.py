"""What an installed package has to do: compile, train on the device, export and run a bundle.

    python -I scripts/smoke.py FOLDER              writes a bundle into FOLDER
    python -I scripts/smoke.py --bundle FOLDER     runs the one that is there, without torch

`scripts/release` runs it on the wheel, in an environment that has nothing but what the wheel needs.
"""

from __future__ import annotations

import copy
import platform
import sys
from pathlib import Path

import numpy as np


def with_torch(folder: Path) -> str:
    """What was tried. Raises AssertionError where something differs from PyTorch on the CPU."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval()
    x = torch.randn(3, 8)
    expected = model(x)
    expected.square().mean().backward()
    close = torch.testing.assert_close

    with torch.no_grad():
        close(torch.compile(model, backend="webgpu")(x), expected.detach())

    on_device = copy.deepcopy(model).to("webgpu")
    on_device.zero_grad()
    result = on_device(x.to("webgpu"))
    result.square().mean().backward()
    close(result.cpu(), expected)
    for ours, theirs in zip(on_device.parameters(), model.parameters(), strict=True):
        close(ours.grad.cpu(), theirs.grad)

    import torch_webgpu_compile as package

    assert package.counters.dispatches > 0
    assert not package.counters.fallbacks, package.counters.fallbacks
    package.export(model, (x,), folder)
    np.savez(folder.with_suffix(".npz"), input=x.numpy(), output=expected.detach().numpy())
    return f"torch {torch.__version__}"


def with_bundle(folder: Path) -> None:
    """Raises AssertionError where a bundle computes something else than its model did."""
    import torch_webgpu_compile as package

    wanted = np.load(folder.with_suffix(".npz"))
    (found,) = package.load_bundle(folder).run("forward", input=wanted["input"]).values()
    np.testing.assert_allclose(found, wanted["output"], rtol=1.3e-6, atol=1e-5)
    repository = Path(__file__).resolve().parents[1] / "torch_webgpu_compile"
    assert not Path(package.__file__).resolve().is_relative_to(repository), "not the installed one"


def main(arguments: list[str]) -> None:
    """The command line."""
    folder = Path(arguments[-1])
    tried = "a bundle without torch" if "--bundle" in arguments else with_torch(folder)
    with_bundle(folder)
    version = sys.modules["torch_webgpu_compile"].__version__
    print(f"{version} on Python {platform.python_version()}, {tried}")


if __name__ == "__main__":
    main(sys.argv[1:])
