"""A convolutional network learns to read handwritten digits on the GPU.

``python examples/train_digits.py`` takes the 1,797 images of 8 × 8 pixels that come with
scikit-learn, trains on five sixths of them, says how many of the others the network reads, and
plots the loss. ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import torch_webgpu_compile

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ConvNet(nn.Sequential):
    """Images, f32 (images, 1, 8, 8), to logits of the ten digits, f32 (images, 10)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(32 * 4 * 4, 10),
        )


def digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Images in [0, 1] and their labels: those to train on and those to test with.

    Raises:
        SystemExit: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit("The images come with scikit-learn: pip install scikit-learn") from error
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    whole = TensorDataset(images, torch.tensor(found.target))
    training, test = random_split(whole, [5 / 6, 1 / 6], torch.Generator().manual_seed(seed))
    return TensorDataset(*whole[training.indices]), TensorDataset(*whole[test.indices])


def train(
    model: nn.Module,
    data: TensorDataset,
    device: torch.device,
    epochs: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Trains; returns the loss of each step, f32 on the CPU."""
    loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=5e-3, total_steps=epochs * len(loader)
    )
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    losses = []
    model.train()
    for epoch in range(epochs):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
                loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            losses.append(loss.detach())  # on the GPU: nothing waits for it
        print(f"epoch {epoch + 1:2}  loss {losses[-1].item():.4f}")
    return torch.stack(losses).cpu()


@torch.inference_mode()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The share of images whose digit has the largest logit."""
    model.eval()
    images, labels = (tensor.to(device) for tensor in data.tensors)
    return (model(images).argmax(1) == labels).float().mean().item()


def plotted(losses: Tensor, width: int = 64, height: int = 12) -> str:
    """A curve in characters: each column is the mean of its share of the steps."""
    shares = losses.tensor_split(min(width, len(losses)))
    means = torch.stack([share.mean() for share in shares])
    low, high = means.min().item(), means.max().item()
    rows = ((high - means) / max(high - low, 1e-9) * (height - 1)).round().int().tolist()
    lines = []
    for row in range(height):
        label = {0: f"{high:.3f}", height - 1: f"{low:.3f}"}.get(row, "")
        lines.append(f"{label:>7} │" + "".join("•" if at == row else " " for at in rows).rstrip())
    last = f"{len(losses)} steps"
    return "\n".join([*lines, f"{'':7} └{'─' * len(rows)}", f"{'':8} 1{last:>{len(rows) - 1}}"])


def save_plot(losses: Tensor, path: Path) -> None:
    """The curve as an image of the type that the suffix names.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses.tolist())
    axes.set(xlabel="step", ylabel="loss", title="handwritten digits")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> tuple[Tensor, float]:
    """The program; returns the loss of each step and the accuracy on the test images."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="webgpu", help="default: webgpu")
    parser.add_argument("--epochs", type=int, default=10, help="default: 10")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of autocast")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--plot", type=Path, help="also save the plot, with matplotlib")
    given = parser.parse_args(arguments)

    if given.device.startswith("webgpu"):
        torch_webgpu_compile.register_device()
    device = torch.device(given.device)
    torch.manual_seed(given.seed)
    training, test = digits(given.seed)
    model = ConvNet().to(device)
    if given.compile:
        model.compile(backend="webgpu" if device.type == "webgpu" else "inductor")
    start = time.perf_counter()
    losses = train(model, training, device, given.epochs, DTYPES[given.dtype])
    seconds = time.perf_counter() - start
    found = accuracy(model, test, device)
    print(f"\n{plotted(losses)}\n")
    print(f"{len(losses)} steps in {seconds:.1f} s")
    print(f"{found:.1%} of {len(test)} images that it has not seen are read correctly")
    if given.plot:
        save_plot(losses, given.plot)
    return losses, found


if __name__ == "__main__":
    main()
