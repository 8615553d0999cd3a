"""Which scatters write into the memory of their initial contents, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.compilations import TARGET, compile_function
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.ir.verify_schedule import verify_schedule
from torch_webgpu_compile.plan.model import Dispatch

CACHE, AT, NEW = torch.zeros(2, 16, 8), torch.tensor([5]), torch.randn(2, 1, 8)


def written(function, *arguments):
    """Bytes that each dispatch writes, and whether the cache is written in place."""
    state = compile_function(function, *(arguments or (CACHE, AT, NEW)))
    (output,) = (o for o in state.plan.outputs if o.mutates is not None)
    in_place = output.buffer == state.plan.inputs[output.mutates].buffer
    steps = [step for step in state.plan.steps if isinstance(step, Dispatch)]
    return [int(step.bytes_written) for step in steps], in_place


def test_only_the_new_row_is_written():
    def function(cache, at, new):
        cache.index_copy_(1, at, new)
        return cache.sum(1)

    assert written(function) == ([64, 64], True)


def test_readers_of_the_old_contents_come_first():
    def function(cache, at, new):
        before = cache.exp()
        cache.index_copy_(1, at, new)
        return before, cache.exp()

    assert written(function) == ([1024, 64, 1024], True)


def test_a_chain_of_updates_is_one_memory():
    def function(cache, at, new):
        cache.index_copy_(1, at, new)
        cache[:, 3:4] = new
        cache[:, 4] = new[:, 0]
        return cache.sum(1)

    assert written(function) == ([64, 64, 64, 64], True)


def test_a_part_that_is_increased_is_written_alone():
    def function(cache, at, new):
        cache[0] += new[1]
        cache[:, 0::2] *= 2

    assert written(function) == ([512, 512], True)


def test_a_chain_with_an_update_that_is_copied_is_not_in_place():
    def function(cache, at, new):
        cache.index_copy_(1, at, new)
        cache[:, 1:] = cache[:, :-1].clone()

    # Contents and update of each; the argument then takes a copy of the buffer.
    assert written(function) == ([1024, 64, 1024, 960], False)


@pytest.mark.parametrize(
    "update",
    [
        lambda cache, at, new: cache.index_add_(1, at, new),
        lambda cache, at, new: cache.index_put_((torch.arange(2)[:, None], at), new),
        lambda cache, at, new: cache.scatter_(1, at.expand(2, 1, 8), new),
        lambda cache, at, new: cache[:, 2:9:3].copy_(new.expand(2, 3, 8)),
    ],
)
def test_kinds_of_updates(update):
    def function(cache, at, new):
        update(cache, at, new)
        return cache.sum(1)

    nbytes, in_place = written(function)
    assert in_place
    assert nbytes[0] in (64, 192)


def test_what_moves_within_the_cache_is_read_before():
    def function(cache, at, new):
        cache[:, 1:4] = cache[:, 0:3] * 2
        return cache.sum(1)

    assert written(function) == ([192, 192, 64], True)


def test_a_result_that_is_also_returned_as_another_tensor_is_copied():
    def function(cache, at, new):
        updated = cache.index_copy(1, at, new)
        cache.copy_(updated)
        return updated

    assert not written(function)[1]


def test_a_result_that_something_needs_the_old_contents_after_is_copied():
    def function(cache, at, new):
        updated = cache.index_copy(1, at, new)
        gathered = cache[:, updated.sum().long().remainder(16).reshape(1)]
        cache.copy_(updated)
        return gathered

    assert not written(function)[1]


def test_an_intermediate_is_not_copied_either():
    state = compile_function(lambda x, at, new: x.exp().index_copy(1, at, new), CACHE, AT, NEW)
    assert [int(step.bytes_written) for step in state.plan.steps] == [1024, 64]


def test_the_verifier_finds_a_late_reader():
    def function(cache, at, new):
        before = cache.exp()
        cache.index_copy_(1, at, new)
        return before

    schedule = compile_function(function, CACHE, AT, NEW).schedule
    verify_schedule(schedule, TARGET)
    with pytest.raises(VerificationError, match="no other reader of in0 then"):
        verify_schedule(replace(schedule, groups=schedule.groups[::-1]), TARGET)


def test_an_intermediate_that_is_returned_is_copied():
    def function(x, at, new):
        old = x.exp()
        return old, old.index_copy(1, at, new)

    outputs = compile_function(function, CACHE, AT, NEW).plan.outputs
    assert len({output.buffer for output in outputs}) == 2


@pytest.mark.parametrize("reads_elsewhere", [False, True])
def test_a_map_writes_over_an_input_whose_elements_it_reads_in_their_places(reads_elsewhere):
    def function(cache, other):
        cache.copy_((cache.flip(1) if reads_elsewhere else cache) * 2)
        other.add_(1)

    plan = compile_function(function, CACHE, CACHE + 1).plan
    in_place = [output.buffer == plan.inputs[output.mutates].buffer for output in plan.outputs]
    assert in_place == [not reads_elsewhere, True]
