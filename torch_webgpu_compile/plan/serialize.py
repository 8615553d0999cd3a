"""`Plan` to JSON and back. The format is versioned and holds data only: reading it runs no code.

An `Expr` is a number, or ``{"c": constant, "t": [[coefficient, atom, …], …]}``; an atom is a
symbol's name, or ``["//", numerator, denominator]`` or ``["%", …]``. The table ``symbols`` gives
each symbol's lower bound. A float that the host computes for a kernel is ``{"number": operator,
"of": operands}``. Constants are base64.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

from ..checks import IndexCheck
from ..dtypes import BY_NAME
from ..errors import WebGPUCompileError
from ..sizes import (
    Atom,
    Expr,
    FloorDiv,
    Symbol,
    as_expr,
    floordiv,
    mod,
    symbol,
)
from .model import (
    VERSION,
    Binding,
    CopyBuffer,
    Dispatch,
    HostBuffer,
    HostConstant,
    HostStep,
    Kernel,
    KernelBinding,
    Parameter,
    Plan,
    PlanBuffer,
    PlanInput,
    PlanOutput,
    Step,
)
from .numbers import NUMBER_OPS, HostNumber

Json = Any


class PlanFormatError(WebGPUCompileError, ValueError):
    """Data that is not a plan, or one of another version."""


def to_json(plan: Plan) -> dict[str, Json]:
    """A plan as nested lists and dictionaries of JSON's types."""
    writer = _Writer()
    body: dict[str, Json] = {
        "format": "webgpu-plan",
        "version": plan.version,
        "name": plan.name,
        "kernels": [_kernel_to_json(kernel) for kernel in plan.kernels],
        "buffers": [writer.buffer(buffer) for buffer in plan.buffers.values()],
        "steps": [writer.step(step) for step in plan.steps],
        "inputs": [{"buffer": i.buffer, "size": writer.expr(i.size)} for i in plan.inputs],
        "outputs": [writer.output(output) for output in plan.outputs],
        "constants": {
            name: base64.b64encode(data).decode("ascii") for name, data in plan.constants.items()
        },
    }
    body["symbols"] = writer.symbols
    body["preparation"] = None if plan.preparation is None else to_json(plan.preparation)
    return body


def from_json(data: Mapping[str, Json]) -> Plan:
    """The plan that `to_json` was given. Raises PlanFormatError for anything else."""
    if not isinstance(data, Mapping) or data.get("format") != "webgpu-plan":
        raise PlanFormatError("this is not a plan; make one with serialize.to_json")
    if data.get("version") != VERSION:
        raise PlanFormatError(
            f"the plan has version {data.get('version')}, this package reads {VERSION}; "
            "compile it again"
        )
    try:
        return _Reader(data["symbols"]).plan(data)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PlanFormatError(f"the plan is damaged ({error!r}); compile it again") from error


def _kernel_to_json(kernel: Kernel) -> Json:
    return {
        "name": kernel.name,
        "kind": kernel.kind,
        "wgsl": kernel.wgsl,
        "bindings": [binding.writable for binding in kernel.bindings],
        "workgroup_size": list(kernel.workgroup_size),
        "parameter_count": kernel.parameter_count,
        "workgroup_nbytes": kernel.workgroup_nbytes,
        "ops": list(kernel.ops),
        "sources": list(kernel.sources),
    }


def _kernel_from_json(data: Json) -> Kernel:
    x, y, z = data["workgroup_size"]
    return Kernel(
        name=data["name"],
        kind=data["kind"],
        wgsl=data["wgsl"],
        bindings=tuple(KernelBinding(writable) for writable in data["bindings"]),
        workgroup_size=(x, y, z),
        parameter_count=data["parameter_count"],
        workgroup_nbytes=data["workgroup_nbytes"],
        ops=tuple(data["ops"]),
        sources=tuple(data["sources"]),
    )


class _Writer:
    def __init__(self) -> None:
        self.symbols: dict[str, int] = {}

    def expr(self, expr: Expr | None) -> Json:
        if expr is None:
            return None
        if expr.is_constant:
            return expr.constant
        terms = [[c, *(self._atom(atom) for atom in monomial)] for monomial, c in expr.terms]
        return {"c": expr.constant, "t": terms}

    def parameter(self, value: HostNumber | Expr | float) -> Json:
        match value:
            case HostNumber(op, args):
                return {"number": op, "of": [self.parameter(arg) for arg in args]}
            case Expr():
                return self.expr(value)
            case _:
                return self.argument(value)

    def exprs(self, exprs: tuple[Expr, ...]) -> Json:
        return [self.expr(expr) for expr in exprs]

    def _atom(self, atom: Atom) -> Json:
        if isinstance(atom, Symbol):
            if atom.extent is not None:
                raise ValueError(f"a plan cannot hold the iteration symbol {atom}")
            self.symbols[atom.name] = atom.lower
            return atom.name
        sign = "//" if isinstance(atom, FloorDiv) else "%"
        return [sign, self.expr(atom.numerator), self.expr(atom.denominator)]

    def buffer(self, buffer: PlanBuffer) -> Json:
        return {
            "name": buffer.name,
            "role": buffer.role,
            "dtype": buffer.dtype.name,
            "sizes": self.exprs(buffer.sizes),
            "strides": self.exprs(buffer.strides),
            "offset": self.expr(buffer.offset),
            "nbytes": self.expr(buffer.nbytes),
            "slot": buffer.slot,
        }

    def step(self, step: Step) -> Json:
        match step:
            case Dispatch():
                return {
                    "step": "dispatch",
                    "kernel": step.kernel,
                    "bindings": [
                        [b.buffer, b.offset_nbytes, self.expr(b.nbytes)] for b in step.bindings
                    ],
                    "grid": self.exprs(step.grid),
                    "parameters": [self.parameter(p) for p in step.parameters],
                    "bytes_read": self.expr(step.bytes_read),
                    "bytes_written": self.expr(step.bytes_written),
                    "flops": self.expr(step.flops),
                    "narrow": self.exprs(step.narrow),
                    "checks": [[check.op, check.source, check.dim] for check in step.checks],
                }
            case CopyBuffer():
                return {"step": "copy", "from": step.source, "to": step.destination}
            case HostStep():
                return {
                    "step": "host",
                    "target": step.target,
                    "outputs": list(step.outputs),
                    "arguments": [self.argument(a) for a in step.arguments],
                    "keywords": [[k, self.argument(v)] for k, v in step.keywords],
                    "source": step.source,
                }

    def output(self, output: PlanOutput) -> Json:
        return {
            "buffer": output.buffer,
            "sizes": self.exprs(output.sizes),
            "strides": self.exprs(output.strides),
            "offset": self.expr(output.offset),
            "size": self.expr(output.size),
            "constant": self.argument(output.constant),
            "mutates": output.mutates,
        }

    def argument(self, value: Any) -> Json:
        match value:
            case None | bool() | int() | str():
                return value
            case float():
                # JSON has no infinities and NaN, and 1.0 must not come back as 1.
                return {"float": value if math.isfinite(value) else repr(value)}
            case Expr():
                return {"expr": self.expr(value)}
            case HostBuffer(name):
                return {"buffer": name}
            case HostConstant(kind, name):
                return {"constant": [kind, name]}
            case tuple():
                return [self.argument(item) for item in value]
            case _:
                raise ValueError(f"a plan cannot hold {value!r}")


class _Reader:
    def __init__(self, symbols: Mapping[str, int]) -> None:
        self._symbols = {name: symbol(name, lower) for name, lower in symbols.items()}

    def plan(self, data: Mapping[str, Json]) -> Plan:
        buffers = [self.buffer(buffer) for buffer in data["buffers"]]
        return Plan(
            name=data["name"],
            kernels=tuple(_kernel_from_json(kernel) for kernel in data["kernels"]),
            buffers={buffer.name: buffer for buffer in buffers},
            steps=tuple(self.step(step) for step in data["steps"]),
            inputs=tuple(PlanInput(i["buffer"], self.maybe(i["size"])) for i in data["inputs"]),
            outputs=tuple(self.output(output) for output in data["outputs"]),
            constants={
                name: base64.b64decode(text, validate=True)
                for name, text in data["constants"].items()
            },
            version=data["version"],
            preparation=None if data["preparation"] is None else from_json(data["preparation"]),
        )

    def expr(self, data: Json) -> Expr:
        if isinstance(data, int):
            return as_expr(data)
        total = as_expr(data["c"])
        for coefficient, *atoms in data["t"]:
            term = as_expr(coefficient)
            for atom in atoms:
                term = term * self._atom(atom)
            total = total + term
        return total

    def parameter(self, data: Json) -> Parameter:
        if not isinstance(data, dict) or "number" not in data:
            return self.expr(data)
        if data["number"] not in NUMBER_OPS:
            raise ValueError(f"unknown function of sizes {data['number']!r}")
        return HostNumber(data["number"], tuple(self._operand(arg) for arg in data["of"]))

    def _operand(self, data: Json) -> HostNumber | Expr | float:
        if isinstance(data, dict) and "float" in data:
            return float(data["float"])
        return self.parameter(data)

    def maybe(self, data: Json) -> Expr | None:
        return None if data is None else self.expr(data)

    def exprs(self, data: Json) -> tuple[Expr, ...]:
        return tuple(self.expr(expr) for expr in data)

    def _atom(self, data: Json) -> Expr:
        if isinstance(data, str):
            return self._symbols[data]
        sign, numerator, denominator = data
        divide = {"//": floordiv, "%": mod}[sign]
        return divide(self.expr(numerator), self.expr(denominator))

    def buffer(self, data: Json) -> PlanBuffer:
        return PlanBuffer(
            name=data["name"],
            role=data["role"],
            dtype=BY_NAME[data["dtype"]],
            sizes=self.exprs(data["sizes"]),
            strides=self.exprs(data["strides"]),
            offset=self.expr(data["offset"]),
            nbytes=self.expr(data["nbytes"]),
            slot=data["slot"],
        )

    def step(self, data: Json) -> Step:
        match data["step"]:
            case "dispatch":
                x, y, z = self.exprs(data["grid"])
                return Dispatch(
                    kernel=data["kernel"],
                    bindings=tuple(Binding(b, o, self.maybe(n)) for b, o, n in data["bindings"]),
                    grid=(x, y, z),
                    parameters=tuple(self.parameter(p) for p in data["parameters"]),
                    bytes_read=self.expr(data["bytes_read"]),
                    bytes_written=self.expr(data["bytes_written"]),
                    flops=self.expr(data["flops"]),
                    checks=tuple(IndexCheck(*check) for check in data["checks"]),
                    narrow=self.exprs(data["narrow"]),
                )
            case "copy":
                return CopyBuffer(data["from"], data["to"])
            case "host":
                return HostStep(
                    target=data["target"],
                    outputs=tuple(data["outputs"]),
                    arguments=tuple(self.argument(a) for a in data["arguments"]),
                    keywords=tuple((k, self.argument(v)) for k, v in data["keywords"]),
                    source=data["source"],
                )
            case kind:
                raise ValueError(f"unknown step {kind!r}")

    def output(self, data: Json) -> PlanOutput:
        return PlanOutput(
            buffer=data["buffer"],
            sizes=self.exprs(data["sizes"]),
            strides=self.exprs(data["strides"]),
            offset=self.maybe(data["offset"]),
            size=self.maybe(data["size"]),
            constant=self.argument(data["constant"]),
            mutates=data["mutates"],
        )

    def argument(self, data: Json) -> Any:
        if isinstance(data, list):
            return tuple(self.argument(item) for item in data)
        if not isinstance(data, dict):
            return data
        ((kind, value),) = data.items()
        match kind:
            case "float":
                return float(value)
            case "expr":
                return self.expr(value)
            case "buffer":
                return HostBuffer(value)
            case "constant":
                return HostConstant(*value)
            case _:
                raise ValueError(f"unknown argument {kind!r}")


__all__ = ["PlanFormatError", "from_json", "to_json"]
