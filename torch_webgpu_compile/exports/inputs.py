"""The inputs of an exported function: fake tensors whose sizes may be symbols, with names."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sympy import Symbol  # type: ignore[import-untyped]
from torch.export import Dim

from ..errors import UnsupportedOp
from ..torch_private import (
    ConstantSource,
    DimDynamic,
    FakeTensor,
    FakeTensorMode,
    ShapeEnv,
    StrictMinMaxConstraint,
    TreeSpec,
    ValueRanges,
    _disable_current_modes,
    tree_flatten_with_path,
    tree_unflatten,
)

LARGEST = (1 << 31) - 1
"""Of a size that has no largest value."""


@dataclass
class Dimension:
    """A size that is a symbol.

    Attributes:
        name: as `torch.export.Dim` has it.
        value, symbol: the symbol, and its name in expressions.
        low, high: its smallest and largest value.
        is_open: whether the caller set no largest value.
    """

    name: str
    value: torch.SymInt
    symbol: str
    low: int
    high: int
    is_open: bool = False

    @property
    def hint(self) -> int:
        """The value in the example call."""
        return int(self.value.node.hint)


@dataclass
class ExportInputs:
    """The arguments of a call, of which tensors become inputs and anything else is a constant.

    Args:
        function: for the names of its parameters.
        arguments, keywords: of the example call.
        dynamic_shapes: as `torch.export.export` takes them: by parameter's name, or one for each
            argument, nested as the arguments are: None, or a dictionary or a sequence of `Dim`s
            and None, by dimension.

    Attributes:
        by_name: all arguments, by parameter's name.
        names: of the tensors, e.g. ``ids`` or ``batch.mask``, in order.
        tensors: the examples, by name.
        dimensions: by the name of the `Dim`.

    Raises:
        UnsupportedOp: an input is on another device, or has a layout that is not dense.
        ValueError: ``dynamic_shapes`` does not fit the arguments.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    dynamic_shapes: Any = None
    by_name: dict[str, Any] = field(init=False)
    names: tuple[str, ...] = field(init=False)
    tensors: dict[str, torch.Tensor] = field(init=False)
    dimensions: dict[str, Dimension] = field(init=False)
    mode: FakeTensorMode = field(init=False)

    def __post_init__(self) -> None:
        self.env = ShapeEnv(
            allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True, duck_shape=False
        )
        self.mode = FakeTensorMode(
            shape_env=self.env, static_shapes=True, allow_non_fake_inputs=True
        )
        self.dimensions = {}
        parameters = _parameter_names(self.function, len(self.arguments))
        self.by_name = dict(zip(parameters, self.arguments, strict=True)) | dict(self.keywords)
        shapes = self._shapes(parameters)
        self._leaves: list[Any] = []
        self._spec: TreeSpec
        found, self._spec = tree_flatten_with_path(self.by_name)
        self._positional = len(self.arguments)
        self.tensors = {}
        self._sizes: dict[str, tuple[Any, ...]] = {}
        self._names_at: list[str | None] = []
        for path, leaf in found:
            self._leaves.append(leaf)
            if not isinstance(leaf, torch.Tensor):
                self._names_at.append(None)
                continue
            name = path_name(path)
            self._names_at.append(name)
            self.tensors[name] = _checked(name, leaf)
            self._sizes[name] = self._symbolic(name, leaf, _shape_at(shapes, path))
        self.names = tuple(self.tensors)

    def _shapes(self, parameters: Sequence[str]) -> dict[str, Any]:
        given = self.dynamic_shapes
        if given is None:
            return {}
        if isinstance(given, Mapping):
            unknown = set(given) - {*parameters, *self.keywords}
            if unknown:
                raise ValueError(
                    f"dynamic_shapes names {', '.join(sorted(unknown))}, the function's arguments "
                    f"are {', '.join([*parameters, *self.keywords])}; use these names"
                )
            return dict(given)
        if len(given) != len(parameters):
            raise ValueError(
                f"dynamic_shapes has {len(given)} entries for {len(parameters)} arguments; give "
                "one for each, None where all sizes are fixed"
            )
        return dict(zip(parameters, given, strict=True))

    def _symbolic(self, name: str, leaf: torch.Tensor, shape: Any) -> tuple[Any, ...]:
        sizes: list[Any] = list(leaf.shape)
        if shape is None:
            return tuple(sizes)
        pairs = shape.items() if isinstance(shape, Mapping) else enumerate(shape)
        for dim, wanted in pairs:
            if wanted is None or wanted is Dim.STATIC or type(wanted) is int:
                continue
            if not -leaf.dim() <= dim < leaf.dim():
                raise ValueError(f"dynamic_shapes: {name} has no dimension {dim}")
            sizes[dim] = self._size(name, dim % leaf.dim(), wanted, leaf.shape[dim])
        return tuple(sizes)

    def _size(self, name: str, dim: int, wanted: Any, value: int) -> Any:
        if wanted in (Dim.AUTO, Dim.DYNAMIC):
            label, low, high = f"{name}.{dim}", 0, LARGEST
        elif hasattr(wanted, "root"):  # as 2 * Dim("pairs")
            root = self.dimensions.get(wanted.root.__name__)
            if root is None:
                raise ValueError(
                    f"dynamic_shapes: the size {wanted.__name__} of {name} follows from "
                    f"{wanted.root.__name__}, which is of no input before it; give that one first"
                )
            return wanted.fn(root.value)
        else:
            label, low = wanted.__name__, int(wanted.min)
            high = int(wanted.max) if wanted.max < LARGEST else LARGEST
        known = self.dimensions.get(label)
        if known is None:
            if not low <= value <= high or value < 2:
                raise ValueError(
                    f"dimension {dim} of the example {name} is {value}; give an example whose size "
                    f"{label} is in {max(low, 2)} … {high}"
                )
            known = self.dimensions[label] = self._dimension(label, low, high, value)
        if value != known.hint:
            raise ValueError(
                f"dimension {dim} of the example {name} is {value}, the size {label} is "
                f"{known.hint} elsewhere; make them equal"
            )
        return known.value

    def _dimension(self, label: str, low: int, high: int, value: int) -> Dimension:
        source = ConstantSource(f"dim{len(self.dimensions)}")
        symbol = self.env.create_symbol(
            value,
            source,
            dynamic_dim=DimDynamic.DYNAMIC,
            constraint_dim=StrictMinMaxConstraint(
                vr=ValueRanges(max(1, low), high), warn_only=False
            ),
            do_not_specialize_zero_one=True,
        )
        made = self.env.create_symintnode(symbol, hint=value, source=source)
        assert isinstance(made, torch.SymInt)
        return Dimension(label, made, str(symbol), low, high, high == LARGEST)

    def fakes(self) -> list[FakeTensor]:
        """New fake tensors, one per name; of floats without gradients."""
        return [fake_like(t, self.mode, self._sizes[name]) for name, t in self.tensors.items()]

    def settle(self) -> None:
        """Ends the ranges that the caller left open where the captured call stops to hold.

        Raises:
            UnsupportedOp: it does not hold for all sizes that the caller asked for. They are tried
                at the ends of each range and at some sizes between them.
        """
        for d in self.dimensions.values():
            if str(d.value.node.expr) != d.symbol:
                raise UnsupportedOp(
                    "export",
                    f"the function fixes the size {d.name} to {d.value.node.expr}",
                    f"leave {d.name} out of dynamic_shapes, or do not combine it with other sizes",
                )
        example = {name: d.hint for name, d in self.dimensions.items()}
        for name, d in self.dimensions.items():
            if d.low < 1:
                d.low = 1 if self._broken({**example, name: 1}) is None else 2
            if d.is_open:

                def holds(size: int, name: str = name) -> bool:
                    return self._broken({**example, name: size}) is None

                d.high = largest(d.hint, d.high, holds)
        for sizes in self._some_sizes():
            broken = self._broken(sizes)
            if broken is not None:
                shown = ", ".join(f"{name} = {size}" for name, size in sizes.items())
                raise UnsupportedOp(
                    "export",
                    f"the function takes another path where {broken} does not hold, as for {shown}",
                    "narrow the range (Dim(min=…, max=…)), or export two entries",
                )

    def _broken(self, sizes: Mapping[str, int]) -> Any:
        """A guard that does not hold for these sizes by name; None where all do."""
        symbols = {name: d.value.node.expr for name, d in self.dimensions.items()}
        values = {symbols[name]: size for name, size in sizes.items()}
        for guard in self.env.guards:
            if guard.expr.subs(values) == False:  # noqa: E712  (sympy's)
                return guard.expr.subs({symbol: Symbol(n) for n, symbol in symbols.items()})
        return None

    def _some_sizes(self) -> Iterator[dict[str, int]]:
        ranges = []
        for d in self.dimensions.values():
            near = {d.low, d.low + 1, d.low + 2, d.hint, d.high - 1, d.high}
            steps = {d.low + (d.high - d.low) * k // 7 for k in range(8)}
            ranges.append(sorted(size for size in near | steps if d.low <= size <= d.high))
        for sizes in itertools.islice(itertools.product(*ranges), 4096):
            yield dict(zip(self.dimensions, sizes, strict=True))

    def call(self, values: Sequence[Any]) -> Any:
        """The function of other tensors in the places of the examples."""
        given = iter(values)
        leaves = [
            leaf if name is None else next(given)
            for leaf, name in zip(self._leaves, self._names_at, strict=True)
        ]
        by_name = tree_unflatten(leaves, self._spec)
        keys = list(by_name)
        positional = [by_name[key] for key in keys[: self._positional]]
        named = {key: by_name[key] for key in keys[self._positional :]}
        return self.function(*positional, **named)


def fake_like(
    like: torch.Tensor,
    mode: FakeTensorMode,
    sizes: Sequence[Any] | None = None,
    dtype: torch.dtype | None = None,
) -> FakeTensor:
    """A new fake tensor of another one's device, dtype and layout; in rows if sizes are given."""
    options: Any = {"dtype": dtype or like.dtype, "device": "meta"}
    with _disable_current_modes():
        if sizes is None:
            meta = torch.empty_strided(like.shape, like.stride(), **options)
        else:
            meta = torch.empty(tuple(sizes), **options)
    return FakeTensor(mode, meta, like.device)


def largest(good: int, most: int, holds: Callable[[int], bool]) -> int:
    """The largest size up to ``most`` for which something holds that does for ``good``.

    What holds for a size is taken to hold for smaller ones.
    """
    if holds(most):
        return most
    while most - good > 1:
        middle = (good + most) // 2
        good, most = (middle, most) if holds(middle) else (good, middle)
    return good


def path_name(path: Sequence[Any]) -> str:
    """``batch.mask`` or ``0.key`` for a path in a pytree."""
    parts = []
    for key in path:
        for attribute in ("key", "idx", "name"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
        else:
            parts.append(str(key))
    return ".".join(parts)


def _parameter_names(function: Callable[..., Any], count: int) -> list[str]:
    """Of the first parameters; ``args.0`` and so on where the function does not say."""
    call = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}{k}" for k in range(count - len(names))]
    names += [f"arg{k}" for k in range(len(names), count)]
    return names[:count]


def _shape_at(shapes: Mapping[str, Any], path: Sequence[Any]) -> Any:
    """What ``dynamic_shapes`` has for a tensor at a path of the arguments."""
    found: Any = shapes
    for key in path:
        if found is None:
            return None
        index = getattr(key, "key", getattr(key, "idx", None))
        found = found.get(index) if isinstance(found, Mapping) else found[index]
    return found


def _checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_complex():
        raise UnsupportedOp(
            "export", f"the input {name} is sparse or complex", "pass dense real tensors instead"
        )
    if tensor.device.type not in ("cpu", "webgpu"):
        raise UnsupportedOp(
            "export", f"the input {name} is on {tensor.device}", "move it with .cpu()"
        )
    return tensor
