"""The decomposition of CTC loss, on what its operator is by definition."""

from __future__ import annotations

import pytest
import torch

from torch_webgpu_compile.capture.decompositions import ctc

aten = torch.ops.aten


@pytest.mark.parametrize("joined", [False, True])
def test_paths_by_definition_give_the_loss_and_its_gradient(joined):
    torch.manual_seed(0)
    log_probs = torch.randn(9, 4, 5).log_softmax(-1)
    steps, lengths = torch.tensor([9, 6, 5, 1]), torch.tensor([4, 0, 3, 2])
    targets = torch.randint(1, 5, (4, 4))
    if joined:
        targets = torch.cat([row[:n] for row, n in zip(targets, lengths.tolist(), strict=True)])
    given = log_probs, targets, steps, lengths
    wanted, kept = aten._ctc_loss.Tensor(*given, 0, True)
    loss, paths = ctc.ctc_loss(*given, 0, True)
    torch.testing.assert_close(loss, wanted)
    grad = torch.rand(4)
    for zero_infinity in (False, True):
        torch.testing.assert_close(
            ctc.ctc_loss_backward(grad, *given, loss, paths, 0, zero_infinity),
            aten._ctc_loss_backward.Tensor(grad, *given, wanted, kept, 0, zero_infinity),
            equal_nan=True,
        )
