"""``webgpu::ctc_paths``: sums over the alignments of connectionist temporal classification."""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = -1e30
"""The logarithm of 0: with infinities differences would be NaN."""


@torch.library.custom_op(
    "webgpu::ctc_paths",
    mutates_args=(),
    schema=(
        "(Tensor emissions, Tensor labels, Tensor starts, Tensor steps, Tensor ends, bool reverse)"
        " -> Tensor"
    ),
)
def ctc_paths(
    emissions: Tensor, labels: Tensor, starts: Tensor, steps: Tensor, ends: Tensor, reverse: bool
) -> Tensor:
    """log Σ over alignments of the probability of all that is emitted up to a step.

    A sample's columns are its labels with a blank before, after and between them. An alignment
    starts in the first or second of them, and with each step stays, goes on by one column, or by
    two if the label there is another one. Source: A. Graves et al., "Connectionist Temporal
    Classification", 2006.

    Args:
        emissions: float32 (T, columns), log-probabilities of what columns emit, from `NEVER` on.
        labels: int32 (columns,).
        starts: int32 (samples + 1,), the first column of each sample, and the number of columns.
        steps: int32 (samples,), how many steps a sample has, in [0, T].
        ends: int32 (samples,), the last column of each sample that counts, from its start.
        reverse: from the last step and column back to the first ones.

    Returns: as emissions, `NEVER` where no alignment leads.
    """
    first = starts.long()
    sample = torch.repeat_interleave(first.diff())
    place = torch.arange(labels.shape[0], device=labels.device) - first[sample]
    last, count = ends.long()[sample], steps.long()[sample]
    if reverse:  # a permutation that is its own inverse
        place = torch.where(place <= last, last - place, place)
        columns = first[sample] + place
        rows = torch.arange(len(emissions), device=labels.device).unsqueeze(1)
        rows = torch.where(rows < count, count - 1 - rows, rows)
        place = torch.arange(labels.shape[0], device=labels.device) - first[sample]
        emissions, labels = emissions[rows, columns], labels[columns]
    found = torch.full_like(emissions, NEVER)
    another = torch.zeros_like(labels, dtype=torch.bool)
    another[2:] = labels[2:] != labels[:-2]
    state = torch.where(place < 2, 0.0, NEVER)
    for t, row in enumerate(emissions):
        if t:
            one, two = state.roll(1), state.roll(2)
            one = torch.where(place >= 1, one, NEVER)
            two = torch.where((place >= 2) & another, two, NEVER)
            state = torch.logaddexp(torch.logaddexp(state, one), two)
        state = state + row
        found[t] = torch.where((place <= last) & (t < count), state, NEVER)
    return found[rows, columns] if reverse else found


@ctc_paths.register_fake
def _(
    emissions: Tensor, labels: Tensor, starts: Tensor, steps: Tensor, ends: Tensor, reverse: bool
) -> Tensor:
    return emissions.new_empty(emissions.shape)
