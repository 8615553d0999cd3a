"""What every kind of node computes, on NumPy: the rules by which tests interpret loop graphs.

The package itself interprets maps and reductions alone. A lowering whose graph is wrong here is
wrong; one that is wrong on a GPU only has a wrong kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.reference import attention, depthwise, sorting
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.ir.attention_nodes import Attention, AttentionGradient
from torch_webgpu_compile.ir.depthwise_nodes import DepthwiseConvolution, DepthwiseWeightGradient
from torch_webgpu_compile.ir.interpret import Points, Run, interpret, interprets
from torch_webgpu_compile.ir.nodes import (
    Contraction,
    Factorization,
    Fourier,
    Scan,
    Scatter,
    TriangularSolve,
    carry_name,
)
from torch_webgpu_compile.ir.sorting_nodes import (
    Compact,
    DigitCounts,
    DigitScatter,
    PartSums,
    PickDigit,
    RowSort,
)
from torch_webgpu_compile.ir.spaces import numbered

__all__ = ["interpret", "interprets"]

Array = npt.NDArray[Any]


@interprets(Contraction)
def _contraction(run: Run, node: Contraction) -> None:
    groups = (node.batch, node.rows, node.columns, node.inner)
    shapes = [run.shape(sizes) for sizes in groups]
    b, m, n, k = (int(np.prod(shape)) for shape in shapes)
    values = run.computed(node)
    lhs, rhs = values["lhs"].reshape(b, m, k), values["rhs"].reshape(b, n, k)
    product = np.matmul(lhs, rhs.transpose(0, 2, 1)).reshape(sum(shapes[:3], ()))
    out = np.full(run.shape(run.graph.buffers[node.output].sizes), np.nan, product.dtype)
    where = tuple(values.get("index", ()))
    written = np.zeros(out.shape, np.int32)
    np.add.at(written, where, 1)
    if not (written == 1).all():
        raise VerificationError(f"the index of {node.output} is not a bijection")
    out[where] = product
    run.store(node.output, out)


@interprets(Scatter)
def _scatter(run: Run, node: Scatter) -> None:
    out = run.arrays[node.initial].copy()
    values = run.computed(node)
    where = tuple(values.get("index", ()))
    for position, size in zip(where, out.shape, strict=True):
        if position.size and (position.min() < 0 or position.max() >= size):
            raise VerificationError(f"{node.output} is written out of range")
    if node.accumulate:
        np.add.at(out, where, values["body"])
    else:
        out[where] = values["body"]
    run.store(node.output, out)


@interprets(TriangularSolve)
def _triangular_solve(run: Run, node: TriangularSolve) -> None:
    values = run.computed(node)
    matrix, solution = values["matrix"], values["rhs"].copy()
    for m in range(solution.shape[-2]):
        before = matrix[..., m : m + 1, :m] @ solution[..., :m, :]
        solution[..., m : m + 1, :] -= before
        if not node.unit:
            solution[..., m, :] /= matrix[..., m, m, None]
    run.store(node.output, solution)


@interprets(Factorization)
def _factorization(run: Run, node: Factorization) -> None:
    matrix = run.computed(node)["matrix"].copy()
    *batch, rows, columns = matrix.shape
    steps = min(rows, columns)
    pivots, info = np.zeros((*batch, steps), np.int32), np.zeros(batch, np.int32)
    for at in np.ndindex(*batch):
        a = matrix[at]
        if node.pivots is None:
            a[...] = np.tril(a) + np.tril(a, -1).T
        for k in range(steps):
            if node.pivots is not None:
                other = k + int(np.argmax(np.abs(a[k:, k])))
                a[[k, other]] = a[[other, k]]
                pivots[(*at, k)] = other + 1
            if a[k, k] == 0 if node.pivots is not None else not a[k, k] > 0:
                info[at] = info[at] or k + 1
                if node.pivots is None:
                    break
                continue
            below = a[k + 1 :, k] / a[k, k]
            a[k + 1 :, k + 1 :] -= np.outer(below, a[k, k + 1 :])
            if node.pivots is None:
                a[k:, k] /= np.sqrt(a[k, k])
            else:
                a[k + 1 :, k] = below
    run.store(node.output, matrix if node.pivots is not None else np.tril(matrix))
    run.store(node.info, info)
    if node.pivots is not None:
        run.store(node.pivots, pivots)


@interprets(Scan)
def _scan(run: Run, node: Scan) -> None:
    (lanes,) = node.spaces["init"]
    (time,) = numbered("t", (node.length,))
    carries = [Points(run, (lanes,)).full(body) for body in node.init]
    rows: list[list[Array]] = [[] for _ in node.row]
    (steps,) = run.shape((node.length,))
    for t in range(steps):
        points = Points(run, (lanes,))
        points.values[time] = np.asarray(t)
        points.locals = {carry_name(k): carry for k, carry in enumerate(carries)}
        for found, body in zip(rows, node.row, strict=True):
            found.append(points.full(body))
        carries = [points.full(body) for body in node.step]
    for name, number in zip(node.carried, node.finals, strict=True):
        run.store(name, carries[number])
    for name, found in zip(node.rows, rows, strict=True):
        run.store(name, np.stack(found))


@interprets(Attention)
def _attention(run: Run, node: Attention) -> None:
    values = run.computed(node)
    result = attention.forward(node, **values)
    run.store(node.output, result.output)
    if node.logsumexp is not None:
        run.store(node.logsumexp, result.logsumexp)


@interprets(AttentionGradient)
def _attention_gradient(run: Run, node: AttentionGradient) -> None:
    results = attention.gradient(node, **run.computed(node))
    for name, result in zip(node.outputs, results, strict=True):
        run.store(name, result)


@interprets(DepthwiseConvolution)
def _depthwise_convolution(run: Run, node: DepthwiseConvolution) -> None:
    values = run.computed(node)
    positions = run.shape(node.positions)
    result = depthwise.convolution(node.windows, values["image"], values["weight"], positions)
    run.store(node.output, result)


@interprets(DepthwiseWeightGradient)
def _depthwise_weight_gradient(run: Run, node: DepthwiseWeightGradient) -> None:
    values = run.computed(node)
    result = depthwise.weight_gradient(node.windows, values["moved"], values["image"])
    parts = np.zeros((node.parts, *result.shape), np.float32)
    parts[0] = result  # whose sum alone is defined
    out = np.full(run.shape(run.graph.buffers[node.output].sizes), np.nan, np.float32)
    out[tuple(values["index"])] = parts
    run.store(node.output, out)


@interprets(Fourier)
def _fourier(run: Run, node: Fourier) -> None:
    values = run.computed(node)
    x = values["real"] + 1j * values.get("imaginary", np.zeros((), np.float32))
    result = np.fft.fft(x) if node.forward else np.fft.ifft(x) * node.length
    factor = values.get("factor_real", 1) + 1j * values.get("factor_imaginary", 0)
    result = result * factor * node.scale
    buffer = run.graph.buffers[node.output]
    pairs = len(buffer.sizes) > len(node.index)
    out = np.full(run.shape(buffer.sizes[: len(node.index)]), np.nan, np.complex128)
    written = np.zeros(out.shape, np.int32)
    for field, numbers in (("index", result), ("mirror", result.conj())):
        if field not in values:
            continue
        inside = np.ones(numbers.shape, bool)
        for position, size in zip(values[field], out.shape, strict=True):
            inside &= (position >= 0) & (position < size)
        at = tuple(position[inside] for position in values[field])
        np.add.at(written, at, 1)
        out[at] = numbers[inside]
    if not (written == 1).all():
        raise VerificationError(f"{node.output} is not written exactly once")
    run.store(node.output, np.stack([out.real, out.imag], -1) if pairs else out.real)


@interprets(RowSort)
def _row_sort(run: Run, node: RowSort) -> None:
    (count,) = run.shape((node.count,))
    values = run.computed(node)
    places = sorting.order(values["words"])[..., :count]
    for name, payload in zip(node.outputs, values["payloads"], strict=True):
        run.store(name, np.take_along_axis(payload, places, -1))


@interprets(DigitCounts)
def _digit_counts(run: Run, node: DigitCounts) -> None:
    (part,) = run.shape((node.part,))
    run.store(node.output, sorting.digit_counts(run.computed(node)["digit"], part, node.bins))


@interprets(PartSums)
def _part_sums(run: Run, node: PartSums) -> None:
    before, totals = sorting.part_sums(run.arrays[node.counts])
    run.store(node.before, before)
    run.store(node.totals, totals)


@interprets(DigitScatter)
def _digit_scatter(run: Run, node: DigitScatter) -> None:
    values = run.computed(node)
    sums = run.arrays[node.before], run.arrays[node.totals]
    places = sorting.digit_places(values["digit"], node.tile, *sums)
    for name, payload in zip(node.outputs, values["payloads"], strict=True):
        moved = np.zeros(payload.shape, payload.dtype)
        np.put_along_axis(moved, places, payload, -1)
        run.store(name, moved)


@interprets(PickDigit)
def _pick_digit(run: Run, node: PickDigit) -> None:
    values = run.computed(node)
    prefix, rest = sorting.pick_digit(run.arrays[node.counts], **values)
    run.store(node.prefix, prefix)
    run.store(node.rest, rest)


@interprets(Compact)
def _compact(run: Run, node: Compact) -> None:
    (count,) = run.shape((node.count,))
    run.store(node.output, sorting.compact(run.computed(node)["kind"], count))
