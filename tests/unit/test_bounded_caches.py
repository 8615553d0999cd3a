"""Caches are bounded: by their capacity, or by what somebody still refers to."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.compilations import compile_function
from tests.unit.test_signature import S, buffer, output, plan
from torch_webgpu_compile.callables.signature import Signature
from torch_webgpu_compile.plan import cache as plan_cache
from torch_webgpu_compile.plan.lru_cache import LruCache, max_resolved_sizes
from torch_webgpu_compile.plan.model import PlanInput
from torch_webgpu_compile.runtime.buffers import BufferPool
from torch_webgpu_compile.symbolic import expressions
from torch_webgpu_compile.symbolic.expressions import Symbol
from torch_webgpu_compile.symbolic.interning import InternTable
from torch_webgpu_compile.symbolic.sizes import as_expr, floordiv, iteration, symbol


def test_the_last_used_are_kept():
    recent = LruCache[int, str](2)
    recent.keep(1, "a")
    recent.keep(2, "b")
    assert recent.find(1) == "a"
    recent.keep(3, "c")
    assert recent.find(2) is None
    assert (recent.find(1), recent.find(3)) == ("a", "c")


@pytest.mark.parametrize(("dispatches", "sizes"), [(0, 64), (1, 64), (200, 40), (10_000, 16)])
def test_long_plans_are_kept_for_fewer_sizes(dispatches, sizes):
    assert max_resolved_sizes(dispatches) == sizes


def test_variants_are_bounded():
    made = plan(
        [buffer("x", "input", S), buffer("y", "output", S)], [PlanInput("x")], [output("y", (S,))]
    )
    signature = Signature(made)
    most = max_resolved_sizes(made.dispatch_count)
    first = signature.variant([torch.zeros(2)])
    for n in range(3, 2 * most):
        signature.variant([torch.zeros(n)])
        assert signature.variant([torch.zeros(2)]) is first  # it is in use
    assert len(signature._variants) == most
    assert signature.variant([torch.zeros(3)]).sizes == {"s0": 3}


def test_expressions_live_while_somebody_has_them():
    gc.collect()
    kept = floordiv(symbol("kept") + 7, as_expr(3))
    name = "a symbol of this test"

    def alive():
        references = list(expressions._references.values())
        objects = [reference() for reference in references]
        return sum(isinstance(x, Symbol) and x.name.startswith(name) for x in objects)

    for n in range(300):
        floordiv(symbol(f"{name} {n}") + 7, as_expr(3))
    assert alive() == 300  # calculations are remembered for a while
    remembered = [f for f in vars(expressions).values() if hasattr(f, "cache_clear")]
    assert all(0 < function.cache_info().maxsize <= 1 << 14 for function in remembered)
    for function in remembered:
        function.cache_clear()
    gc.collect()
    symbol("the next one")  # the table drops what died
    assert alive() == 0
    assert floordiv(symbol("kept") + 7, as_expr(3)) is kept


def test_equal_expressions_are_one_object_in_every_thread():
    made: list[list[object]] = [[] for _ in range(4)]
    barrier = threading.Barrier(4)

    def make(into):
        barrier.wait()
        for n in range(500):
            into.append(iteration(f"threads{n}", n + 3) * 5 + n)

    threads = [threading.Thread(target=make, args=(into,)) for into in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for same in zip(*made, strict=True):
        assert len(set(map(id, same))) == 1


def test_a_table_forgets_what_died():
    class Thing:
        pass

    table, kept = InternTable(), []
    for n in range(1000):
        made = table.add((n,), Thing())
        if n % 100 == 0:
            kept.append(made)
    del made
    gc.collect()
    table.add(("last",), kept[0])
    assert len(table.references) == len(kept) + 1
    assert table.add((0,), Thing()) is kept[0]


def test_plans_in_memory_are_bounded_by_their_constants(monkeypatch):
    state = compile_function(lambda x: x + torch.tensor([1.0, 2.0]), torch.zeros(2))
    constant = np.zeros(1 << 10, np.uint8).tobytes()
    monkeypatch.setattr(plan_cache, "_MAX_NBYTES", 10 << 10)
    plan_cache.clear()
    for n in range(40):
        plan_cache.store(f"key {n}", replace(state.plan, constants={"c": constant}), None)
    assert len(plan_cache._memory) == 10
    plan_cache.clear()
    for n in range(200):
        plan_cache.store(f"key {n}", state.plan, None)
    assert len(plan_cache._memory) == plan_cache._MAX_PLANS
    plan_cache.clear()


class _Memory:
    """A provider that makes and frees nothing, and a queue that sends what it is told to."""

    def __init__(self) -> None:
        self.created = 0
        self.alive: set[int] = set()
        self.queue: Any = SimpleNamespace(batch=0, sent=0, is_empty=True, flush=lambda: None)
        backend: Any = SimpleNamespace(create_buffer=self.create, destroy_buffer=self.alive.remove)
        self.pool = BufferPool(backend, self.queue, 1 << 40, lambda: None, str)

    def create(self, nbytes: int, usage: int) -> int:
        self.created += 1
        self.alive.add(self.created)
        return self.created

    def send(self) -> None:
        self.queue.batch += 1
        self.queue.sent = self.queue.batch


def _turns(memory: _Memory, turn: Callable[[], None], count: int) -> list[int]:
    """How many buffers each turn of a loop creates."""
    found = []
    for _ in range(count):
        before = memory.created
        turn()
        memory.send()
        found.append(memory.created - before)
    return found


def test_a_cache_that_grows_leaves_little_behind():
    memory, layers = _Memory(), 16
    pool = memory.pool
    cache: list[Any] = [pool.allocate(4 << 20) for _ in range(layers)]
    for token in range(1, 400):
        for layer in range(layers):
            cache[layer] = pool.allocate((4 << 20) + token * (1 << 14))  # then drops the old one
        memory.send()
    stats = pool.stats()
    assert stats["peak_allocated"] <= sum(buffer.capacity for buffer in cache) * (1 + 1 / layers)
    assert stats["reserved"] <= 1.2 * stats["peak_allocated"]
    assert len(memory.alive) == len(pool.blocks()) < 2 * layers


@pytest.mark.parametrize("sizes", [range(1, 30), (20, 1, 13, 2, 8, 3, 21, 5), (7,)])
def test_a_loop_finds_all_of_its_memory_from_the_third_turn(sizes: Sequence[int]):
    """Though one buffer at a time is lent: most of what the loop needs is beyond the peak."""
    memory = _Memory()

    def turn():
        for size in sizes:
            memory.pool.allocate(size << 22)
            memory.send()

    assert _turns(memory, turn, 5)[2:] == [0, 0, 0]


def test_memory_of_pending_commands_is_not_freed():
    memory = _Memory()
    memory.queue.is_empty = False
    for size in range(1, 40):
        memory.pool.allocate(size << 22)
    assert len(memory.alive) == 39
    memory.send()
    memory.pool.allocate(64 << 22)
    assert len(memory.alive) < 39
