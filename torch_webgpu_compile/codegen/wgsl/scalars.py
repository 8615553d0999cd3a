"""Scalar expressions as WGSL statements, one or four lanes wide.

`Renderer` walks a `Scalar` DAG, appends ``let`` statements to the open scope and returns `Text`s. A
value that is equal in all four lanes is computed once as a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from itertools import takewhile

from ... import dtypes
from ...dtypes import DType
from ...errors import UnsupportedOp
from ...ir.access import (
    ACCESS_NBYTES,
    VECTOR,
    address_of,
    are_aligned_neighbours,
    is_multiple_of,
    load_index,
)
from ...ir.folding import COMPARISONS, as_index
from ...ir.scalar import (
    Checked,
    Const,
    FunctionCall,
    Index,
    Load,
    Local,
    Masked,
    Op,
    Scalar,
    children,
    is_host_float,
    loads_of,
    substitute_symbols,
)
from ...plan.model import FIRST_CHECK
from ...symbolic.sizes import (
    Expr,
    Symbol,
    as_expr,
    is_nonnegative,
    linearize,
    substitute,
    symbols_of,
)
from ..hardening.spelling import fast_exp, int64_of, opaque, position_as_float, suffix
from ..values import Gather, Scope, SomeText, Text, UniqueNames, choice, in_lanes, vector_type
from .buffer_access import element_of
from .casts import bitcast, cast, converted, fitted
from .indices import (
    NameOf,
    host_number,
    is_clamped,
    is_of_sizes,
    low_word,
    narrow_bounds,
    render_comparisons,
    render_index,
    render_wide,
    wraps,
)
from .literals import literal
from .op_table import WRAPPING, op_row
from .storage import Bindings


@dataclass(eq=False)
class Renderer:
    """Renders scalars at one point (or four neighbouring points) of an iteration space.

    Attributes:
        bindings: records buffer accesses.
        names: gives unique names within the kernel.
        name_of: the WGSL names of kernel-level index symbols and of sizes.
        lanes: for each lane, the value of every iteration symbol as an expression of kernel-level
            symbols.
        member: gives the value of a buffer computed in this kernel, or None to load it from memory.
        predicate: a scalar bool expression guarding every load (tail of a row), or None.
        outer: a renderer of an enclosing scope (a row around its elements), or None.
        belongs_outside: whether a node has one value in the whole enclosing scope.
        branches: whether a choice between memories is a branch, for one that seldom goes the first
            way.
        wide: the scope, around this one and others, of accesses that serve several of them; None
            where each loads for itself.
    """

    bindings: Bindings
    names: UniqueNames
    name_of: NameOf
    lanes: Sequence[Mapping[Symbol, Expr]]
    scope: Scope
    member: Callable[[Load], Text | None] = lambda load: None
    predicate: InitVar[str | None] = None
    outer: Renderer | None = None
    belongs_outside: Callable[[Scalar], bool] = lambda node: False
    branches: bool = False
    wide: Scope | None = None
    masked: int = field(default=0, init=False)
    _prepared: set[Scalar] = field(default_factory=set, init=False)
    _accessing: dict[Scalar, bool] = field(default_factory=dict, init=False)

    def __post_init__(self, predicate: str | None) -> None:
        self.in_wgsl = self.bindings.target.in_wgsl
        self.int64 = self.in_wgsl(dtypes.int64)
        self.predicates: tuple[Text | str, ...] = () if predicate is None else (predicate,)

    def render(self, root: Scalar) -> Text:
        """The value of ``root``; statements go to the open scope."""
        if self.outer is not None and not self.masked and self.belongs_outside(root):
            return self.outer.render(root)
        compute = partial(self._compute, root)
        if self.wide is not None and isinstance(root, Op):
            return self._shared("value", root, partial(self._once, "value", root, compute))
        return self._once("value", root, compute)

    def _once(self, kind: str, node: Scalar, make: Callable[[], SomeText]) -> SomeText:
        """What `Scope.once` has of a node under these predicates, or fewer: it is the same value.

        Where nothing is loaded, they ask nothing.
        """
        fewer = range(len(self.predicates)) if self.predicates else ()
        if fewer and not self._accesses(node):
            return self.scope.once((kind, node, ()), make)
        for count in fewer:
            found = self.scope.find((kind, node, self.predicates[:count]))
            if found is not None:
                return found
        return self.scope.once((kind, node, self.predicates), make)

    def _accesses(self, node: Scalar) -> bool:
        """Whether predicates are asked on the way to a value."""
        found = self._accessing.get(node)
        if found is None:
            asks = isinstance(node, (Load, Checked, FunctionCall))
            found = asks or any(map(self._accesses, children(node)))
            self._accessing[node] = found
        return found

    def _member(self, load: Load) -> Text | None:
        """`member`, whose statements are there once."""
        return self._once("member", load, partial(self.member, load))

    def _compute_members(self, node: Scalar) -> None:
        """Computes the members that an expression needs before the rest of it.

        So what one member loads stands together in the kernel, whatever other ones load.
        """
        match node:
            case Load():
                self._member(node)
            case Masked():
                self._compute_members(node.condition)
            case Op() | FunctionCall() if node not in self._prepared and not is_host_float(node):
                self._prepared.add(node)
                for arg in node.args:
                    self._compute_members(arg)

    def let(self, code: str, lanes: int, dtype: DType) -> Text:
        """Names an expression in the open scope, where nothing names the same one."""

        def make() -> Text:
            name = self.names.fresh("t")
            self.scope.lines.append(f"let {name} = {code};")
            return Text(name, lanes, dtype)

        return self.scope.once((code, lanes, dtype), make)

    def _compute(self, node: Scalar) -> Text:
        match node:
            case Const():
                dtype = self.in_wgsl(node.dtype)
                return Text(literal(Const(node.value, dtype)), 1, dtype)
            case Index(expr):
                return self._index(expr, self.int64)
            case Load():
                known = self._member(node)
                return known if known is not None else self._load(node)
            case Op():
                self._compute_members(node)
                return self._op(node)
            case Masked():
                return self._masked(node)
            case Checked():
                return cast(self._checked(node), self.int64, self.let)
            case FunctionCall():
                self._compute_members(node)
                return self._call(node)
            case Local(name, dtype):
                return Text(name, len(self.lanes), self.in_wgsl(dtype))

    def per_lane(self, expr: Expr) -> list[Expr]:
        """An index expression in kernel-level symbols, for each lane."""
        return [substitute(expr, env) for env in self.lanes]

    def _index(self, expr: Expr, dtype: DType) -> Text:
        """An index expression as a value: an int64, or an i32 (modulo 2³²) if that is asked for."""
        values = self.per_lane(expr)
        if dtype is not self.int64:
            codes = [f"i32({render_index(v, self.name_of)})" for v in values]
        elif self._is_narrow(expr):
            codes = [int64_of(render_index(v, self.name_of), dtype) for v in values]
        else:
            codes = [
                render_wide(expr, partial(substitute, values=env), self.name_of, dtype)
                for env in self.lanes
            ]
        if all(v is values[0] for v in values):
            return self.let(codes[0], 1, dtype)
        return self.let(in_lanes(dtype, codes), VECTOR, dtype)

    def _is_narrow(self, expr: Expr) -> bool:
        """Whether a value is computed in 32 bits; the runtime checks what that relies on."""
        bounds = narrow_bounds(expr)
        if bounds is None or not self.bindings.are_sizes(symbols_of(expr)):
            return False
        self.bindings.narrow.update(dict.fromkeys(bounds))
        return True

    # -- loads ---------------------------------------------------------------------------------

    def packed(self, node: Load) -> str | None:
        """Four neighbours of a 16-bit dtype in two words, as in memory; None if no access has them.

        The value of a member is not in memory.
        """
        if self._member(node) is not None:
            return None
        addresses, gathers = self._places(node)
        if not (self._is_uniform(gathers) and self._are_neighbours(node, addresses, gathers)):
            return None
        return self._access(node, "pairs", addresses[0] // VECTOR, gathers, unit=VECTOR)

    def _places(self, node: Load) -> tuple[list[Expr], list[Gather]]:
        """The terms of a load's address in each lane: index expressions, and gathers from data."""
        buffer = self.bindings.buffers[node.buffer]
        entries = list(map(as_index, node.index))
        affine = [as_expr(0) if entry is None else entry for entry in entries]
        address = linearize(affine, buffer.strides) + buffer.offset
        gathers = [
            Gather(self._gathered(i), stride, size, self._inside(i, size))
            for i, entry, stride, size in zip(
                node.index, entries, buffer.strides, buffer.sizes, strict=True
            )
            if entry is None
        ]
        return self.per_lane(address), gathers

    def _is_uniform(self, gathers: list[Gather]) -> bool:
        """Whether all lanes load alike, but for what is known of their addresses."""
        masks = [m for m in self.predicates if isinstance(m, Text)]
        return all(m.lanes == 1 for m in masks) and all(g.value.lanes == 1 for g in gathers)

    def _are_neighbours(self, node: Load, addresses: list[Expr], gathers: list[Gather]) -> bool:
        """Whether the lanes, which load alike, are four elements that one access has."""
        step = [a - addresses[0] for a in addresses]
        return (
            len(step) == VECTOR
            and all(s.is_constant and s.constant == k for k, s in enumerate(step))
            and is_multiple_of(addresses[0], VECTOR)
            and all(is_multiple_of(g.stride, VECTOR) for g in gathers)
            and self.bindings.can_vectorize(node.dtype)
        )

    def _load(self, node: Load) -> Text:
        addresses, gathers = self._places(node)
        uniform = self._is_uniform(gathers)
        if self.wide is not None and uniform and not self.masked:
            found = self._wide_load(node, addresses, gathers, self.wide)
            if found is not None:
                return found
        if uniform and all(a is addresses[0] for a in addresses):
            if self.wide is not None and not gathers and not self.masked:
                return self._shared_load(node, addresses[0], self.wide)
            return self._scalar_load(node, addresses[0], gathers, 0)
        if uniform and self._are_neighbours(node, addresses, gathers):
            code = self._access(node, "load4", addresses[0] // VECTOR, gathers, unit=VECTOR)
            return self.let(code, VECTOR, node.dtype)
        parts = [self._scalar_load(node, a, gathers, k).code for k, a in enumerate(addresses)]
        dtype = self.in_wgsl(node.dtype)
        return self.let(in_lanes(dtype, parts), VECTOR, dtype)

    def _gathered(self, entry: Scalar) -> Text:
        """`position`; around this scope where an access may be that depends on it."""
        return self._shared("position", entry, partial(self.position, entry))

    def _shared(self, kind: str, node: Scalar, make: Callable[[], Text]) -> Text:
        """What ``make`` gives of a node; around this scope if it is the same in all lanes.

        There other renderers find it, to which it is the same, too.
        """
        if self.wide is None or self.masked:
            return make()
        first, *others = self.lanes
        value = substitute_symbols(node, first)
        if any(substitute_symbols(node, values) != value for values in others):
            return make()
        wide = self.wide

        def compute() -> Text:
            own, self.scope = self.scope, Scope(parent=wide)  # where values are those of our lanes
            try:
                found = make()
            finally:
                made, self.scope = self.scope, own
            wide.lines += made.lines
            return found

        return wide.once((kind, value, self.predicates), compute)

    def _wide_load(
        self, node: Load, addresses: list[Expr], gathers: list[Gather], wide: Scope
    ) -> Text | None:
        """Elements of one access to whole words, which serves other renderers too; None if not."""
        dtype = node.dtype
        if dtype.itemsize > 4:
            return None
        width = VECTOR if dtype.packing == 1 else ACCESS_NBYTES // dtype.itemsize
        first = addresses[0] - addresses[0].constant % width
        places = [address - first for address in addresses]
        if not (
            is_multiple_of(first, width)
            and all(is_multiple_of(gather.stride, width) for gather in gathers)
            and all(place.is_constant and 0 <= place.constant < width for place in places)
        ):
            return None
        if dtype.packing == 1 and places[-1] is not places[0]:
            return None  # a vector of whole words
        verb = "load4" if dtype.packing == 1 else "words"
        kind = dtype if dtype.packing == 1 else dtypes.uint32

        def load() -> Text:
            code = self._access(node, verb, first // width, gathers, unit=width)
            return self.let(code, VECTOR, kind)

        key = (verb, node.buffer, first, tuple(gathers), self.predicates)
        words = self._in_scope(wide, key, load)
        lanes = [place.constant for place in places]
        if dtype.packing == 1:
            return Text(words.lane(lanes[0]), 1, dtype)
        if len(set(lanes)) == 1:
            return self.let(element_of(dtype, words.code, lanes[0]), 1, dtype)
        parts = [element_of(dtype, words.code, lane) for lane in lanes]
        return self.let(in_lanes(dtype, parts), VECTOR, dtype)

    def _shared_load(self, node: Load, address: Expr, wide: Scope) -> Text:
        """An element that other renderers in the scope read too."""
        key = ("load", node.buffer, address, self.predicates)
        return self._in_scope(wide, key, lambda: self._scalar_load(node, address, [], 0))

    def _in_scope(self, scope: Scope, key: object, make: Callable[[], Text]) -> Text:
        """The value known under a key in a scope around this one, or made there."""
        own, self.scope = self.scope, scope
        try:
            return scope.once(key, make)
        finally:
            self.scope = own

    def words(self, node: Load) -> Text | None:
        """The lanes of a load, four or sixteen bytes, as the words in memory that they are.

        None where they are not. Nothing else is rendered for those lanes.
        """
        buffer = self.bindings.buffers[node.buffer]
        index = load_index(node)
        if index is None or node.dtype.packing != VECTOR or self.predicates:
            return None
        addresses = self.per_lane(address_of(node, buffer.strides) + buffer.offset)
        if not are_aligned_neighbours(addresses):
            return None
        count = len(addresses)
        verb = "word" if count == VECTOR else "words"
        code = self._access(node, verb, addresses[0] // count, [], unit=count)
        return self.let(code, count // VECTOR, dtypes.uint32)

    def _scalar_load(self, node: Load, address: Expr, gathers: list[Gather], lane: int) -> Text:
        code = self._access(node, "load", address, gathers, lane)
        return self.let(code, 1, self.in_wgsl(node.dtype))

    def _access(
        self,
        node: Load,
        verb: str,
        affine: Expr,
        gathers: list[Gather],
        lane: int = 0,
        unit: int = 1,
    ) -> str:
        """What an access to so many elements gives; ``affine`` counts those accesses."""
        function = self.bindings.function(node.buffer, verb)
        self.bindings.gather(node, bool(gathers))
        start = render_index(affine, self.name_of)
        code = start
        if gathers and len(affine.terms) > 1:  # what a search adds each of its positions to
            key = ("index", affine)
            code = self.scope.once(key, lambda: self.let(start, 1, dtypes.int32)).code
        for gather in gathers:
            step = render_index(gather.stride // unit, self.name_of)
            last = render_index(gather.size - 1, self.name_of)
            at = gather.value.lane(lane)
            if gather.value.dtype is not dtypes.int32:
                at = converted(at, gather.value.dtype, dtypes.int32)
            code += f" + {gather.inside.format(at, last)} * ({step})"
        if self.predicates:
            condition = " && ".join(
                p if isinstance(p, str) else p.lane(lane) for p in self.predicates
            )
            code = f"select(0, {code}, {condition})"
        return f"{function}({code})"

    def _masked(self, node: Masked) -> Text:
        condition = self.render(node.condition)
        if self.branches and condition.lanes == 1 and not self.masked and loads_of(node.other):
            return self._branch(condition, node)
        outer = self.predicates
        self.predicates = outer if condition in outer else (*outer, condition)
        self.masked += 1
        body = self.render(node.body)
        self.masked -= 1
        self.predicates = outer
        other = self.render(node.other)
        lanes = max(condition.lanes, body.lanes, other.lanes)
        dtype = self.in_wgsl(node.dtype)
        code = choice(condition, body.widen(lanes), other.widen(lanes), lanes, dtype)
        return self.let(code, lanes, dtype)

    def _branch(self, condition: Text, node: Masked) -> Text:
        other = self.render(node.other)
        around = self.scope
        self.scope = Scope(parent=around)
        self.masked += 1
        body = self.render(node.body)
        self.masked -= 1
        inner, self.scope = self.scope.lines, around
        lanes = max(body.lanes, other.lanes)
        name = self.names.fresh("t")
        around.lines += [
            f"var {name} = {other.widen(lanes)};",
            f"if ({condition.code}) {{",
            *(f"  {line}" for line in inner),
            f"  {name} = {body.widen(lanes)};",
            "}",
        ]
        return Text(name, lanes, self.in_wgsl(node.dtype))

    # -- indices from data ---------------------------------------------------------------------

    def position(self, entry: Scalar) -> Text:
        """An entry of an index that is computed from data, an i32 where it is known to be one."""
        return self._checked(entry) if isinstance(entry, Checked) else self.render(entry)

    def is_below(self, entry: Scalar, size: Expr) -> bool:
        """Whether a check keeps an entry of an index below a size."""
        checked = as_index(entry.size) if isinstance(entry, Checked) else None
        return checked is not None and is_nonnegative(size - checked)

    def _inside(self, entry: Scalar, size: Expr) -> str:
        """`Gather.inside`: nothing checks bounds, and no index may read foreign memory."""
        if is_clamped(entry, size):
            return "{0}"
        return "max({0}, 0)" if self.is_below(entry, size) else "clamp({0}, 0, {1})"

    def _checked(self, node: Checked) -> Text:
        """The position as an i32, -1 where it is out of range, which is reported."""
        if self.outer is not None and not self.masked and self.belongs_outside(node):
            return self.outer._checked(node)
        return self._once("checked", node, partial(self._check, node))

    def _check(self, node: Checked) -> Text:
        given = self.render(node.given)
        position = self._narrow(node.position) or self.render(node.position)
        size = as_index(node.size)
        assert size is not None
        limit = render_index(size, self.name_of)
        first = self.name_of(FIRST_CHECK)
        is_narrow = position.dtype is dtypes.int32
        names = []
        masks = [m for m in self.predicates if isinstance(m, Text)]
        for lane in range(max(text.lanes for text in (position, given, *masks))):
            at = position.lane(lane)
            name = self.names.fresh("t")
            index = Text(given.lane(lane), 1, given.dtype)
            report = self.bindings.report(node.check, first, index, limit)
            # Negative positions are large ones without a sign.
            tests = [p if isinstance(p, str) else p.lane(lane) for p in self.predicates]
            tests.append(f"u32({at}) >= u32({limit})" if is_narrow else self._is_outside(at, limit))
            start = at if is_narrow else converted(at, position.dtype, dtypes.int32)
            self.scope.lines += [
                f"var {name} = {start};",
                f"if ({' && '.join(tests)}) {{ {name} = -1; {report} }}",
            ]
            names.append(name)
        if len(names) == 1:
            return Text(names[0], 1, dtypes.int32)
        return self.let(in_lanes(dtypes.int32, names), VECTOR, dtypes.int32)

    def _is_outside(self, position: str, limit: str) -> str:
        """Whether an int64 is negative, or at least an i32 that is not."""
        if self.int64 is dtypes.int64:
            return f"bitcast<u64>({position}) >= u64({limit})"
        return f"({position}.y != 0u || {position}.x >= u32({limit}))"

    # -- operators -----------------------------------------------------------------------------

    def _op(self, node: Op) -> Text:
        if node.name in COMPARISONS:
            exprs = [as_index(a) for a in node.args]
            if exprs[0] is not None and exprs[1] is not None:
                if self._is_narrow(exprs[0]) and self._is_narrow(exprs[1]):
                    return self._compare(node, exprs[0], exprs[1])
                sides = [self._index(e, self.int64) for e in exprs if e is not None]
                return self._apply_row(node, self.int64, sides)
            left, right = (self._narrow(a) for a in node.args)
            if left is not None and right is not None:
                return self._apply_row(node, dtypes.int32, [left, right])
        is_position = isinstance(node.args[0], Index) and self._is_narrow(node.args[0].expr)
        number = None if is_position else host_number(node)
        if number is not None:
            return self.let(f"bitcast<f32>({self.name_of(number)})", 1, node.dtype)
        if node.name == "cast" and isinstance(node.args[0], Index) and node.dtype.compute != "i64":
            expr = node.args[0].expr
            if node.dtype.is_integer and is_of_sizes(expr) and not is_position:
                low = Text(low_word(expr, self.name_of), 1, dtypes.int32)
                return cast(low, node.dtype, self.let)
            modular = (
                node.dtype.is_integer and wraps(expr) and self.bindings.are_sizes(symbols_of(expr))
            )
            width = dtypes.int32 if modular or is_position else self.int64
            position = cast(self._index(expr, width), node.dtype, self.let)
            return position_as_float(position, self.per_lane(expr))
        bounded = self._narrow(node) if _stays_narrow(node) else None
        if bounded is not None:
            return cast(bounded, self.in_wgsl(node.dtype), self.let)
        args = [self.render(a) for a in node.args]
        if node.name == "opaque":
            return opaque(args[0])
        if node.name == "cast":
            return cast(args[0], self.in_wgsl(node.dtype), self.let)
        if node.name == "bitcast":
            return bitcast(args[0], node.dtype, self.let)
        return self._apply_row(node, self.in_wgsl(node.args[-1].dtype), args)

    def _call(self, node: FunctionCall) -> Text:
        """A result of a user's function, which is called for each lane."""
        function = node.function
        self.bindings.functions.setdefault(function.text, function)
        args = [self.render(a) for a in node.args]
        lanes = max(a.lanes for a in args)
        member, _ = function.results[node.result]
        types = [type for _, type in function.parameters]
        results = []
        for lane in range(lanes):
            given = [a.lane(lane) for a in args]
            # Where all is float32, as it is; float16 is converted.
            texts = [f"f16({g})" if t == "f16" else g for g, t in zip(given, types, strict=True)]
            code = f"{function.unique}({', '.join(texts)})"
            if member:  # the other results are of the same call
                key = ("call", function, node.args, lane, self.predicates)
                made = self.scope.once(key, partial(self.let, code, 1, node.dtype))
                code = f"{made.code}.{member}"
            results.append(f"{node.dtype.compute}({code})")
        if lanes == 1:
            return self.let(results[0], 1, node.dtype)
        return self.let(in_lanes(node.dtype, results), lanes, node.dtype)

    def _apply_row(self, node: Op, operand: DType, args: Sequence[Text]) -> Text:
        lanes = max(a.lanes for a in args)
        row = op_row(node.name, operand)
        if row is None:
            raise UnsupportedOp(
                node.name,
                f"no WGSL for this scalar operation on {operand.name}",
                "please report the model that needs it",
            )
        dtype = self.in_wgsl(node.dtype)
        code = row.format(
            *(a.widen(lanes) for a in args),
            T=vector_type(dtype, lanes),
            v=suffix(operand, lanes),
            s=operand.compute,
            exp=fast_exp(self.bindings.target, lanes),
        )
        value = self.let(code, lanes, dtype)
        return fitted(value, self.let) if node.name in WRAPPING else value

    def _narrow(self, node: Scalar) -> Text | None:
        """An int64 that is known to fit 32 bits, as an i32; None when it is not known to.

        Besides being cheaper, this avoids comparing a widened i32 with a constant, which Mesa
        22.3's lavapipe compiles to false.
        """
        if self.outer is not None and not self.masked and self.belongs_outside(node):
            return self.outer._narrow(node)
        return self._once("narrow", node, partial(self._compute_narrow, node))

    def _compute_narrow(self, node: Scalar) -> Text | None:
        if isinstance(node, Checked):
            return self._checked(node)
        expr = as_index(node)
        if expr is not None:
            fits = self._is_narrow(expr) or (is_of_sizes(expr) and self.bindings.is_count(expr))
            return self._index(expr, dtypes.int32) if fits else None
        if isinstance(node, Op) and node.name == "cast" and node.dtype is dtypes.int64:
            (inner,) = node.args
            if (
                inner.dtype.is_integer
                and inner.dtype.bits <= 32
                and inner.dtype is not dtypes.uint32
            ):
                return cast(self.render(inner), dtypes.int32, self.let)
        known = self._member(node) if isinstance(node, Load) else None
        if known is not None and known.narrow:
            return Text(known.narrow, known.lanes, dtypes.int32)
        if isinstance(node, Op) and node.dtype is dtypes.int64 and _stays_narrow(node):
            # A driver may see through these: i | i is the widened i again.
            given = node.args[1:] if node.name == "where" else node.args
            narrowed = list(takewhile(lambda a: a is not None, map(self._narrow, given)))
            if len(narrowed) == len(given):
                condition = [self.render(node.args[0])] if node.name == "where" else []
                operands = [*condition, *(a for a in narrowed if a is not None)]
                result = Op(node.name, node.args, dtypes.int32)
                return self._apply_row(result, dtypes.int32, operands)
        return None

    def _compare(self, node: Op, left: Expr, right: Expr) -> Text:
        """A comparison of index expressions: 32 bits suffice, often without lanes."""
        lefts, rights = self.per_lane(left), self.per_lane(right)
        codes = render_comparisons(node.name, lefts, rights, self.name_of)
        if len(codes) == 1:
            return self.let(codes[0], 1, node.dtype)
        return self.let(in_lanes(node.dtype, codes), VECTOR, node.dtype)


# Results are among, or no wider than, the operands.
_BOUNDED = frozenset(
    {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "minimum", "maximum", "where"}
)
_DIVISIONS = frozenset({"trunc_divide", "floor_divide", "fmod", "remainder"})


def _stays_narrow(node: Op) -> bool:
    """Whether 32 bits hold the result of an operator on int64s where they hold its operands.

    Not that of a division by -1: -2³¹ gives 2³¹. One by 0 has no result.
    """
    if node.name not in _DIVISIONS:
        return node.name in _BOUNDED
    divisor = as_index(node.args[1])
    return divisor is not None and is_nonnegative(divisor)
