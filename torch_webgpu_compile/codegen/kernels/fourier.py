"""Fourier transforms of rows in workgroup memory. The stages: `ir.fourier`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...ir.access import flat_values, is_multiple_of
from ...ir.buffers import Buffer
from ...ir.folding import as_index
from ...ir.nodes import Fourier
from ...ir.scalar import Load, Masked, Scalar, loads_of, walk
from ...plan.model import KernelCall
from ...symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    Symbol,
    as_expr,
    ceildiv,
    is_less,
    iteration,
    linearize,
    product,
    substitute,
)
from ...target import Target
from ..tilings.fourier import PADDING, FourierTiling
from ..values import Scope, Text
from ..wgsl.buffer_access import PAIR
from ..wgsl.scalars import Renderer
from .builder import Computed, KernelBuilder, fold_grid
from .butterflies import butterfly


def generate_fourier(
    node: Fourier, buffers: dict[str, Buffer], target: Target, tiling: FourierTiling
) -> KernelCall:
    """The kernel of one node that has rows."""
    builder = KernelBuilder(target, buffers)
    count, n = product(node.ranges), node.length
    rows = flat_values("i", node.ranges, iteration("row", count))
    j, k, w = (iteration(name, size) for name, size in (("j", n), ("k", n), ("w", n)))
    places = flat_values("j", (as_expr(n),), j)
    load = _load(builder, [node.real, node.imaginary], {**rows, **places})
    root = None
    if node.root_real is not None:
        table = flat_values("w", (as_expr(n - node.radices[0]),), w)
        root = _load(builder, [node.root_real, node.root_imaginary], table)
    workgroups = ceildiv(count, tiling.rows)
    exact = fold_grid(workgroups, target)[1] is ONE
    checked = not (exact and workgroups * tiling.rows is count)
    return builder.finish(
        "fourier",
        {
            "tiling": tiling,
            "padding": PADDING,
            "pairs": tiling.rows * tiling.stride,
            "count": builder.index(count),
            "checked": checked,
            "load": load,
            "root": root,
            "store": _store(builder, node, {**rows, **flat_values("k", (as_expr(n),), k)}),
            "stages": _stages(node, tiling, checked),
        },
        workgroup_size=tiling.workgroup,
        workgroups=workgroups,
        origins=node.origins,
        flops=count * round(5 * n * math.log2(n)),
        workgroup_nbytes=tiling.nbytes,
    )


# -- loads and stores ------------------------------------------------------------------------------


def _load(
    builder: KernelBuilder, parts: Sequence[Scalar | None], at: dict[Symbol, Expr]
) -> Computed:
    bodies = [part for part in parts if part is not None]
    scope = Scope()
    renderer = builder.renderer([at], scope)
    _load_pairs(builder, renderer, bodies)
    codes = [renderer.render(body).code for body in bodies]
    codes += ["0.0f"] * (len(parts) - len(bodies))
    return Computed(1, scope.lines, f"vec2<f32>({', '.join(codes)})", "", "vec2<f32>")


def _load_pairs(builder: KernelBuilder, renderer: Renderer, bodies: Sequence[Scalar]) -> None:
    """Loads neighbours that the bodies need together, whatever they do with them."""
    conditions = {body.condition for body in bodies if isinstance(body, Masked)}
    predicate: Text | None = None
    if len(conditions) == 1 and all(isinstance(body, Masked) for body in bodies):
        predicate = renderer.render(conditions.pop())
        if predicate.code in ("true", "false"):
            return
        bodies = [body.body for body in bodies if isinstance(body, Masked)]
    if any(isinstance(node, Masked) for body in bodies for node in walk(body)):
        return
    by_address: dict[tuple[str, Expr], Load] = {}
    for body in bodies:
        for load in loads_of(body):
            entries = [as_index(entry) for entry in load.index]
            exprs = [entry for entry in entries if entry is not None]
            buffer = builder.buffers[load.buffer]
            if len(exprs) == len(entries) and builder.bindings.can_pair(buffer.dtype):
                (address,) = renderer.per_lane(linearize(exprs, buffer.strides) + buffer.offset)
                by_address[load.buffer, address] = load
    predicates = () if predicate is None else (predicate,)
    for (name, address), load in by_address.items():
        other = by_address.get((name, address + 1))
        if other is None or not is_multiple_of(address, PAIR):
            continue
        code = builder.index(address // PAIR)
        if predicate is not None:
            code = f"select(0, {code}, {predicate.code})"
        function = builder.bindings.function(name, "load2")
        pair = renderer.let(f"{function}({code})", 1, load.dtype)
        for part, component in ((load, "x"), (other, "y")):
            known = Text(f"{pair.code}.{component}", 1, load.dtype)
            renderer.scope.known["value", part, predicates] = known


def _store(builder: KernelBuilder, node: Fourier, at: dict[Symbol, Expr]) -> list[str]:
    """Statements for result ``value``; those that take in the factor only where it is stored."""
    buffer = builder.buffers[node.output]
    finished: list[str] = []
    result = "value"
    if node.factor_real is not None:
        factor = _load(builder, [node.factor_real, node.factor_imaginary], at)
        finished += factor.lines
        result = f"times(value, {factor.result})"
    if node.scale != 1.0:
        result = f"{result} * {node.scale!r}f"
    finished.append(f"let stored = {result};")
    lines = _guarded(builder, buffer, node.index, at, finished, "stored")
    if node.mirror is not None:
        conjugate = "vec2<f32>(stored.x, -stored.y)"
        lines += _guarded(builder, buffer, node.mirror, at, finished, conjugate)
    return lines


def _guarded(
    builder: KernelBuilder,
    buffer: Buffer,
    index: Sequence[Expr],
    at: dict[Symbol, Expr],
    finished: list[str],
    pair: str,
) -> list[str]:
    """Statements that store a pair at an index that is inside of the buffer."""
    index = [substitute(entry, at) for entry in index]
    guards = [
        f"{builder.index(entry)} < {builder.index(size)}"
        for entry, size in zip(index, buffer.sizes, strict=False)
        if not is_less(entry, size)
    ]
    address = linearize(index, buffer.strides[: len(index)]) + buffer.offset
    lines = [*finished]
    if len(buffer.sizes) == len(index):
        function = builder.bindings.function(buffer.name, "store")
        lines.append(f"{function}({builder.index(address)}, ({pair}).x);")
    elif buffer.strides[-1] is ONE and is_multiple_of(address, PAIR):
        function = builder.bindings.function(buffer.name, "store2")
        lines.append(f"{function}({builder.index(address // PAIR)}, {pair});")
    else:
        function = builder.bindings.function(buffer.name, "store")
        for component, part in (("x", ZERO), ("y", buffer.strides[-1])):
            place = builder.index(address + part)
            lines.append(f"{function}({place}, ({pair}).{component});")
    if not guards:
        return lines
    return [f"if ({' && '.join(guards)}) {{", *(f"  {line}" for line in lines), "}"]


# -- stages ----------------------------------------------------------------------------------------


def _stages(
    node: Fourier, tiling: FourierTiling, checked: bool
) -> list[tuple[list[str], list[str]]]:
    """See ``templates/fourier.wgsl.jinja``."""
    stages = []
    before = 1
    offset = -node.radices[0] + 1  # the first stage has no roots in the table
    for number, radix in enumerate(node.radices):
        writer = _StageWriter(node, tiling, checked, number, before, offset)
        stages.append(writer.stage())
        offset += before * (radix - 1)
        before *= radix
    return stages


@dataclass
class _StageWriter:
    """The statements of one stage: butterfly b of an invocation t is t, t + threads, …"""

    node: Fourier
    tiling: FourierTiling
    checked: bool
    number: int
    before: int
    offset: int
    lines: list[str] = field(default_factory=list)
    names: int = 0

    def __post_init__(self) -> None:
        self.radix = self.node.radices[self.number]
        self.butterflies = self.node.length // self.radix
        self.is_first, self.is_last = self.number == 0, self.number == len(self.node.radices) - 1
        # Which elements an invocation takes changes where others wait for none of them.
        self.side = "store" if self.is_last and not self.is_first else "load"

    def stage(self) -> tuple[list[str], list[str]]:
        """Statements for all butterflies, and those for all their results."""
        written: list[str] = []
        threads = self.tiling.threads
        for slot in range(-(-self.butterflies // threads)):
            b = f"b{self.number}_{slot}"
            code = f"t_{self.side} + {slot * threads}" if slot else f"t_{self.side}"
            over = (slot + 1) * threads > self.butterflies
            if over:
                self.lines.append(f"let {b}_wanted = {code};")
                code = f"min({b}_wanted, {self.butterflies - 1})"
            self.lines.append(f"let {b} = {code};")
            guards = [f"{b}_wanted < {self.butterflies}"] if over else []
            written += self._slot(b, guards)
        return self.lines, written

    def _slot(self, b: str, guards: list[str]) -> list[str]:
        j = b
        if not (self.is_first or self.is_last):
            j = f"{b}_in"
            self.lines.append(f"let {j} = {self._remainder(b)};")
        values = list(map(self._emit, self._reads(b)))
        if not self.is_first:
            start = self.offset
            values = [values[0]] + [
                self._emit(f"times({v}, load_root({start + q * self.before} + {j}))")
                for q, v in enumerate(values[1:])
            ]
        results = butterfly(values, self.node.forward, self._emit)
        if self.is_last:
            row = f"row_{self.side}"
            if self.checked:
                guards = ["row_ok", *guards]
            stores = [
                f"store_number({row}, {b} + {q * self.before}, {v});" for q, v in enumerate(results)
            ]
        else:
            to = f"{b} * {self.radix}" if self.is_first else f"({b} - {j}) * {self.radix} + {j}"
            self.lines.append(f"let {b}_to = {to};")
            places = self._places(f"{b}_to", self.before)
            stores = [f"{place} = {v};" for place, v in zip(places, results, strict=True)]
        if not guards:
            return stores
        return [f"if ({' && '.join(guards)}) {{", *(f"  {line}" for line in stores), "}"]

    def _reads(self, b: str) -> list[str]:
        """The elements that butterfly b transforms."""
        step = self.butterflies
        if self.is_first:
            return [f"load_number(row_load, {b} + {q * step})" for q in range(self.radix)]
        return self._places(b, step)

    def _places(self, start: str, step: int) -> list[str]:
        """Elements start, start + step, … of the row in workgroup memory.

        Steps over whole groups of `PADDING` are steps in memory, of one more for each group, and so
        are steps in a group. Results of a stage that are in one group start at one of its parts.
        """
        together = step == self.before and PADDING % (step * self.radix) == 0
        if not self.tiling.padded or together or step % PADDING == 0:
            step += step // PADDING if self.tiling.padded else 0
            self.lines.append(f"let {start}_place = place(p_{self.side}, {start});")
            return [f"exchanged[{start}_place + {q * step}]" for q in range(self.radix)]
        at = [f"{start} + {q * step}" for q in range(self.radix)]
        return [f"exchanged[place(p_{self.side}, {entry})]" for entry in at]

    def _remainder(self, b: str) -> str:
        """b modulo the product of the radices before."""
        if self.before & (self.before - 1) == 0:
            return f"{b} & {self.before - 1}"
        return f"i32(u32({b}) % {self.before}u)"

    def _emit(self, code: str) -> str:
        name = f"z{self.number}_{self.names}"
        self.names += 1
        self.lines.append(f"let {name} = {code};")
        return name
