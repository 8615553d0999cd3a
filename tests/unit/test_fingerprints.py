"""Sampled words: within the tensor, all over it, and different when what is there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_webgpu_compile.callables import fingerprints

VIEWS = {
    "scalar": torch.ones(()),
    "bytes": torch.ones(5, dtype=torch.uint8),
    "halves": torch.ones(301, dtype=torch.bfloat16)[3:],
    "small": torch.ones(7, 9),
    "large": torch.ones(1000, 31),
    "doubles": torch.ones(100, 3, dtype=torch.float64),
    "complex": torch.ones(100, dtype=torch.complex128),
    "columns": torch.ones(300, 40)[:, 3:11],
    "transposed": torch.ones(300, 40).t(),
    "expanded": torch.ones(1, 40).expand(300, 40),
    "strided": torch.ones(3000)[5::7],
}


def positions(tensor: Tensor) -> fingerprints.Positions:
    return fingerprints.positions(
        tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size()
    )


@pytest.mark.parametrize("tensor", VIEWS.values(), ids=VIEWS)
def test_a_changed_tensor_is_noticed_and_nothing_around_it(tensor: Tensor) -> None:
    base = tensor._base if tensor._base is not None else tensor
    words = positions(tensor)
    outside = torch.ones(base.shape, dtype=torch.bool)
    outside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    seen = fingerprints.read(words)
    assert len(seen) == 4 * len(words)
    if tensor.element_size() >= 4:  # smaller elements share words with their neighbours
        base[outside] = 3
        assert fingerprints.read(words) == seen
    base.mul_(2)
    assert fingerprints.read(words) != seen
    changed = np.frombuffer(fingerprints.read(words), "u4") != np.frombuffer(seen, "u4")
    assert tensor.element_size() > 4 or changed.all()


def test_a_small_tensor_is_read_in_whole() -> None:
    tensor = torch.zeros(4, 8)
    words = positions(tensor)
    for k in range(32):
        seen = fingerprints.read(words)
        tensor.view(-1)[k] = 1
        assert fingerprints.read(words) != seen


def test_words_are_spread_over_rows_and_columns() -> None:
    tensor = torch.zeros(512, 512)
    words = positions(tensor)
    rows, columns = np.divmod(words - positions(tensor[:1, :1])[0], 512)
    assert len(set(rows // 16)) > 25
    assert len(set(columns)) > 25
    assert len(set(rows[:8] // 128)) > 2  # the first ones, too


def test_words_that_are_not_zero_are_preferred() -> None:
    tensor = torch.zeros(64, 64)
    tensor[:, ::2] = 1
    tensor[40:] = 0
    assert np.count_nonzero(np.frombuffer(fingerprints.read(positions(tensor)), "u4")) > 16


def test_nothing_is_read_of_tensors_without_memory() -> None:
    assert not len(positions(torch.ones(0, 3)))
    assert not len(fingerprints.positions(0, (3,), (1,), 4))
    assert fingerprints.read(fingerprints.joined([])) == b""


def test_of_few_tensors_more_is_read() -> None:
    counts = [fingerprints.words_of_each(n) for n in (0, 1, 30, 120, 1000, 100_000)]
    assert counts == [32, 32, 32, 10, 8, 8]
