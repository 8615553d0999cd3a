"""Operators that users write in WGSL, beside the same in PyTorch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from examples import wgsl_op as example
from tests.compiling import compiled
from torch_webgpu_compile import ShaderError, counters, export, load_bundle, wgsl_op
from torch_webgpu_compile.options import from_environment
from torch_webgpu_compile.runtime.device import device_for

pytestmark = [pytest.mark.rotates(2), pytest.mark.usefixtures("fresh")]

ROOT = Path(__file__).parents[2]
PLACES = ["cpu", "webgpu"]

swish = wgsl_op(
    "gpu_tests::swish",
    "fn swish(x: f32, beta: f32) -> f32 { return x / (1.0 + exp(-beta * x)); }",
)
swish.register_gradient(
    """
    fn swish_backward(x: f32, beta: f32) -> vec2f {
      let s = 1.0 / (1.0 + exp(-beta * x));
      return vec2f(s + x * beta * s * (1.0 - s), x * x * s * (1.0 - s));
    }
    """
)
cubed = wgsl_op("gpu_tests::cubed", "fn cubed(x: f32) -> f32 { return x * x * x; }")
cubed.register_gradient(lambda grad, x: grad * 3 * x * x)
parts = wgsl_op(
    "gpu_tests::parts",
    """
    struct Parts { whole: i32, rest: f32, negative: bool }
    fn parts(x: f32, scale: i32) -> Parts {
      let scaled = x * f32(scale);
      return Parts(i32(trunc(scaled)), scaled - trunc(scaled), scaled < 0.0);
    }
    """,
)
blur = wgsl_op(
    "gpu_tests::blur",
    """
    @group(0) @binding(0) var<storage, read> x: array<f32>;
    @group(0) @binding(1) var<storage, read_write> y: array<f32>;
    @group(0) @binding(2) var<storage, read_write> sums: array<f32>;
    struct Numbers { rows: u32, columns: u32, weight: f32, each: f32 }
    @group(0) @binding(3) var<uniform> n: Numbers;
    @compute @workgroup_size(32) fn blur(@builtin(global_invocation_id) id: vec3u) {
      if (id.x >= n.rows) { return; }
      var sum = 0.0;
      for (var k = 0u; k < n.columns; k++) {
        let here = x[id.x * n.columns + k];
        var before = 0.0;
        if (k > 0) { before = x[id.x * n.columns + k - 1]; }
        y[id.x * n.columns + k] = here + n.weight * before;
        sum += here;
      }
      sums[id.x] = sum * n.each;
    }
    """,
    outputs=lambda x, weight=0.5: [x.shape, x.shape[:1]],
    grid=lambda x, weight: -(-x.shape[0] // 32),
    uniforms=lambda x, weight: {
        "rows": x.shape[0],
        "columns": x.shape[1],
        "each": 1 / x.shape[1],
    },
)


def swish_reference(x: Tensor, beta: Any) -> Tensor:
    return x / (1 + torch.exp(-beta * x))


def blur_reference(x: Tensor, weight: float = 0.5) -> tuple[Tensor, Tensor]:
    return x + weight * torch.nn.functional.pad(x, (1, 0))[:, :-1], x.mean(1)


def close(got: Any, wanted: Any, **tolerances: float) -> None:
    for one, other in zip(*map(torch.utils._pytree.tree_leaves, (got, wanted)), strict=True):
        torch.testing.assert_close(one.cpu(), other, equal_nan=True, **tolerances)


SPECIAL = torch.tensor([0.0, -0.0, 1.0, -3.5, torch.inf, -torch.inf, torch.nan, 1e-40, 88.0])
TENSORS: dict[str, Tensor] = {
    "special": SPECIAL,
    "matrix": torch.randn(7, 13, generator=torch.manual_seed(0)),
    "strided": torch.randn(8, 30)[1::2, 3::3],
    "transposed": torch.randn(5, 6, 7).permute(2, 0, 1),
    "expanded": torch.randn(3, 1).expand(3, 4),
    "empty": torch.randn(0, 3),
    "number": torch.tensor(1.5),
    "half": torch.randn(33).half(),
    "bfloat16": torch.randn(33).bfloat16(),
    "integers": torch.arange(-5, 6),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "bools": torch.tensor([True, False, True]),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TENSORS)
def test_elementwise(name: str, place: str) -> None:
    x = TENSORS[name]
    wide = x.float() if x.dtype.itemsize < 4 or not x.is_floating_point() else x
    wanted = swish_reference(wide, 1.5).to(x.dtype if x.is_floating_point() else torch.float32)
    given = x.to(place)
    own = swish(given, 1.5)
    assert own.device.type == place
    assert own.stride() == (given + 0.0).stride()
    close(own, wanted)
    close(compiled(lambda x: swish(x, 1.5))(given), wanted)
    fused = compiled(lambda x: torch.relu(swish(x, 1.5)).float() + 1)(given)
    close(fused, torch.relu(swish_reference(wide, 1.5)) + 1, rtol=1e-2, atol=1e-2)


def test_broadcasting_and_dtypes() -> None:
    x, beta = torch.randn(4, 1, 5).half(), torch.rand(3, 1)
    close(swish(x.to("webgpu"), beta.to("webgpu")), swish_reference(x.float(), beta))
    close(swish(x=x.to("webgpu"), beta=1), swish_reference(x.float(), 1).half())


@pytest.mark.parametrize("place", PLACES)
def test_several_results(place: str) -> None:
    x, scale = torch.randn(5, 7), torch.tensor([-2, 0, 1, 2, 3, 100, 7], dtype=torch.int8)
    scaled = x * scale
    whole = scaled.trunc()
    wanted = whole.int(), scaled - whole, scaled < 0
    given = x.to(place), scale.to(place)
    close(parts(*given), wanted)
    close(compiled(lambda x, scale: parts(x, scale))(*given), wanted)
    close(compiled(lambda x, scale: parts(x, scale)[2])(*given), wanted[2])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients(dtype: torch.dtype, place: str) -> None:
    draw = torch.manual_seed(0)
    x = torch.randn(6, 5, generator=draw).to(dtype)
    beta = torch.rand(5, generator=draw) + 0.5

    def gradients(function: Callable[..., Tensor], *arguments: Tensor) -> tuple[Tensor, ...]:
        leaves = [a.detach().requires_grad_() for a in arguments]
        return torch.autograd.grad((torch.tanh(function(*leaves).float()) * 3).sum(), leaves)

    of_x, of_beta = gradients(swish_reference, x.float(), beta)
    wanted = of_x.to(dtype), of_beta
    tolerances = {"rtol": 2e-3, "atol": 2e-3} if dtype is torch.float16 else {}
    given = x.to(place), beta.to(place)
    close(gradients(swish, *given), wanted, **tolerances)
    close(gradients(compiled(swish), *given), wanted, **tolerances)


@pytest.mark.parametrize("place", PLACES)
def test_second_derivatives(place: str) -> None:
    x = torch.randn(5, device=place, requires_grad=True)
    (first,) = torch.autograd.grad(cubed(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    close(second, 6 * x.detach().cpu())
    (first,) = torch.autograd.grad(swish(x, 1.0).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(first.sum(), x)


@pytest.mark.parametrize("place", PLACES)
def test_vmap(place: str) -> None:
    x, beta = torch.randn(3, 4, 5), torch.rand(5, 4)
    each = torch.vmap(swish, (2, 0))(x.to(place), beta.to(place))
    close(each, torch.vmap(swish_reference, (2, 0))(x, beta))
    both = torch.vmap(lambda x: parts(x, 2))(x.to(place))
    close(both[0], (x * 2).trunc().int())
    function = compiled(torch.vmap(lambda x: swish(x, 2.0) + 1))
    close(function(x.to(place)), swish_reference(x, 2.0) + 1)


@pytest.mark.parametrize("place", PLACES)
def test_symbolic_sizes(place: str) -> None:
    """One plan for all sizes, and no number of a size in it."""
    function = compiled(lambda x: (blur(swish(x, x.shape[0])), x), dynamic=True)
    before = counters.plans_compiled
    for rows, columns in ((4, 5), (33, 2), (70, 9)):
        x = torch.randn(rows, columns)
        own, _ = function(x.to(place))
        close(own, blur_reference(swish_reference(x, rows)))
    assert counters.plans_compiled == before + 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["matrix", "strided", "expanded", "empty", "shifted"])
def test_kernels(name: str, place: str) -> None:
    x = torch.randn(90)[5:].reshape(17, 5) if name == "shifted" else TENSORS[name]
    wanted = blur_reference(x, 0.25)
    given = x.to(place)[:]
    if name == "shifted":
        given = torch.cat([x.flatten()[:5], x.flatten()]).to(place)[5:].reshape(17, 5)
    if not x.numel():
        wanted = x, x.sum(1)
    close(blur(given, 0.25), wanted)
    close(compiled(lambda x: blur(x, weight=0.25))(given), wanted)
    y = compiled(lambda x: torch.relu(blur(x * 2)[0]) + 1)(given)
    close(y, torch.relu(blur_reference(x * 2)[0]) + 1)


def test_kernels_in_autograd_and_vmap() -> None:
    moved = wgsl_op(
        "gpu_tests::scaled",
        """
        @group(0) @binding(0) var<storage, read> x: array<f32>;
        @group(0) @binding(1) var<storage, read_write> y: array<f32>;
        struct N { count: u32, by: f32 } @group(0) @binding(2) var<uniform> n: N;
        @compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3u) {
          if (id.x < n.count) { y[id.x] = n.by * x[id.x]; }
        }
        """,
        outputs=lambda x, by: x.shape,
        grid=lambda x, by: -(-x.numel() // 64),
        uniforms=lambda x, by: {"count": x.numel()},
    )

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.by = inputs[1]

    moved.register_autograd(lambda ctx, grad: (moved(grad, ctx.by), None), setup_context=setup)
    moved.register_vmap(lambda info, dims, x, by: (moved(x, by), dims[0]))
    x = torch.randn(3, 5, device="webgpu", requires_grad=True)
    for function in (moved, compiled(moved)):
        (grad,) = torch.autograd.grad(function(x, 3.0).sum(), x)
        close(grad, torch.full((3, 5), 3.0))
    close(torch.vmap(lambda x: moved(x, 2.0), 1)(x.detach()), 2 * x.detach().cpu().T)


def test_registrations() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    for operator, arguments in (
        (swish, (x, torch.rand(3, requires_grad=True))),
        (cubed, (x.detach().half(),)),
        (parts, (x.detach(), torch.tensor(2, dtype=torch.int32))),
        (blur, (x.detach(), 0.5)),
    ):
        torch.library.opcheck(operator.overload, arguments)


@pytest.mark.rotates(4)
def test_cached_plans(tmp_path: Path) -> None:
    """In another process; another text is another plan."""
    program = """
import sys, torch
from torch_webgpu_compile import counters, wgsl_op
op = wgsl_op("cached::op", f"fn op(x: f32) -> f32 {{ return x * {sys.argv[1]}; }}")
run = torch.compile(lambda x: op(x) + 1, backend="webgpu")
print(run(torch.ones(3)).tolist(), counters.plan_cache_hits)
"""
    (tmp_path / "program.py").write_text(program)

    def run(factor: str) -> str:
        command = [sys.executable, str(tmp_path / "program.py"), factor]
        environment = {**os.environ, "TORCH_WEBGPU_CACHE": str(tmp_path / "cache")}
        paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert run("2.0") == "[3.0, 3.0, 3.0] 0"
    assert run("2.0") == "[3.0, 3.0, 3.0] 1"
    assert run("3.0") == "[4.0, 4.0, 4.0] 0"


def test_bundles(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows, sums = blur(swish(x, 1.5), 0.25)
            return torch.relu(rows) + sums[:, None]

    x = torch.randn(6, 5)
    export(Model(), (x,), tmp_path / "bundle")
    got = load_bundle(tmp_path / "bundle").run("forward", x=x.numpy())["output"]
    rows, sums = blur_reference(swish_reference(x, 1.5), 0.25)
    close(torch.from_numpy(np.asarray(got)), torch.relu(rows) + sums[:, None])


def test_float16_in_wgsl() -> None:
    if not device_for(from_environment()).target.has_float16:
        pytest.skip("this adapter has no shader-f16")
    op = wgsl_op("gpu_tests::halved", "fn halved(x: f16) -> f16 { return x / 2.0h; }")
    x = torch.randn(9).half()
    close(op(x.to("webgpu")), x / 2)
    close(compiled(lambda x: op(x) + 1)(x.float()), x.float() / 2 + 1)


def test_errors_are_in_the_users_file() -> None:
    lost = wgsl_op(
        "gpu_tests::lost",
        """
        fn lost(x: f32) -> f32 {
          return 2.0 * missing(x);
        }
        """,
    )
    place = rf"\n  at {re.escape(__file__)}:{lost_line()}:24\n    return 2\.0 \* missing\(x\);"
    with pytest.raises(ShaderError, match="gpu_tests::lost: .*missing.*" + place):
        lost(torch.ones(3, device="webgpu"))
    with pytest.raises(Exception, match="missing.*" + place):
        compiled(lambda x: lost(x) + 1)(torch.ones(3))
    broken = wgsl_op(
        "gpu_tests::broken",
        blur.kernel.text.replace("var sum = 0.0;", "var sum: u32 = 0.5;"),
        outputs=lambda x, weight=0.5: [x.shape, x.shape[:1]],
        grid=lambda x, weight: 1,
        uniforms=lambda x, weight: {"rows": 1, "columns": 1, "each": 1},
    )
    with pytest.raises(
        ShaderError, match=r"gpu_tests::broken: .*\n.*line 9, column \d+ of the WGSL"
    ):
        broken(torch.ones(3, 3, device="webgpu"))


def lost_line() -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(k for k, line in enumerate(lines, 1) if "2.0 * missing(x);" in line)


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    printed = capsys.readouterr().out
    assert "kernels             1 " in printed
    losses = example.fit(60)
    assert losses[-1] < losses[0] / 5
    plate = example.spread(3)
    wanted = torch.zeros(64, 64)
    wanted[24:40, 24:40] = 1.0
    for _ in range(3):
        padded = torch.nn.functional.pad(wanted, (1, 1, 1, 1))
        around = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
        wanted = wanted + 0.2 * (around - 4 * wanted)
    close(plate, wanted)
    x, frequency = torch.randn(4, 3), torch.rand(3) + 0.5
    wanted = x + torch.sin(frequency * x) ** 2 / frequency
    # WGSL's sine, which it calls, is accurate to 2⁻¹¹.
    close(example.snake(x, frequency), wanted, rtol=0, atol=4 * 2**-11)


def test_the_page() -> None:
    page = (ROOT / "docs/wgsl-operators.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"torch": torch}
    exec(program, names)
    assert counters.dispatches == 1
    x = torch.randn(4, 5, requires_grad=True)
    gradients = [
        torch.autograd.grad(function(x).sum(), x)[0]
        for function in (names["act"], lambda x: torch.relu(swish_reference(2 * x, 1.5)))
    ]
    close(gradients[0], gradients[1])
