"""The nodes of attention and of its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .. import dtypes
from ..symbolic.sizes import ONE, Expr, as_expr, ceildiv
from .buffers import Buffer
from .scalar import Scalar
from .spaces import Anchor, Node, Rule, Space, named_bodies, shape_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Anchor):
    """output[b, h, q, d] = Σ over s of softmax over s (scale · Σ over e query·key + bias) · value.

    ``sizes`` is (batch, heads, queries, keys, head size, value head size). ``query`` is a scalar
    over (b0, b1, m0, k0), ``key`` over (b0, b1, n0, k0), ``value`` over (b0, b1, n0, d0), and
    ``bias``, ``kept`` and ``replaced`` over (b0, b1, m0, n0), all float32 but the last, which is
    bool; the bias is added to the scaled score and may be -inf, ``kept`` (dropout) multiplies the
    softmax, and where ``replaced`` holds the bias alone is the score. ``score_mod``, of the scaled
    score (the local ``score``) at the same points, takes its place before all that. ``causal``
    keeps keys s ≤ q, a ``window`` those s ≥ q - window. A row whose keys are all masked gives 0, as
    PyTorch's kernels do, or NaN if it is not ``safe``.

    ``logsumexp`` names a second output, float32 [b, h, q]: log Σ over s of exp(score), -inf in a
    row without keys. `AttentionGradient` starts from it. If it is not ``safe``, it is [2, b, h, q]:
    the highest score, and log Σ over s of exp(score - highest).

    ``end``, int32 over (b0, b1, m0), is the first key that a query leaves out with all after it, at
    most the number of keys, and not less for the next query. With several queries a bias leaves
    those keys out, too: kernels read no key that a whole tile of queries leaves out. ``kept`` and
    ``logsumexp`` are None then.

    With several ``parts`` the keys are divided into runs of ceil(keys / parts), with ``end`` the
    keys before the last query's into runs that the kernel chooses. The output, in float32, is
    [part, b, h, q, wide + 4], where wide is the value head size rounded up to 4. Over the part's
    keys it has Σ exp(score - highest) · value at the elements d, the highest score at wide, and
    Σ exp(score - highest) at wide + 1. There is no ``kept`` and no ``logsumexp`` then.
    """

    OUTPUTS: ClassVar[tuple[str, ...]] = ("output", "logsumexp")
    PAIRS: ClassVar[tuple[str, ...]] = ("bias", "kept", "replaced", "score_mod")
    """The bodies that each score has one of."""

    TILED: ClassVar[bool] = True

    sizes: tuple[Expr, Expr, Expr, Expr, Expr, Expr]
    causal: bool
    scale: Scalar
    parts: int = 1
    query: Scalar
    key: Scalar
    value: Scalar
    bias: Scalar | None
    kept: Scalar | None = None
    replaced: Scalar | None = None
    end: Scalar | None = None
    score_mod: Scalar | None = None
    window: int | None = None
    logsumexp: str | None = None
    safe: bool = field(default=True, repr=False)  # the mnemonic says it

    @property
    def locals(self) -> Mapping[str, tuple[str, ...]]:
        return {"score_mod": ("score",)}

    @property
    def wide(self) -> Expr:
        """The value head size rounded up to whole vectors."""
        return ceildiv(self.sizes[5], 4) * 4

    @property
    def spaces(self) -> dict[str, Space]:
        batch, heads, queries, keys, size, value_size = self.sizes
        outer, rows, columns = ("b", (batch, heads)), ("m", (queries,)), ("n", (keys,))
        inner = ("k", (size,))
        return {
            "query": (outer, rows, inner),
            "key": (outer, columns, inner),
            "value": (outer, columns, ("d", (value_size,))),
            **dict.fromkeys(("bias", "kept", "replaced"), (outer, rows, columns)),
            "end": (outer, rows),
            "score_mod": (outer, rows, columns),
            "scale": (),
        }

    @property
    def points(self) -> Space:
        batch, heads, queries, _, _, value_size = self.sizes
        return ("b", (batch, heads)), ("m", (queries,)), ("d", (value_size,))

    @property
    def mnemonic(self) -> str:
        return "attention" if self.safe else "unsafe_attention"

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        yield from _dtype_rules(self)
        batch, heads, queries, *_ = self.sizes
        if self.parts > 1:
            sizes = (as_expr(self.parts), batch, heads, queries, self.wide + 4)
            yield shape_rule(buffers[self.output], sizes)
            alone = self.kept is None and self.logsumexp is None
            yield alone, "no dropout and no logsumexp with parts"
        if self.end is not None:
            yield self.kept is None and self.logsumexp is None, "no dropout and no logsumexp"
            yield self.bias is not None or queries is ONE, "a bias beside the end"
        if self.logsumexp is not None:
            statistic, rows = buffers[self.logsumexp], (batch, heads, queries)
            yield shape_rule(statistic, rows if self.safe else (as_expr(2), *rows))
            yield statistic.dtype is dtypes.float32, "a float32 logsumexp"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGradient(Node):
    """Gradients of `Attention` by its queries, or by its keys and values.

    Scores are computed again. With P = exp(scale · query·key + bias − logsumexp), 0 where causal
    attention, a ``window`` or a bias of -inf removes the key, and dP = kept · (gradient · value):

        dS = P · (dP − delta),  dV = Σ over q of kept · P · gradient,
        dQ = scale · Σ over s of dS · key,  dK = scale · Σ over q of dS · query,

    the last two without what is ``replaced``. With ``score_mod`` the scaled score is the local
    ``score`` of it, as in `Attention`, and of ``score_grad``, which makes the dS of dQ and dK of
    the dS above, its local ``gradient``. With ``rest``, which is there if attention is not
    safe, ``logsumexp`` is the highest score only, and P = exp(score − logsumexp − rest).

    ``group`` query heads share a key head; sums over q are over all of them. ``sizes`` is (batch,
    key heads, group, queries, keys, head size, value head size), their symbols b0, b1, g0, m0, n0,
    k0, d0. ``query`` is a scalar over (b0, b1, g0, m0, k0), ``key`` over (b0, b1, n0, k0),
    ``value`` over (b0, b1, n0, d0), ``gradient`` (of the output) over (b0, b1, g0, m0, d0),
    ``logsumexp``, ``rest`` and ``delta`` (Σ over d of gradient · output) over (b0, b1, g0, m0),
    ``bias``, ``kept``, ``replaced``, ``score_mod`` and ``score_grad`` over (b0, b1, g0, m0, n0);
    all float32 but ``replaced``, which is bool.

    The outputs are dQ, [b, h, g, q, head], or of "keys" dK, [b, h, s, head], and dV, [b, h, s,
    value head].
    """

    OUTPUTS: ClassVar[tuple[str, ...]] = ("outputs",)
    PAIRS: ClassVar[tuple[str, ...]] = (*Attention.PAIRS, "score_grad")
    """The bodies that each score has one of."""

    TILED: ClassVar[bool] = True

    outputs: tuple[str, ...]
    of: Literal["queries", "keys"]
    sizes: tuple[Expr, Expr, Expr, Expr, Expr, Expr, Expr]
    causal: bool
    scale: Scalar
    query: Scalar
    key: Scalar
    value: Scalar
    gradient: Scalar
    logsumexp: Scalar
    delta: Scalar
    bias: Scalar | None
    kept: Scalar | None
    replaced: Scalar | None = None
    rest: Scalar | None = None
    score_mod: Scalar | None = None
    score_grad: Scalar | None = None
    window: int | None = None

    @property
    def spaces(self) -> dict[str, Space]:
        batch, heads, group, queries, keys, size, value_size = self.sizes
        outer, columns = ("b", (batch, heads)), ("n", (keys,))
        rows = (outer, ("g", (group,)), ("m", (queries,)))
        inner, value_inner = ("k", (size,)), ("d", (value_size,))
        return {
            "query": (*rows, inner),
            "key": (outer, columns, inner),
            "value": (outer, columns, value_inner),
            "gradient": (*rows, value_inner),
            **dict.fromkeys(("logsumexp", "delta"), rows),
            **dict.fromkeys(("bias", "kept", "replaced"), (*rows, columns)),
            "rest": rows,
            **dict.fromkeys(("score_mod", "score_grad"), (*rows, columns)),
            "scale": (),
        }

    @property
    def locals(self) -> Mapping[str, tuple[str, ...]]:
        return {"score_mod": ("score",), "score_grad": ("score", "gradient")}

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        yield from _dtype_rules(self)
        yield self.of in ("queries", "keys"), "queries or keys"
        yield (self.score_mod is None) == (self.score_grad is None), "score_mod with its gradient"
        yield len(self.outputs) == len(self.output_sizes), "an output for each gradient"
        for name, sizes in zip(self.outputs, self.output_sizes, strict=True):
            yield shape_rule(buffers[name], sizes)

    @property
    def rows(self) -> dict[str, Scalar]:
        """The bodies that each query of each head has one of."""
        names = ("logsumexp", "rest", "delta")
        return {n: body for n, body in named_bodies(self).items() if n in names}

    @property
    def pairs(self) -> dict[str, Scalar]:
        """The bodies that each score has one of, but for those with locals."""
        names = {*self.PAIRS} - {*self.locals}
        return {n: body for n, body in named_bodies(self).items() if n in names}

    @property
    def output_sizes(self) -> tuple[tuple[Expr, ...], ...]:
        """The sizes of each output buffer."""
        batch, heads, group, queries, keys, head, value_head = self.sizes
        if self.of == "queries":
            return ((batch, heads, group, queries, head),)
        return (batch, heads, keys, head), (batch, heads, keys, value_head)


_DTYPES = {"replaced": dtypes.bool_, "end": dtypes.int32}


def _dtype_rules(node: Attention | AttentionGradient) -> Iterator[Rule]:
    for name, body in named_bodies(node).items():
        dtype = _DTYPES.get(name, dtypes.float32)
        yield body.dtype is dtype, f"a {dtype.name} {name}"
