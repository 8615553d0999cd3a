"""Calls over windows: convolutions, poolings, resampling, padding, unfolding.

Images have ``(batch, channels, *sizes)`` with one to three sizes.
"""

from __future__ import annotations

import torch

from .calls import Call
from .programs import Drawing, Value


def _image(d: Drawing, rank: int, *, finite: bool = True) -> Value:
    """A value of ``rank`` sizes behind batch and channels, made if there is none.

    Whether 0 · ∞ is computed, for a padding or a weight of 0, is not defined by PyTorch.
    """

    def fits(v: Value) -> bool:
        numbers = v.is_float and v.magnitude < 64 and (v.finite or not finite)
        return numbers and v.rank == rank + 2 and v.tensor.numel() > 0

    found = d.value(fits)
    if found is not None:
        return found
    sizes = [d.choose((5, 4, 7) if rank > 1 else (12, 7, 33)) for _ in range(rank)]
    dtype = d.choose((torch.float32, torch.float32, torch.float16, torch.bfloat16))
    return d.add_input((d.integer(1, 2), d.choose((2, 4, 3)), *sizes), dtype)


def convolve(d: Drawing) -> object:
    """A convolution or a transposed one, of one to three dimensions."""
    rank = d.integer(1, 3)
    value = _image(d, rank)
    x, channels = value.name, value.shape[1]
    groups = d.choose([g for g in (1, channels, 2) if channels % g == 0])
    kernel = [d.choose((1, 3, 2)) for _ in range(rank)]
    stride, dilation = d.integer(1, 2), d.integer(1, 2)
    out = groups * d.choose((2, 1, 3))
    bias = d.add_input((out,), value.dtype) if d.flag() else None
    name = "None" if bias is None else bias.name
    options = f"stride={stride}, dilation={dilation}, groups={groups}"
    if d.flag():
        weight = d.add_input((channels, out // groups, *kernel), value.dtype)
        extra = d.integer(0, max(stride, dilation) - 1)
        options += f", padding={d.integer(0, 1)}, output_padding={extra}"
        code = f"F.conv_transpose{rank}d({x}, {weight.name}, {name}, {options})"
    else:
        weight = d.add_input((out, channels // groups, *kernel), value.dtype)
        same = stride == 1 and d.flag()
        options += ", padding='same'" if same else f", padding={d.integer(0, 2)}"
        code = f"F.conv{rank}d({x}, {weight.name}, {name}, {options})"
    operands = (value, weight) if bias is None else (value, weight, bias)
    return d.step(code, *operands, keeps_exact=True)


def pool(d: Drawing) -> object:
    """A maximum or a mean of windows."""
    rank = d.integer(1, 3)
    value = _image(d, rank, finite=False)
    x, kernel, stride = value.name, d.integer(1, 3), d.integer(1, 3)
    window = f"{x}, {kernel}, {stride}, {d.integer(0, kernel // 2)}, ceil_mode={d.flag()}"
    maxima = f"{window}, dilation={d.integer(1, 2)}"
    largest = f"F.max_pool{rank}d({maxima})"
    codes = [largest, largest, f"F.avg_pool{rank}d({window}, count_include_pad={d.flag()})"]
    if rank > 1:
        codes.append(f"F.avg_pool{rank}d({window}, divisor_override=3)")
    if rank < 3:
        codes.append(f"F.lp_pool{rank}d({x}.abs() + 0.5, 2, {kernel}, {stride})")
    if value.exact and value.finite:
        # Of a window in the padding alone, PyTorch gives an index that there is not.
        codes.append(f"F.max_pool{rank}d({maxima}, return_indices=True)[1] * {largest}.isfinite()")
        codes.append(
            f"F.max_unpool{rank}d(*F.max_pool{rank}d({x}, 2, return_indices=True), 2, "
            f"output_size={list(value.shape[2:])})"
        )
    code = d.choose(codes)
    return d.step(code, value, keeps_exact="max_" in code)


def pool_to_size(d: Drawing) -> object:
    """An adaptive pooling."""
    rank = d.integer(1, 3)
    value = _image(d, rank, finite=False)
    sizes = tuple(d.integer(1, 5) for _ in range(rank))
    codes = [f"F.adaptive_avg_pool{rank}d({value.name}, {sizes})"]
    codes += [f"F.adaptive_max_pool{rank}d({value.name}, {sizes})"] * 2
    if value.exact and value.finite:
        codes += [f"F.adaptive_max_pool{rank}d({value.name}, {sizes}, return_indices=True)[1]"]
    code = d.choose(codes)
    return d.step(code, value, keeps_exact="max" in code)


def resize(d: Drawing) -> object:
    """Resampling to other sizes."""
    rank = d.integer(1, 3)
    value = _image(d, rank)
    x = value.name
    if d.flag():
        size = tuple(d.integer(1, 9) for _ in range(rank))
        to, last = f"size={size}", size[-1]
    else:
        scale = d.choose((2, 0.5, 1.5, 3))
        to, last = f"scale_factor={scale}", int(scale * value.shape[-1])
    if d.integer(0, 2) == 0:
        mode = d.choose(("nearest", "nearest-exact"))
        return d.step(f"F.interpolate({x}, {to}, mode='{mode}')", value, keeps_exact=True)
    modes = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}[rank]
    mode = d.choose((*modes, "area"))
    options = "" if mode == "area" else f", align_corners={d.flag()}"
    # PyTorch's CPU kernel of antialiasing repeats one row where the last size is 1 (2.11 to 2.13).
    smooth = mode in ("bilinear", "bicubic") and value.dtype is torch.float32
    if smooth and d.flag() and last > 1:
        options += ", antialias=True"
    return d.step(f"F.interpolate({x}, {to}, mode='{mode}'{options})", value)


def sample_grid(d: Drawing) -> object:
    """Values between the elements of an image; the nearest one for exact places only."""
    value = _image(d, 2)
    batch = value.shape[0]
    places = d.add_input((batch, d.integer(1, 5), d.integer(1, 6), 2), value.dtype)
    smooth = d.flag()
    grid = f"torch.tanh({places.name})" if smooth else f"{places.name} / 2"
    modes = ("bilinear", "bicubic") if smooth else ("bilinear", "nearest", "bicubic")
    options = (
        f"mode='{d.choose(modes)}', padding_mode='{d.choose(('zeros', 'border', 'reflection'))}'"
    )
    code = f"F.grid_sample({value.name}, {grid}, {options}, align_corners={d.flag()})"
    return d.step(code, value, places)


def pad(d: Drawing) -> object:
    """Padding of every mode."""
    rank = d.integer(1, 3)
    value = _image(d, rank, finite=False)
    pads = [d.integer(0, 2) for _ in range(2 * rank)]
    mode = d.choose(("reflect", "replicate", "circular", "constant"))
    return d.step(f"F.pad({value.name}, {pads}, mode='{mode}')", value, keeps_exact=True)


def unfold(d: Drawing) -> object:
    """Windows as columns, and columns added up to an image."""
    value = _image(d, 2, finite=False)
    x, (height, width) = value.name, value.shape[2:]
    kernel = d.integer(1, 3)
    options = f"{kernel}, {d.integer(1, 2)}, {d.integer(0, 1)}, {d.integer(1, 2)}"
    columns = f"F.unfold({x}, {options})"
    codes = (
        columns,
        f"F.fold({columns}, ({height}, {width}), {options})",
        f"{x}.unfold({d.integer(1, 3)}, 2, {d.integer(1, 2)})",
        f"F.pixel_shuffle({x}, 2)",
        f"F.pixel_unshuffle({x}, {d.integer(1, 2)})",
        f"F.channel_shuffle({x}, {d.integer(1, 2)})",
    )
    return d.step(d.choose(codes), value, keeps_exact=True)


def normalize_channels(d: Drawing) -> object:
    """Group, instance and batch normalization."""
    value = _image(d, d.integer(1, 3))
    x, channels = value.name, value.shape[1]
    scale = d.add_input((channels,), value.dtype) if d.flag() else None
    weight = "None" if scale is None else f"{scale.name}"
    groups = d.choose([g for g in (1, 2, channels) if channels % g == 0])
    codes = (
        f"F.group_norm({x}, {groups}, {weight}, {weight}, 0.1)",
        f"F.instance_norm({x}, weight={weight}, bias={weight}, eps=0.1)",
        f"F.batch_norm({x}, None, None, {weight}, {weight}, True, 0.1, 0.1)",
        f"F.batch_norm({x}, {x}[0].flatten(1).mean(1), {x}[0].flatten(1).square().mean(1) + 0.5, "
        f"{weight}, {weight})",
        f"F.local_response_norm({x}, 2)",
    )
    return d.step(d.choose(codes), value, *((scale,) if scale else ()))


FAMILIES: tuple[Call, ...] = (
    convolve,
    convolve,
    pool,
    pool_to_size,
    resize,
    sample_grid,
    pad,
    unfold,
    normalize_channels,
)
