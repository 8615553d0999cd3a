"""Connectionist temporal classification and its gradient. Source: ATen ``LossCTC.cpp``.

What is kept for the gradient is in a layout of its own: (T, columns) with one column for each label
of all targets and one for each blank beside them, see ``webgpu::ctc_paths``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...torch_ops.ctc import NEVER

aten = torch.ops.aten

_LOST = NEVER / 10  # below it, a sum has a term that never happens


@dataclass(frozen=True)
class _Columns:
    """Columns of all samples, and where they are in a batch: vectors of the columns or samples.

    Attributes:
        sample, place, label: of each column: its sample, its number there, and what it emits.
        counts: whether a column is one of its sample, and not what pads the targets.
        starts: the first column of each sample, and the number of columns.
        steps, ends: of each sample.
    """

    sample: Tensor
    place: Tensor
    label: Tensor
    counts: Tensor
    starts: Tensor
    steps: Tensor
    ends: Tensor

    def paths(self, emissions: Tensor, *, reverse: bool) -> Tensor:
        """``webgpu::ctc_paths``."""
        vectors = (self.label, self.starts, self.steps, self.ends)
        given = [vector.to(torch.int32) for vector in vectors]
        found: Tensor = torch.ops.webgpu.ctc_paths.default(emissions, *given, reverse)
        return found


def _columns(
    targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, rows: int
) -> _Columns:
    flat, device = targets.reshape(-1).to(torch.int64), targets.device
    steps, lengths = (x.to(device, torch.int64) for x in (input_lengths, target_lengths))
    longest = targets.shape[-1]
    steps, lengths = _checked(steps, rows), _checked(lengths, longest)
    samples, count = steps.shape[0], flat.shape[0]
    column = torch.arange(2 * count + samples, device=device)
    if targets.dim() == 2:
        first = torch.arange(samples + 1, device=device) * longest
        sample = column // (2 * longest + 1)
    else:
        first = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    starts = 2 * first + torch.arange(samples + 1, device=device)
    if targets.dim() != 2:
        sample = torch.searchsorted(starts[1:], column, right=True).clamp(max=samples - 1)
    place = column - starts.index_select(0, sample)
    ends = 2 * lengths
    counts = place <= ends.index_select(0, sample)
    label = torch.full_like(column, blank)
    if count:
        number = (first.index_select(0, sample) + place // 2).clamp(0, count - 1)
        is_label = counts & (place % 2 == 1)
        label = torch.where(is_label, flat.index_select(0, number), blank)
    return _Columns(sample, place, label, counts, starts, steps, ends)


def _checked(lengths: Tensor, most: int) -> Tensor:
    """Lengths, of which kernels report those that are not in [0, most]."""
    return torch.arange(most + 1, device=lengths.device).index_select(0, lengths)


def _emissions(log_probs: Tensor, columns: _Columns) -> Tensor:
    """(T, columns): the log-probability of each column's label."""
    classes = log_probs.shape[2]
    place = columns.sample * classes + columns.label
    return log_probs.flatten(1).index_select(1, place).clamp_min(NEVER)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Any:
    """(the negative log-likelihood of each sample, log-likelihoods of the ways to each column).

    Args:
        log_probs: float32 (T, samples, classes).
        targets: (samples, S), or one after the other (all lengths,).
        zero_infinity: matters to the gradient alone.
    """
    if not _is_taken(log_probs, targets, input_lengths, target_lengths, blank):
        return NotImplemented  # PyTorch says what is wrong
    columns = _columns(targets, input_lengths, target_lengths, blank, log_probs.shape[0])
    paths = columns.paths(_emissions(log_probs, columns), reverse=False)
    row = (columns.steps - 1).clamp_min(0) * paths.shape[1] + columns.starts[:-1] + columns.ends
    flat = paths.reshape(-1)
    last = flat.index_select(0, row)
    has_labels = columns.ends > 0
    other = torch.where(has_labels, flat.index_select(0, (row - 1).clamp_min(0)), NEVER)
    loss = -torch.logaddexp(last, other)
    loss = torch.where(loss > -_LOST, math.inf, loss)
    of_nothing = torch.where(has_labels, math.inf, 0.0)
    return torch.where(columns.steps > 0, loss, of_nothing), paths


def ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    neg_log_likelihood: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> Any:
    """The gradient of `ctc_loss` by ``log_probs``: what is expected less what is likely."""
    if not _is_taken(log_probs, targets, input_lengths, target_lengths, blank):
        return NotImplemented
    rows, samples, classes = log_probs.shape
    columns = _columns(targets, input_lengths, target_lengths, blank, rows)
    emissions = _emissions(log_probs, columns)
    onwards = columns.paths(emissions, reverse=True)
    loss = neg_log_likelihood.index_select(0, columns.sample)
    lost = neg_log_likelihood == math.inf
    likely = (log_alpha + onwards - emissions + torch.where(loss == math.inf, 0.0, loss)).exp()
    step = torch.arange(rows, device=log_probs.device).unsqueeze(1)
    runs = step < columns.steps
    likely = torch.where(columns.counts & (step < columns.steps[columns.sample]), likely, 0.0)
    place = columns.sample * classes + columns.label
    expected = log_probs.new_zeros(rows, samples * classes)
    if targets.dim() == 2:  # half of the columns are blanks: their sum is no scatter
        width = 2 * targets.shape[1] + 1
        by_sample = likely.view(rows, samples, width)
        blanks = by_sample[:, :, 0::2].sum(2, keepdim=True)
        labels = place.view(samples, width)[:, 1::2].reshape(-1)
        expected = expected.index_add(1, labels, by_sample[:, :, 1::2].flatten(1))
        is_blank = torch.arange(classes, device=log_probs.device) == blank
        expected = expected.view_as(log_probs) + torch.where(is_blank, blanks, 0.0)
    else:
        expected = expected.index_add(1, place, likely).view_as(log_probs)
    found = torch.where(log_probs == -math.inf, math.nan, log_probs.exp() - expected)
    found = found * grad.unsqueeze(1)
    found = torch.where(lost.unsqueeze(1), 0.0 if zero_infinity else math.nan, found)
    return torch.where(runs.unsqueeze(2), found, 0.0)


def _is_taken(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int
) -> bool:
    """Whether arguments are what the rules take."""
    if log_probs.dtype != torch.float32 or log_probs.dim() != 3 or targets.dim() not in (1, 2):
        return False
    samples = log_probs.shape[1]
    vectors = all(x.dim() == 1 and x.shape[0] == samples for x in (input_lengths, target_lengths))
    rows = targets.dim() == 1 or targets.shape[0] == samples
    integers = targets.dtype in (torch.int32, torch.int64)
    inside = 0 <= blank < log_probs.shape[2]
    return log_probs.numel() > 0 and vectors and rows and integers and inside


def _lengths_fit(
    log_probs: Tensor, targets: Tensor, input_lengths: Sequence[int], target_lengths: Sequence[int]
) -> bool:
    if log_probs.dim() != 3 or any(n < 0 for n in (*input_lengths, *target_lengths)):
        return False
    if max(input_lengths, default=0) > log_probs.shape[0]:
        return False
    if targets.dim() == 1:
        return sum(target_lengths) == targets.shape[0]
    return max(target_lengths, default=0) <= targets.shape[-1]


def of_lists(rule: Callable[..., Any], first: int) -> Callable[..., Any]:
    """A rule whose lengths are lists of integers.

    Args:
        rule: for lengths in tensors; it may be an operator.
        first: which argument ``log_probs`` is, before targets and lengths.
    """

    def call(*arguments: Any, **keywords: Any) -> Any:
        log_probs, targets, *lengths = arguments[first : first + 4]
        if not _lengths_fit(log_probs, targets, *lengths):
            return NotImplemented
        tensors = (torch.tensor(n, dtype=torch.int64, device=targets.device) for n in lengths)
        before, after = arguments[: first + 2], arguments[first + 4 :]
        return rule(*before, *tensors, *after, **keywords)

    return call


DECOMPOSITIONS: dict[Any, Any] = {
    aten._ctc_loss.Tensor: ctc_loss,
    aten._ctc_loss_backward.Tensor: ctc_loss_backward,
}
