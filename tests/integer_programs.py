"""Random programs of positions, sizes and constants whose values pass 2³¹, 2³² and 2⁵³."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

_CONSTANTS = (-3, 1, 2, 7, 1000, 65537, 2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**53 + 1, -(2**33))
_DIVISORS = ("7", "1013", "65536", "n", "(n * n + 1)", str(2**33), str(2**40 + 3))
_FORMS = (
    "{}",
    "({}).float()",
    "({}).int()",
    "({}) > {}",
    "({}).double()",
    "torch.where({} > 5, {}, i)",
    "x[({}).long() % n]",
    "x[({}).long() % 5]",
)


def expression(choose: random.Random, depth: int) -> str:
    """An expression of tensors: i counts elements, x are int64 data, w int32; n and m are sizes."""
    if depth == 0 or choose.random() < 0.1:
        return choose.choice(("i", "i", "i", "j", "x", "w"))
    inner = expression(choose, depth - 1)
    # A divisor beyond 32 bits may be 0 as an int32.
    dividend = f"{inner}.long()" if "w" in inner else inner
    match choose.randrange(9):
        case 0 | 1:
            other = choose.choice((expression(choose, depth - 1), "n", "m", "n * n"))
            return f"({inner} {choose.choice('+-')} {other})"
        case 2 | 3:
            constant = choose.choice(_CONSTANTS)
            return f"({inner} {choose.choice('+*')} {constant})"
        case 4:
            return (
                f"({inner} * {choose.choice((expression(choose, depth - 1), 'n', 'n * n', 'm'))})"
            )
        case 5:
            return f"({dividend} // {choose.choice(_DIVISORS)})"
        case 6:
            return f"({dividend} % {choose.choice(_DIVISORS)})"
        case 7:
            return f"torch.{choose.choice(('minimum', 'maximum'))}({inner}, i * n)"
        case _:
            return f"({inner} << {choose.choice((1, 20, 40))})"


def program(seed: int, results: int = 6) -> tuple[str, Callable[..., Any]]:
    """A program's results as text, and its function of x (int64) and w (int32)."""
    choose = random.Random(seed)
    lines = []
    for _ in range(results):
        form = choose.choice(_FORMS)
        lines.append(form.format(*(expression(choose, 3) for _ in range(form.count("{}")))))
    text = ", ".join([*lines, f"({expression(choose, 2)}).sum()"])
    return text, _function(text)


def _function(text: str) -> Callable[..., Any]:
    source = (
        "def run(x, w):\n"
        "    n, m = x.shape[0], x.shape[0] // 3 + 1\n"
        "    i = torch.arange(n, device=x.device)\n"
        "    j = torch.arange(3, n * 9 + 3, 9, device=x.device)\n"
        f"    return ({text},)\n"
    )
    scope: dict[str, Any] = {"torch": torch}
    exec(source, scope)
    found: Callable[..., Any] = scope["run"]
    return found


def inputs(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """n elements of int64 beyond 32 bits, and of int32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-(2**40), 2**40, (n,), generator=generator)
    w = torch.randint(-(2**31), 2**31 - 1, (n,), generator=generator, dtype=torch.int32)
    return x, w


def differences(text: str, got: Sequence[Any], wanted: Sequence[Any]) -> str:
    """What differs, in words; nothing where all is equal (floats: to a rounding)."""
    found = []
    for k, (g, w) in enumerate(zip(got, wanted, strict=True)):
        g = g.cpu()
        if g.dtype != w.dtype or g.shape != w.shape:
            found.append(f"result {k}: {g.dtype}{list(g.shape)} for {w.dtype}{list(w.shape)}")
            continue
        close = torch.isclose(g, w, rtol=2e-7, atol=0) if w.dtype.is_floating_point else g == w
        if not close.all():
            at = int((~close).nonzero().flatten()[0]) if w.dim() else 0
            g, w = g.reshape(-1), w.reshape(-1)
            found.append(f"result {k}, element {at}: {g[at].item()} for {w[at].item()}")
    return "\n".join([*found, text]) if found else ""
