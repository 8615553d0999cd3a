"""What a process before made of operators' calls, found without tracing them.

An entry of the cache folder has the interface of a call, and of a call of one operator the key of
its plan (`StoredCall`), by all that these follow from: operators, arguments, switches of PyTorch's,
the GPU and options. It is pickled: the folder is as safe as the program (`plan.cache_folder`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...capture.eager.arguments import as_traced
from ...capture.eager.calls import CallInterface, TensorSpec
from ...capture.eager.capture import next_name
from ...compiler import of_every_graph
from ...counters import counters
from ...errors import VerificationError
from ...lowering.registry import is_of_user
from ...node_text import Unreadable, argument_text
from ...options import CompileOptions
from ...plan import cache as plan_cache
from ...plan.cache_folder import digest_of
from ...plan.model import Plan
from ...target import Target
from ...torch_ops.dtypes import dtype_of
from ...torch_private import OpOverload, TreeSpec
from ...tuning.machines import measured_target

_NAMESPACES = ("aten", "prims", "webgpu")  # a program's own operators may change

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledCall:
    """What comes of a call but its kernels.

    Attributes:
        interface: of the call.
        plan: of its graph.
        has_loops: whether other plans can be made for its sizes (`compiler.loops_of`).
        depends_on_determinism: see `compiler.Compilation`.
    """

    interface: CallInterface
    plan: Plan
    has_loops: bool
    depends_on_determinism: bool


class StoredCall:
    """The entry of a call of one operator.

    Args:
        op: what is called.
        leaves: with a `TensorSpec` for each tensor.
        spec: how they are nested.
        target, options: as for `compiler.compile_graph`.
    """

    def __init__(
        self,
        op: OpOverload,
        leaves: Sequence[Any],
        spec: TreeSpec,
        target: Target,
        options: CompileOptions,
    ) -> None:
        self._op, self._leaves, self._options = op, leaves, options
        self._key = call_key([op], partial(_text, op, leaves, spec), target, options)

    def find(self) -> CompiledCall | None:
        """What is stored, if the plan that goes with it is."""
        content = read_call(self._key, self._options)
        if content is None:
            return None
        plan_key, interface, has_loops, depends = content
        verify = partial(_verify, interface, self._leaves)
        plan = plan_cache.load_by_way(plan_key, str(self._options.cache), verify)
        if plan is None:
            return None
        counters.add(plan_cache_hits=1, plans_compiled=1)
        return CompiledCall(interface, plan.renamed(next_name(self._op)), has_loops, depends)

    def keep(self, made: CompiledCall, plan_key: str) -> None:
        """Stores what came of the call.

        Args:
            plan_key: of the plan in the cache; "" if it is not there.
        """
        try:
            _verify(made.interface, self._leaves, made.plan)
        except VerificationError as error:
            _log.info("the call of %s is not stored: %s", self._op, error)
            return
        if plan_key:
            content = plan_key, made.interface, made.has_loops, made.depends_on_determinism
            write_call(self._key, content, self._options)


def call_key(
    ops: Iterable[OpOverload], text: Callable[[], str], target: Target, options: CompileOptions
) -> str:
    """The key of an entry; "" where none is looked for.

    Args:
        ops: what is called.
        text: gives what two calls only have in common if the same becomes of both, on this GPU and
            with the same options and switches; may raise `Unreadable`.
    """
    are_known = all(op.namespace in _NAMESPACES and not is_of_user(op) for op in ops)
    if options.cache is None or options.runs_every_stage or not are_known:
        return ""
    switches = torch.__version__, sys.version, torch.get_default_dtype()
    wanted = options.deterministic, options.fill_empty, options.fallback
    try:
        whole = f"{switches} {wanted}\n{text()}"
    except Unreadable:
        return ""
    others = of_every_graph(measured_target(target, options), options)
    return digest_of((*others, whole.encode()))


def read_call(key: str, options: CompileOptions) -> Any:
    """What `write_call` was given for a key of `call_key`; None if there is nothing to read."""
    return plan_cache.load_object(key, "call", str(options.cache)) if key else None


def write_call(key: str, content: Any, options: CompileOptions) -> None:
    """Stores what came of a call, if it can be pickled."""
    if key:
        plan_cache.store_object(key, "call", content, str(options.cache))


def _text(op: OpOverload, leaves: Sequence[Any], spec: TreeSpec) -> str:
    return "\n".join((f"{op} {spec}", *map(_leaf_text, leaves)))


def _leaf_text(leaf: Any) -> str:
    return repr(leaf) if isinstance(leaf, TensorSpec) else argument_text(as_traced(leaf))


def _verify(interface: CallInterface, leaves: Sequence[Any], plan: Plan) -> None:
    """Raises VerificationError: a plan does not take these arguments, or calls the host."""
    taken = [leaves[k] for k in interface.arguments]
    added = (interface.numbers is not None) + bool(interface.phase.seeds)
    own = [None if x.buffer is None else plan.buffers[x.buffer].dtype for x in plan.inputs]
    given = [dtype_of(x.dtype) if isinstance(x, TensorSpec) else None for x in taken]
    are_complex = [k in interface.phase.complex_inputs for k in range(len(taken))]
    same = all(a is b or c for a, b, c in zip(own, given, are_complex, strict=False))
    if len(own) != len(given) + added or not same:
        raise VerificationError(f"plan {plan.name}: inputs are not those of the call")
    if plan.calls_host:
        raise VerificationError(f"plan {plan.name}: operators of the host are not stored")
