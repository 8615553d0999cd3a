"""`Plan` to JSON and back. The format is versioned and holds data only: reading it runs no code.

An `Expr` is a number, or ``{"c": constant, "t": [[coefficient, atom, …], …]}``; an atom is a
symbol's name, or ``["//", numerator, denominator]`` or ``["%", …]``. The table ``symbols`` gives
each symbol's lower bound. A float that the host computes for a kernel is ``{"number": operator,
"of": operands}``. Constants are base64.

What is read may be anything. The reader gives a `Plan` whose every field has the declared type
(`schema`) or raises PlanFormatError, in time and memory that follow from the length of the text;
whether the fields make sense together is for `verify`.
"""

from __future__ import annotations

import base64
import json
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
from . import schema
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
from .numbers import NUMBER_ARITY, HostNumber

Json = Any

# Of plans that this package makes, the deepest have 5 and 7, the longest expressions 30 terms.
_MAX_DEPTH = 32
_MAX_TERMS = 512
_MAX_COEFFICIENT = 1 << 63


class PlanFormatError(WebGPUCompileError, ValueError):
    """Data that is not a plan, or one of another version."""


def dumps(plan: Plan) -> bytes:
    """A plan as text. Raises ValueError for one with a value that the format has no form for."""
    return json.dumps(to_json(plan), allow_nan=False).encode()


def loads(text: bytes | str) -> Plan:
    """The plan that `dumps` was given. Raises PlanFormatError for any other text."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanFormatError(f"this is no plan ({error}); compile it again") from error
    return from_json(data)


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
    return _plan_from_json(data, is_preparation=False)


def _plan_from_json(data: Any, is_preparation: bool) -> Plan:
    if not isinstance(data, Mapping) or data.get("format") != "webgpu-plan":
        raise PlanFormatError("this is not a plan; make one with serialize.to_json")
    if data.get("version") != VERSION:
        raise PlanFormatError(
            f"the plan has version {data.get('version')}, this package reads {VERSION}; "
            "compile it again"
        )
    try:
        prepared = data["preparation"]
        if is_preparation and prepared is not None:
            raise ValueError("a preparation has none of its own")
        preparation = None if prepared is None else _plan_from_json(prepared, is_preparation=True)
        plan = _Reader(_typed(data["symbols"], dict)).plan(data, preparation)
        schema.check(plan)
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        if isinstance(error, PlanFormatError):
            raise
        raise PlanFormatError(f"the plan is damaged ({error!r}); compile it again") from error
    return plan


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
    x, y, z = _list(data["workgroup_size"])
    return Kernel(
        name=data["name"],
        kind=data["kind"],
        wgsl=data["wgsl"],
        bindings=tuple(KernelBinding(writable) for writable in _list(data["bindings"])),
        workgroup_size=(x, y, z),
        parameter_count=data["parameter_count"],
        workgroup_nbytes=data["workgroup_nbytes"],
        ops=tuple(_list(data["ops"])),
        sources=tuple(_list(data["sources"])),
    )


def _typed(data: Json, kind: type) -> Any:
    if type(data) is not kind:
        raise TypeError(f"{kind.__name__} expected, not {type(data).__name__}")
    return data


def _list(data: Json) -> list[Json]:
    found: list[Json] = _typed(data, list)
    return found


def _pair(data: Json) -> tuple[Json, Json]:
    first, second = _list(data)
    return first, second


def _integer(data: Json) -> int:
    value: int = _typed(data, int)
    if not -_MAX_COEFFICIENT <= value < _MAX_COEFFICIENT:
        raise ValueError(f"a number of {value.bit_length()} bits")
    return value


def _unique(names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise ValueError("two buffers of one name")


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
                    "iterations": self.expr(step.iterations),
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
    def __init__(self, symbols: dict[str, Json]) -> None:
        self._symbols = {name: symbol(name, _integer(low)) for name, low in symbols.items()}

    def plan(self, data: Mapping[str, Json], preparation: Plan | None) -> Plan:
        buffers = [self.buffer(buffer) for buffer in _list(data["buffers"])]
        _unique([buffer.name for buffer in buffers])
        return Plan(
            name=data["name"],
            kernels=tuple(_kernel_from_json(kernel) for kernel in _list(data["kernels"])),
            buffers={buffer.name: buffer for buffer in buffers},
            steps=tuple(self.step(step) for step in _list(data["steps"])),
            inputs=tuple(
                PlanInput(i["buffer"], self.maybe(i["size"])) for i in _list(data["inputs"])
            ),
            outputs=tuple(self.output(output) for output in _list(data["outputs"])),
            constants={
                name: base64.b64decode(_typed(text, str), validate=True)
                for name, text in _typed(data["constants"], dict).items()
            },
            version=data["version"],
            preparation=preparation,
        )

    def expr(self, data: Json, depth: int = 0) -> Expr:
        if type(data) is int:
            return as_expr(_integer(data))
        if depth > _MAX_DEPTH:
            raise ValueError("an expression is nested too deeply")
        total = as_expr(_integer(_typed(data, dict)["c"]))
        for term in _list(data["t"]):
            coefficient, *atoms = _list(term)
            product = as_expr(_integer(coefficient))
            if len(atoms) > _MAX_DEPTH:
                raise ValueError("an expression has too high a degree")
            for atom in atoms:
                product = _bounded(product * self._atom(atom, depth))
            total = _bounded(total + product)
        return total

    def parameter(self, data: Json, depth: int = 0) -> Parameter:
        if not isinstance(data, dict) or "number" not in data:
            return self.expr(data)
        if depth > _MAX_DEPTH:
            raise ValueError("a number is nested too deeply")
        operands = tuple(self._operand(arg, depth + 1) for arg in _list(data["of"]))
        if NUMBER_ARITY.get(data["number"]) != len(operands):
            raise ValueError(f"no function {data['number']!r} of {len(operands)} numbers")
        return HostNumber(data["number"], operands)

    def _operand(self, data: Json, depth: int) -> HostNumber | Expr | float:
        if isinstance(data, dict) and "float" in data:
            return float(data["float"])
        return self.parameter(data, depth)

    def maybe(self, data: Json) -> Expr | None:
        return None if data is None else self.expr(data)

    def exprs(self, data: Json) -> tuple[Expr, ...]:
        return tuple(self.expr(expr) for expr in _list(data))

    def _atom(self, data: Json, depth: int) -> Expr:
        if isinstance(data, str):
            return self._symbols[data]
        sign, *operands = _list(data)
        divide = {"//": floordiv, "%": mod}[sign]
        numerator, denominator = (self.expr(operand, depth + 1) for operand in operands)
        if denominator.is_constant and denominator.constant <= 0:
            raise ValueError("a division by a number that is not positive")
        return divide(numerator, denominator)

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
                bindings = _list(data["bindings"])
                return Dispatch(
                    kernel=data["kernel"],
                    bindings=tuple(
                        Binding(b, o, self.maybe(n)) for b, o, n in map(_list, bindings)
                    ),
                    grid=(x, y, z),
                    parameters=tuple(self.parameter(p) for p in _list(data["parameters"])),
                    bytes_read=self.expr(data["bytes_read"]),
                    bytes_written=self.expr(data["bytes_written"]),
                    flops=self.expr(data["flops"]),
                    iterations=self.expr(data["iterations"]),
                    checks=tuple(IndexCheck(*_list(check)) for check in _list(data["checks"])),
                    narrow=self.exprs(data["narrow"]),
                )
            case "copy":
                return CopyBuffer(data["from"], data["to"])
            case "host":
                return HostStep(
                    target=data["target"],
                    outputs=tuple(_list(data["outputs"])),
                    arguments=tuple(self.argument(a) for a in _list(data["arguments"])),
                    keywords=tuple(
                        (name, self.argument(value))
                        for name, value in map(_pair, _list(data["keywords"]))
                    ),
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

    def argument(self, data: Json, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("an argument is nested too deeply")
        if isinstance(data, list):
            return tuple(self.argument(item, depth + 1) for item in data)
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
                return HostConstant(*_pair(value))
            case _:
                raise ValueError(f"unknown argument {kind!r}")


def _bounded(expr: Expr) -> Expr:
    """A sum that did not grow beyond what plans have: products of sums can."""
    if len(expr.terms) > _MAX_TERMS:
        raise ValueError("an expression has too many terms")
    for number in (expr.constant, *(coefficient for _, coefficient in expr.terms)):
        _integer(number)
    return expr


__all__ = ["PlanFormatError", "dumps", "from_json", "loads", "to_json"]
