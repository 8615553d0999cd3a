"""What a plan moves and holds, by what it is of, and which of its dispatches are layers."""

from __future__ import annotations

import functools
from dataclasses import fields, replace

import torch
import torch.nn.functional as F
from torch import nn

from tests.compilations import compile_function
from tests.decoding import Layer, Sizes, decode, layers_of
from tests.unit.test_joint import LARGE
from torch_webgpu_compile.inspection.graph_report import GraphReport, traffic_lines
from torch_webgpu_compile.inspection.memory import Holding, Memory, holdings_of, memory_of
from torch_webgpu_compile.inspection.report import Report, _steps
from torch_webgpu_compile.inspection.traffic import CopyRate, Repetition, repetition_of
from torch_webgpu_compile.runtime.sections import Section, peak_nbytes
from torch_webgpu_compile.runtime.sized import MemoryPlace, SizedPlan


def repeated(steps, kinds=None):
    return repetition_of(steps, steps if kinds is None else kinds)


def test_layers_are_the_run_of_equal_parts_that_covers_most():
    assert repeated("eabcabcabcz") == Repetition(1, 3, 3, 3)
    assert repeated("ababababab") == Repetition(0, 2, 5, 5)  # not 2 of ababa, nor 4
    assert repeated("xyxyabcabc") == Repetition(4, 3, 2, 2)
    assert repeated("aaaaaa") is None
    assert repeated("abcdef") is None
    assert repeated("") is None


def test_layers_at_the_ends_count_by_the_kinds_of_their_dispatches():
    # The first layer begins with A, and before the end of the last one something else comes.
    assert repeated("eAbcabcabcabxCz", "eabcabcabcabxcz") == Repetition(2, 3, 3, 4)
    assert repeated("abcabcdd", "abcabcab") == Repetition(0, 3, 2, 2)


@functools.cache
def decoding(sizes, vocabulary):
    def parameters(layer):
        values = {f.name: getattr(layer, f.name) for f in fields(Layer)}
        kept = ("keys", "values")
        weights = {n: nn.Parameter(x, False) for n, x in values.items() if n not in kept}
        return replace(layer, **weights)

    layers = [parameters(layer) for layer in layers_of(sizes)]
    table = nn.Parameter(torch.randn(vocabulary, sizes.hidden), False)

    def step(token, position):
        return decode(sizes, F.embedding(token, table), position, layers)

    state = compile_function(step, torch.tensor([[3]]), torch.tensor([7]), target=LARGE)
    static = state.captured.static_inputs
    steps = _steps(state.plan, int, static)
    held = holdings_of(state.plan, static, (), {}, int)
    report = GraphReport(state.plan.name, "inference", steps, {}, state.plan, holdings=held)
    weights = sum(
        getattr(layer, f.name).nbytes
        for layer in layers
        for f in fields(Layer)
        if f.name not in ("keys", "values")
    )
    return report, weights, sum(x.nbytes for layer in layers for x in (layer.keys, layer.values))


def test_a_token_reads_its_weights_and_its_cache_once():
    sizes = Sizes(layers=5)
    report, weights, cache = decoding(sizes, vocabulary=5000)
    moved = report.traffic
    assert moved.state == cache
    # A row of the embedding, not all of it; a norm's weight may be read by each of its products.
    row = 4 * sizes.hidden
    assert weights + row <= moved.weights <= weights + 20 * row
    assert moved.other + moved.written < cache
    assert sum(k.bytes_read + k.bytes_written for k in report.kernels) == moved.nbytes
    layers = report.layers
    assert layers.alike == 5
    assert 5 * layers.length + 1 <= report.dispatch_count <= 5 * layers.length + 2


def test_the_limit_is_what_a_copy_of_as_many_bytes_takes():
    report, _, _ = decoding(Sizes(layers=4), vocabulary=50)
    timed = replace(report, timed_nbytes=1000, timed_seconds=1e-3)
    rate = CopyRate(2e6, "a GPU", measured=True)
    text = "\n".join(traffic_lines(timed, rate))
    seconds = report.traffic.nbytes / 2e6
    assert rate.seconds(report.traffic) == seconds
    assert f"takes {1e3 * seconds:.4g} ms: at most {1 / seconds:.4g} calls/s" in text
    assert "(measured, a GPU)" in text
    assert "50% of that rate" in text
    assert f"4 layers of {report.layers.length} dispatches" in text
    assert "doctor" in "\n".join(traffic_lines(report, replace(rate, measured=False)))
    assert len(traffic_lines(report, None)) == 2


def test_a_token_holds_its_weights_and_its_cache_once():
    sizes, vocabulary = Sizes(layers=5), 5000
    report, weights, cache = decoding(sizes, vocabulary=vocabulary)
    memory = replace(report, peak_nbytes=48).memory
    table = 4 * vocabulary * sizes.hidden
    assert weights + table <= memory.weights <= 1.125 * (weights + table)  # with prepared ones
    assert cache <= memory.state <= 1.125 * cache
    assert memory.activations == 48
    assert 0 < memory.other < cache
    again = replace(report, name="again", peak_nbytes=32)
    assert Report((report, again), ()).memory == replace(memory, activations=32)
    kept = replace(again, keeps_peak=True)
    assert Report((kept, kept, again), ()).memory == replace(memory, activations=96)


def test_memory_that_graphs_share_counts_once():
    weight, saved = Holding("weights", 1, 64), Holding("activations", 2, 32)
    forward = [weight, saved, Holding("other", 3, 16)]
    backward = [replace(weight, kind="other"), replace(saved, kind="other")]
    update = [replace(weight, kind="state"), Holding("state", 4, 64)]
    assert memory_of(forward, 8) == Memory(64, 0, 40, 16)
    assert memory_of([*forward, *backward], 8) == Memory(64, 0, 40, 16)
    assert memory_of([*forward, *backward, *update], 8) == Memory(0, 128, 40, 16)
    assert str(memory_of(forward, 0)) == (
        "64 B of weights, 32 B of activations, 16 B of inputs and results"
    )
    assert str(Memory()) == "nothing"


def test_sections_hold_at_once_what_none_has_released():
    def section(places, released):
        made = tuple(MemoryPlace(k, nbytes, names) for k, (nbytes, names) in enumerate(places))
        return Section(SizedPlan({}, (), (), (), made), released)

    first = section([(64, ("a", "b")), (1000, ("y",)), (2000, ("c",))], ("a", "b"))
    second = section([(100, ("d",)), (32, ("e",))], ("c", "d", "e"))
    third = section([(4096, ("f",))], ())
    kept = frozenset({"y"})
    assert peak_nbytes([first], kept) == 64 + 2048
    assert peak_nbytes([first, second], kept) == 2048 + 112 + 32
    assert peak_nbytes([first, second, third], kept) == 4096
