"""Hardening: kernels' arithmetic, written so that no driver computes another one.

`quirks` is the table of what drivers were found to do: a row for each, with its test. `harden`, a
pass between scheduling and code generation, applies the table to all scalar expressions; its result
is plain IR, and computes the same on the host. ``opaque`` is the operation by which a value is
hidden: its result is its operand, and a driver's compiler knows nothing of it.

    special_values  0 · x, x - x, exp(log x), divisors beyond 2^126: operations that are rewritten
    real_numbers    (a + b) - a, a · b / b, a > b ? a : b: operations whose operands are hidden
    spelling        what only WGSL can say: the entry point's variables, types, accumulators
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from ...dtypes import bfloat16, float16, int64
from ...ir.folding import simplified
from ...ir.graph import (
    ForeachGroup,
    JointGroup,
    KernelGroup,
    Member,
    RowGroup,
    Schedule,
    SiblingGroup,
    map_group,
)
from ...ir.nodes import map_bodies
from ...ir.scalar import Const, Index, Load, Op, Scalar, const, is_host_float, rewrite
from .quirks import HIDES, REWRITES
from .real_numbers import Values

__all__ = ["harden", "harden_body"]


def harden(schedule: Schedule) -> Schedule:
    """The schedule with every scalar expression hardened; host calls have none."""
    groups = tuple(map(_hardened, schedule.groups))
    return schedule if groups == schedule.groups else replace(schedule, groups=groups)


def _hardened(group: KernelGroup) -> KernelGroup:
    if isinstance(group, SiblingGroup | ForeachGroup | JointGroup):  # side by side
        parts = tuple(map(_hardened, group.groups))
        return replace(group, groups=parts)  # type: ignore[arg-type]
    kernel = _Kernel(rounds=isinstance(group, RowGroup))
    return map_group(group, lambda node: map_bodies(node, kernel), kernel.member)


def harden_body(body: Scalar) -> Scalar:
    """A scalar expression of a kernel of its own, hardened."""
    return _Kernel()(body)


class _Kernel:
    """Hardens the expressions of one kernel in order: each sees what the ones before compute.

    ``rounds``: whether others may read a member as it is stored in 16 bits.
    """

    def __init__(self, rounds: bool = False) -> None:
        self.rounds = rounds
        self.values = Values()
        self._done: dict[Scalar, Scalar] = {}

    def __call__(self, body: Scalar) -> Scalar:
        return rewrite(rewrite(body, self._rewritten, is_host_float), self._hidden, is_host_float)

    def member(self, member: Member) -> Member:
        """A member of the kernel, hardened."""
        body = self(member.body)
        if member.reduction is None and not (self.rounds and body.dtype in (float16, bfloat16)):
            self.values.members[member.output] = body
        return replace(member, body=body)

    def _rewritten(self, node: Scalar) -> Scalar | None:
        """Constants folded; then the first row that applies."""
        match node:
            case Load(buffer):
                known = self.values.members.get(buffer)
                return known if isinstance(known, Const) else None
            case Op(name, args, dtype):
                node = Op(name, tuple(map(_constant, args)), dtype)
        found = simplified(node)
        if found is not None:
            return found
        for rewritten in REWRITES:
            found = rewritten(node)
            if found is not None:
                return found
        return node

    def _hidden(self, node: Scalar) -> Scalar:
        """An operation on float32 whose operands are hidden where a row says so."""
        found = self._done.get(node)
        if found is None:
            found = self._operation(node) if _is_arithmetic(node) else node
            self._done[node] = found
        return found

    def _operation(self, node: Op) -> Scalar:
        values = self.values
        positions = {k for hides in HIDES for k in hides(node, values)}
        if positions == {1} and node.name in ("add", "sub", "mul"):  # either one will do
            positions = {min((1, 0), key=lambda k: values.hidden(node.args[k]))}
        args = tuple(values.opaque(a) if k in positions else a for k, a in enumerate(node.args))
        made = Op(node.name, args, node.dtype)
        values.note(made)
        return made


def _constant(node: Scalar) -> Scalar:
    """A position without symbols, as a constant."""
    match node:
        case Index(expr) if expr.is_constant:
            return const(expr.constant, int64)
    return node


def _is_arithmetic(node: Scalar) -> TypeGuard[Op]:
    """Whether it is an operation on float32, in a kernel, other than a conversion."""
    if not isinstance(node, Op) or node.name in ("cast", "bitcast"):
        return False
    return node.args[-1].dtype.compute == "f32"
