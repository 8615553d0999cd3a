"""The faults that `tests.faults` makes, one at a time: slips that a programmer might make.

Each changes a result for some arguments, or an error that users get, in one place of one stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACKAGE = "torch_webgpu_compile"


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        name: says what is wrong then.
        path: of a file of the package, from the package's folder.
        old: a text that the file has once.
        new: what takes its place.
        tests: pytest's arguments: the files that are most likely to find it, the quickest first.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def stage(self) -> str:
        """The package of the stage that the fault is in."""
        return self.path.partition("/")[0]

    def make(self, root: Path) -> None:
        """Makes the fault in a tree.

        Raises:
            ValueError: the file does not have ``old`` exactly once.
        """
        file = root / PACKAGE / self.path
        text = file.read_text()
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"fault {self.name}: {file} has {self.old!r} {count} times, not once")
        file.write_text(text.replace(self.old, self.new))


def _tests(names: str) -> tuple[str, ...]:
    return tuple(f"tests/{name}" for name in names.split())


_REDUCTIONS = _tests("unit/test_lowering_reductions.py")
_CONTRACTIONS = _tests("unit/test_lowering_contractions.py")
_INDEXING = _tests("unit/test_lowering_indexing.py")

FAULTS = (
    # ---- lowering
    Fault(
        "softmax_gradient_adds",
        "lowering/normalization.py",
        "body = y.body * (grad.body - expand(total, grad.sizes).body)",
        "body = y.body * (grad.body + expand(total, grad.sizes).body)",
        _REDUCTIONS,
    ),
    Fault(
        "log_softmax_gradient_adds",
        "lowering/normalization.py",
        'body = grad.body - apply("fast_exp", y.body)',
        'body = grad.body + apply("fast_exp", y.body)',
        _REDUCTIONS,
    ),
    Fault(
        "twice_the_eps_of_norms",
        "lowering/normalization.py",
        'apply("rsqrt", var.body + operand(eps, (), dtype))',
        'apply("rsqrt", var.body + 2 * operand(eps, (), dtype))',
        _REDUCTIONS,
    ),
    Fault(
        "bias_of_norms_multiplied",
        "lowering/normalization.py",
        "body += cast(expand(bias, sizes).body, body.dtype)",
        "body *= cast(expand(bias, sizes).body, body.dtype)",
        _REDUCTIONS,
    ),
    Fault(
        "padding_of_convolutions_added",
        "lowering/convolution_geometry.py",
        "position = o * self.stride[k] - self.padding[k] + t * self.dilation[k]",
        "position = o * self.stride[k] + self.padding[k] + t * self.dilation[k]",
        _CONTRACTIONS,
    ),
    Fault(
        "transposed_convolution_of_other_remainders",
        "lowering/convolution_geometry.py",
        'conditions.append(apply("eq", remainder, 0))',
        'conditions.append(apply("eq", remainder, 1))',
        _CONTRACTIONS,
    ),
    Fault(
        "bounds_include_the_size",
        "lowering/value.py",
        "conditions.append(Index(position) < Index(size))",
        "conditions.append(Index(position) <= Index(size))",
        (*_CONTRACTIONS, *_INDEXING),
    ),
    Fault(
        "padding_of_max_pool_is_0",
        "lowering/pooling.py",
        "lowest = const(dtype.lowest, dtype)",
        "lowest = const(0, dtype)",
        _CONTRACTIONS,
    ),
    Fault(
        "positions_of_max_pool_without_dilation",
        "lowering/pooling.py",
        "position = Index(start) + tap * Index(dilation)",
        "position = Index(start) + tap",
        _CONTRACTIONS,
    ),
    Fault(
        "mean_times_count",
        "lowering/reductions.py",
        "return total.body / count_scalar(split.count, dtype)",
        "return total.body * count_scalar(split.count, dtype)",
        _REDUCTIONS,
    ),
    Fault(
        "logsumexp_subtracts_infinity",
        "lowering/reductions.py",
        "finite = where(infinite, 0, largest.body)",
        "finite = largest.body",
        _REDUCTIONS,
    ),
    Fault(
        "scans_lose_what_the_first_block_carries",
        "lowering/scans.py",
        "is_first = Index(block - 1) >= 0",
        "is_first = Index(block - 1) > 0",
        _INDEXING,
    ),
    Fault(
        "nan_sorted_by_its_sign",
        "lowering/sort_keys.py",
        "return where(nan, _word(_ONES), numbers)",
        "return numbers",
        _INDEXING,
    ),
    Fault(
        "indices_with_a_gap_taken_for_adjacent",
        "lowering/indexing.py",
        "first = dims[0] if dims and adjacent else 0",
        "first = dims[0] if dims else 0",
        _INDEXING,
    ),
    Fault(
        "negative_indices_not_wrapped",
        "lowering/index_checks.py",
        "return fold(where(position < 0, position + Index(size), position))",
        "return fold(where(position < 0, position + Index(size) - 1, position))",
        _INDEXING,
    ),
    # ---- scheduler
    Fault(
        "memory_of_a_returned_value_shared",
        "scheduler/grouping/in_place.py",
        "if not node.reads_own_elements or node.initial in self.graph.returned:",
        "if not node.reads_own_elements:",
        _tests("unit/test_in_place.py gpu/test_compiled_in_place.py"),
    ),
    Fault(
        "memory_shared_with_later_readers",
        "scheduler/grouping/in_place.py",
        "        if any(depends(self.groups, reader, at) for reader in readers):\n"
        "            return\n",
        "",
        _tests("unit/test_in_place.py gpu/test_compiled_in_place.py"),
    ),
    Fault(
        "updated_inputs_read_elsewhere",
        "scheduler/grouping/in_place.py",
        "if old is None or not _reads_own_element(group, member, old, self.buffers):",
        "if old is None:",
        _tests("unit/test_foreach.py unit/test_in_place.py gpu/test_compiled_in_place.py"),
    ),
    Fault(
        "inlined_at_any_cost",
        "scheduler/rewrites/inline.py",
        "return extra_reads <= own and cost.is_cheap(",
        "return extra_reads <= own or cost.is_cheap(",
        _tests("unit/test_scheduler.py unit/test_kernel_counts.py"),
    ),
    Fault(
        "long_rows_never_split",
        "scheduler/rewrites/split.py",
        "counts[node.output] = max(useful, needed)",
        "counts[node.output] = needed",
        _tests("unit/test_scheduler.py unit/test_loop_limit.py golden/test_golden.py"),
    ),
    Fault(
        "attention_never_in_parts",
        "scheduler/rewrites/split_attention.py",
        "if node.kept is not None or node.logsumexp is not None:",
        "if node.kept is not None or node.logsumexp is None:",
        _tests("unit/test_decoding_kernels.py gpu/test_compiled_decoding.py"),
    ),
    Fault(
        "masks_taken_for_causal",
        "scheduler/rewrites/causal.py",
        'AT_MOST = {"le": 0, "lt": 1}',
        'AT_MOST = {"le": 0, "lt": 0}',
        _tests("unit/test_causal.py gpu/test_written_attention.py"),
    ),
    Fault(
        "masks_taken_to_end_a_key_early",
        "scheduler/rewrites/key_bounds.py",
        "within, const(1 - above,",
        "within, const(-above,",
        _tests("unit/test_key_bounds.py gpu/test_compiled_decoding.py"),
    ),
    # ---- ir
    Fault(
        "extreme_of_ranges_the_other_way",
        "ir/ranges.py",
        'if smaller is None or name == "minimum":',
        'if smaller is None or name == "maximum":',
        _tests("unit/test_at_sizes.py gpu/test_dynamic_families.py"),
    ),
    Fault(
        "difference_of_ranges",
        "ir/ranges.py",
        "return lows[0] - highs[1], highs[0] - lows[1]",
        "return lows[0] - lows[1], highs[0] - highs[1]",
        _tests("unit/test_at_sizes.py gpu/test_dynamic_families.py"),
    ),
    Fault(
        "loads_of_another_dtype_verified",
        "ir/verify.py",
        "require(dtype is buffer.dtype, title",
        "require(dtype.bits == buffer.dtype.bits, title",
        _tests("unit/test_ir_verify.py"),
    ),
    # ---- symbolic
    Fault(
        "remainders_merged_without_coefficient",
        "symbolic/expressions.py",
        "quotient = _mul(floordiv(y, b), _mul(b, factor))",
        "quotient = _mul(floordiv(y, b), b)",
        _tests("unit/test_sizes.py"),
    ),
    Fault(
        "quotients_of_negative_numbers",
        "symbolic/expressions.py",
        "return as_expr(-1)",
        "return ZERO",
        _tests("unit/test_sizes.py"),
    ),
    # ---- codegen
    Fault(
        "argmax_takes_the_last_of_equals",
        "codegen/kernels/accumulate.py",
        'tie = f"({equal} && {p} < {at})"',
        'tie = f"({equal} && {p} > {at})"',
        _tests("gpu/test_compiled_special_values.py"),
    ),
    Fault(
        "elements_past_the_end_reduced",
        "codegen/kernels/reduction.py",
        "return (chunk // t.run + 1) * t.run * step <= least",
        "return chunk // t.run * t.run * step <= least",
        _tests("gpu/test_row_kernels.py"),
    ),
    Fault(
        "sum_of_softmax_not_rescaled_when_merged",
        "codegen/kernels/accumulate.py",
        "{total}_b * {exp}(tw_above_ninf({largest}_b) - {largest}_shift);",
        "{total}_b;",
        _tests("gpu/test_row_kernels.py"),
    ),
    Fault(
        "softmax_of_rows_that_begin_with_minus_infinity",
        "codegen/kernels/accumulate.py",
        "let shift = tw_above_ninf(top);",
        "let shift = top;",
        _tests("gpu/test_row_kernels.py"),
    ),
    Fault(
        "a_lane_lost",
        "codegen/kernels/accumulate.py",
        "wide.lane(k), wide.lane(k + 1)",
        "wide.lane(k), wide.lane(k)",
        _tests("gpu/test_row_kernels.py"),
    ),
    Fault(
        "negative_floats_to_unsigned",
        "codegen/wgsl/casts.py",
        "if dtype.kind is Kind.UNSIGNED and source.is_float:",
        "if dtype is dtypes.uint32 and source.is_float:",
        _tests("gpu/test_compiled_special_values.py"),
    ),
    Fault(
        "products_of_narrow_integers_not_wrapped",
        "codegen/wgsl/op_table.py",
        '{"add", "sub", "mul", "neg",',
        '{"add", "sub", "neg",',
        _tests("gpu/test_compiled_special_values.py"),
    ),
    Fault(
        "stored_16_bit_values_read_unrounded",
        "codegen/kernels/rounding.py",
        "return rounded(value, let) if output in self._outputs else value",
        "return value",
        _tests("unit/test_codegen.py"),
    ),
    # ---- templates
    Fault(
        "coefficient_of_exp",
        "templates/math_f32.wgsl.jinja",
        "r * (0.16666665459 + r",
        "r * (0.16656665459 + r",
        _tests("gpu/test_accuracy.py"),
    ),
    Fault(
        "expm1_of_small_numbers",
        "templates/math_f32.wgsl.jinja",
        "+ s * rest, q, n == {{ T }}(0.0));",
        "+ s * rest, r, n == {{ T }}(0.0));",
        _tests("gpu/test_accuracy.py gpu/test_compiled_special_values.py"),
    ),
    Fault(
        "the_last_band_of_tiles_as_high_as_others",
        "templates/matmul_loads.wgsl.jinja",
        "let band_rows = min(({{ tiles_m }}) - band * {{ tiling.swizzle }}, {{ tiling.swizzle }});",
        "let band_rows = {{ tiling.swizzle }};",
        _tests("gpu/test_tilings.py gpu/test_slicing.py gpu/test_siblings.py"),
    ),
    Fault(
        "a_row_of_a_product",
        "templates/matmul_tile.wgsl.jinja",
        '{% set m = "row0 + (ty + " ~ r // 4 * TY ~ ") * 4 + " ~ r % 4 %}',
        '{% set m = "row0 + (ty + " ~ r // 4 * TY ~ ") * 4 + " ~ r % 3 %}',
        _tests("gpu/test_tilings.py"),
    ),
    Fault(
        "the_other_half_of_a_paired_product",
        "templates/matmul_loads.wgsl.jinja",
        '"(o - " ~ number * half ~ ")"',
        '"o"',
        _tests("gpu/test_siblings.py"),
    ),
    Fault(
        "maxima_of_attention_within_an_invocation",
        "templates/attention_step.wgsl.jinja",
        '{{ across("high", larger) }}\n',
        "",
        _tests("gpu/test_compiled_attention.py gpu/test_tilings.py"),
    ),
    Fault(
        "a_key_past_the_end_of_attention",
        "templates/attention_step.wgsl.jinja",
        "at < vec4<i32>({{",
        "at <= vec4<i32>({{",
        _tests("gpu/test_compiled_attention.py gpu/test_tilings.py"),
    ),
    Fault(
        "sums_of_attention_relative_to_an_older_maximum",
        "templates/attention_units_step.wgsl.jinja",
        "*= rescale{{ u }}_{{ t }};",
        "*= 1.0f;",
        _tests("gpu/test_attention_units.py"),
    ),
    # ---- planner
    Fault(
        "memory_used_again_a_step_too_early",
        "planner/build.py",
        "if entry[0] < interval.first",
        "if entry[0] <= interval.first",
        _tests("unit/test_planner.py"),
    ),
    # ---- plan
    Fault(
        "undersized_buffers_verified",
        "plan/verify.py",
        "is layout_nbytes(buffer.dtype, buffer.sizes, buffer.strides, buffer.offset),",
        "is not None,",
        _tests("unit/test_stored_plans.py"),
    ),
    # ---- callables
    Fault(
        "versions_of_parameters_not_compared",
        "callables/static_copies.py",
        "            or expected != _versions(tensors)\n",
        "",
        _tests("gpu/test_compiled_parameters.py"),
    ),
    Fault(
        "contents_of_parameters_not_compared",
        "callables/static_copies.py",
        "            or (self._seen and self._seen != fingerprints.read(self._words))\n",
        "",
        _tests("gpu/test_compiled_parameters.py"),
    ),
    Fault(
        "copies_trusted_after_a_failed_call",
        "callables/host_graph.py",
        "        self._static.invalidate([values[position] for position in changed])\n",
        "",
        _tests("gpu/test_compiled_options.py"),
    ),
    Fault(
        "one_seed_for_all_operators_of_a_graph",
        "callables/host_graph.py",
        "return torch.empty((count, 2), dtype=torch.int32).random_()",
        "return torch.empty((1, 2), dtype=torch.int32).random_().repeat(count, 1)",
        _tests("unit/test_random.py"),
    ),
    # ---- device
    Fault(
        "counter_of_seeds_advances_by_one",
        "tensors/generators.py",
        "_states[place] = seed, offset + count",
        "_states[place] = seed, offset + 1",
        _tests("unit/test_random.py"),
    ),
    Fault(
        "host_tensors_with_dimensions_accepted",
        "device/eager/compiled_op.py",
        "return tensor.dim() > 0 and op._schema.name not in _TAKES_HOST_TENSORS",
        "return tensor.dim() > 1 and op._schema.name not in _TAKES_HOST_TENSORS",
        _tests("gpu/device_ops/test_semantics.py"),
    ),
    Fault(
        "places_of_overlapping_arguments_forgotten",
        "tensors/aliasing.py",
        "found.append((known[0], address - known[1]))",
        "found.append((known[0], 0))",
        _tests("gpu/device_ops/test_aliasing.py gpu/device/test_overlapping_inputs.py"),
    ),
    # ---- runtime
    Fault(
        "uploads_before_what_is_pending",
        "runtime/transfer.py",
        "if is_idle or self._queue.is_empty:\n",
        "if not is_idle:\n",
        _tests("gpu/test_runtime_queue.py"),
    ),
    # ---- capture
    Fault(
        "negated_gradients_read_as_they_are",
        "capture/graph/aot.py",
        'and (value.is_conj() or value.is_neg() or str(node.target).startswith("tangents"))',
        "and (value.is_conj() or value.is_neg())",
        _tests("gpu/test_compiled_complex.py"),
    ),
    Fault(
        "conjugates_read_as_they_are",
        "capture/eager/arguments.py",
        "    if spec.conj:\n",
        "    if spec.conj and spec.neg:\n",
        _tests("unit/test_capture_eager.py"),
    ),
    Fault(
        "returned_values_taken_for_saved_ones",
        "capture/graph/aot.py",
        "        if position >= visible\n",
        "        if position >= visible - 1\n",
        _tests("gpu/test_compiled.py"),
    ),
    Fault(
        "first_of_several_numbers_in_an_access",
        "codegen/wgsl/scalars.py",
        "        lanes = [place.constant for place in places]\n",
        "        lanes = [place.constant // 2 * 2 for place in places]\n",
        _tests("gpu/test_packed_products.py"),
    ),
    Fault(
        "few_rows_without_their_last_elements",
        "codegen/kernels/operands.py",
        "environment(o, (i + u) * VECTOR + x)",
        "environment(o, i * VECTOR + x)",
        _tests("gpu/test_packed_products.py"),
    ),
    Fault(
        "products_of_two_small_bfloat16_twice",
        "templates/bfloat16_functions.wgsl.jinja",
        "      if (!both) {\n",
        "      if (true) {\n",
        _tests("gpu/test_bfloat16_units.py"),
    ),
    Fault(
        "small_bfloat16_zeroed_when_scales_rise",
        "templates/bfloat16_units.wgsl.jinja",
        "lhs_care = select(lhs_care, 2u, lhs_floor != lhs_window.x);",
        "",
        _tests("gpu/test_bfloat16_units.py"),
    ),
    Fault(
        "dequantized_weights_kept",
        "scheduler/rewrites/preparation.py",
        "8 * typical(b.numel) >= numel",
        "2 * typical(b.numel) >= numel",
        _tests("unit/test_preparation.py"),
    ),
    Fault(
        "int4_without_a_sign",
        "torch_ops/int4.py",
        "(32 - width, 32 - width - bits, -width)",
        "(28 - width, 28 - width - bits, -width)",
        _tests("gpu/device_ops/test_packed_weights.py models/test_quantized.py"),
    ),
    Fault(
        "packed_rows_taken_for_columns",
        "ir/access.py",
        "_SHARING = (1, 2, 8)",
        "_SHARING = (1,)",
        _tests("gpu/test_packed_products.py unit/test_preparation.py"),
    ),
)
