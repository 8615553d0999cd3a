"""Operators written in WGSL: an activation with its gradient, and a stencil.

``python examples/wgsl_op.py`` fits a small network with the activation to a function, compiled,
and lets heat spread through a plate with the stencil.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_webgpu_compile import explain, wgsl_op

# A function of scalars: an elementwise operator, which broadcasts, and in a compiled function is
# computed in one kernel with what comes before and after it.
snake = wgsl_op(
    "examples::snake",
    """
    fn snake(x: f32, frequency: f32) -> f32 {
      let wave = sin(frequency * x);
      return x + wave * wave / frequency;
    }
    """,
)

# The partial derivatives, in the order of the parameters.
snake.register_gradient(
    """
    fn snake_backward(x: f32, frequency: f32) -> vec2<f32> {
      let wave = sin(frequency * x);
      let slope = sin(2.0 * frequency * x);
      let of_frequency = (x * slope - wave * wave / frequency) / frequency;
      return vec2<f32>(1.0 + slope, of_frequency);
    }
    """
)

# A whole kernel: its bindings are the operator's tensors, and the members of its uniform that the
# function of the shape takes are the operator's numbers.
heat_step = wgsl_op(
    "examples::heat_step",
    """
    @group(0) @binding(0) var<storage, read> plate: array<f32>;
    @group(0) @binding(1) var<storage, read_write> next: array<f32>;
    @group(0) @binding(2) var<uniform> numbers: Numbers;

    struct Numbers {
      rows: u32,
      columns: u32,
      rate: f32,
    }

    fn at(row: u32, column: u32) -> f32 {
      let inside = row < numbers.rows && column < numbers.columns;
      return select(0.0, plate[row * numbers.columns + column], inside);
    }

    @compute @workgroup_size(16, 16)
    fn heat_step(@builtin(global_invocation_id) id: vec3<u32>) {
      let row = id.y;
      let column = id.x;
      if (row >= numbers.rows || column >= numbers.columns) { return; }
      let middle = at(row, column);
      let around = at(row - 1, column) + at(row + 1, column)
                 + at(row, column - 1) + at(row, column + 1);
      next[row * numbers.columns + column] = middle + numbers.rate * (around - 4.0 * middle);
    }
    """,
    outputs=lambda plate, rate=0.2: plate.shape,
    grid=lambda plate, rate: (-(-plate.shape[1] // 16), -(-plate.shape[0] // 16)),
    uniforms=lambda plate, rate: {"rows": plate.shape[0], "columns": plate.shape[1]},
)


class Snake(nn.Module):
    """The activation, with a frequency for each channel of f32 (batch, channels)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return snake(x, self.frequency)


def fit(steps: int, device: str = "webgpu") -> list[float]:
    """Fits a network with the activation to a wave, compiled; the losses."""
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 256).unsqueeze(1).to(device)
    wanted = torch.sin(3 * x) + x / 2
    model = nn.Sequential(nn.Linear(1, 32), Snake(32), nn.Linear(32, 1)).to(device)
    compiled = torch.compile(model, backend="webgpu", fullgraph=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(compiled(x), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def spread(steps: int, device: str = "webgpu") -> Tensor:
    """A plate of 64 × 64, hot in its middle, after so many steps."""
    plate = torch.zeros(64, 64, device=device)
    plate[24:40, 24:40] = 1.0
    for _ in range(steps):
        plate = heat_step(plate)
    return plate


def main() -> None:
    """Prints what the operators did."""
    losses = fit(200)
    print(
        f"loss of the fit     {losses[0]:.3f} at first, {losses[-1]:.4f} after {len(losses)} steps"
    )
    x = torch.randn(1024, 1024, device="webgpu")
    report = explain(lambda x: torch.relu(snake(2 * x, 0.5)) + 1, x)
    print(f"kernels             {len(report.kernels)} for relu(snake(2 * x, 0.5)) + 1")
    plate = spread(100)
    print(f"heat in the middle  {plate[32, 32].item():.3f} after 100 steps")
    print(f"heat at the edge    {plate[32, 0].item():.5f}")


if __name__ == "__main__":
    main()
