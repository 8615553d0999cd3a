"""Operators that users write in WGSL, without a GPU: what is read of the text, graphs, plans."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compilations import compile_function
from torch_webgpu_compile import UnsupportedOp, WgslError, wgsl_op
from torch_webgpu_compile.compiler import cache_key
from torch_webgpu_compile.errors import OptionError
from torch_webgpu_compile.ir.interpret import interpret
from torch_webgpu_compile.ir.text import format_graph
from torch_webgpu_compile.options import CompileOptions
from torch_webgpu_compile.plan import serialize
from torch_webgpu_compile.plan.model import USER_KERNEL, Dispatch, Kernel
from torch_webgpu_compile.runtime.failures import shader_error
from torch_webgpu_compile.target import Target
from torch_webgpu_compile.user_wgsl.modules import parse_function, parse_kernel
from torch_webgpu_compile.user_wgsl.source import Source, find_source
from torch_webgpu_compile.wgsl_operators.elementwise import ElementwiseOperator

HERE = Path(__file__)
x = torch.randn(6, 10)

GATE = """
struct Pair { value: f32, x: f32 }
const x = 0.5;
fn helper(a: f32) -> f32 { return a * x; }  // x and helper are names of the kernel, too
fn gate(a: f32, b: f32) -> Pair {
  var pair: Pair;
  pair.value = helper(a);
  pair.x = b * x;
  return pair;
}
"""
HELPED = (
    "fn helper(a: f32) -> f32 { return a + 1.0; } fn helped(a: f32) -> f32 { return helper(a); }"
)

SHIFTED = """
struct Numbers { count: u32, by: i32, scale: f32, share: f32 }
  @group(1)
  @binding(7) var<storage, read_write> y: array<f32>;
@group(0) @binding(0) var<storage> x: array<f32>;
@group(0) @binding(1) var<uniform> numbers: Numbers;

@workgroup_size(WIDTH) @compute
fn shifted(@builtin(global_invocation_id) id: vec3<u32>) {
  let at = i32(id.x) + numbers.by;
  if (id.x >= numbers.count) { return; }
  let inside = at >= 0 && at < i32(numbers.count);
  y[id.x] = select(0.0, x[at], inside) * numbers.scale * numbers.share;
}
const WIDTH = 64;
"""


def shifted(**changes: Any) -> Any:
    functions: dict[str, Any] = {
        "outputs": lambda x, by=1, scale=2.0: x.shape,
        "grid": lambda x, by, scale: -(-x.numel() // 64),
        "uniforms": lambda x, by, scale: {"count": x.numel(), "share": 1 / x.numel()},
    }
    return wgsl_op("tests::shifted", SHIFTED, **{**functions, **changes})


def swish() -> ElementwiseOperator:
    text = "fn swish(x: f32, beta: f32) -> f32 { return x / (1.0 + exp(-beta * x)); }"
    return wgsl_op("tests::swish", text)


# ---- what is read of the text


def test_signatures() -> None:
    source = Source(
        "tests::f", "alias R = f32; fn f(a: R, /* , b: /* */ i32 */ c: bool,) -> vec2u {}", "", 1
    )
    function = parse_function(source, "tests::f")
    assert function.parameters == (("a", "f32"), ("c", "bool"))
    assert function.results == (("x", "u32"), ("y", "u32"))
    assert parse_function(Source("g", GATE, "", 1), "g", "gate").results == (
        ("value", "f32"),
        ("x", "f32"),
    )
    kernel = parse_kernel(Source("k", SHIFTED, "", 1), "k")
    assert kernel.inputs == (("x", "f32"),)
    assert kernel.outputs == (("y", "f32"),)
    assert [name for name, _ in kernel.uniforms] == ["count", "by", "scale", "share"]
    assert kernel.workgroup_size == (64, 1, 1)


FUNCTIONS = {
    "no": ("", "there is no function", 1, 1),
    "void": ("fn f(x: f32) {}", "f returns nothing", 1, 4),
    "result": ("fn f(x: f32) -> mat2x2f {}", "f returns mat2x2f", 1, 4),
    "pointer": ("fn f(\n  x: ptr<function, f32>) -> f32 {}", "x is ptr<function,f32>", 2, 3),
    "wide": ("fn f(x: f64) -> f32 {}", "x is f64, no scalar; use one of f32", 1, 6),
    "arguments": ("fn f() -> f32 {}", "f has no parameters", 1, 4),
    "several": ("fn g(x: f32) -> f32 {}\nfn h(x: f32) -> f32 {}", r"several .* \(g, h\)", 1, 4),
    "state": ("fn f(x: f32) -> f32 {}\n var<private> s: f32;", "the variable s is none", 2, 15),
    "directive": ("enable subgroups;\nfn f(x: f32) -> f32 {}", "be for all of the kernel", 1, 1),
    "open": ("fn f(x: f32) -> f32 {\n  return (x;\n}", "'}' closes nothing", 3, 1),
    "brace": ("fn f(x: f32) -> f32 {\n  return x;", "'{' is not closed", 1, 21),
    "comment": ("fn f(x: f32) -> f32 {}\n /* ", "this comment does not end", 2, 2),
    "type": ("fn f(x) -> f32 {}", "expected ':', found '\\)'", 1, 7),
    "word": ("fun f(x: f32) -> f32 {}", "expected a declaration, found 'fun'", 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_are_refused(name: str) -> None:
    text, message, line, column = FUNCTIONS[name]
    with pytest.raises(WgslError, match=message) as raised:
        parse_function(Source("tests::op", text, "model.py", 11), "tests::op", "f")
    place = f"{10 + line}:{column}" if line > 1 else f"11:{column}"
    assert str(raised.value).startswith("tests::op: ")
    assert str(raised.value).endswith(f"\n  at model.py:{place}")


RESULT = "@group(0) @binding(0) var<storage, read_write> y: array<f32>;\n"
ENTRY = "@compute @workgroup_size(1) fn a() {}\n"
KERNELS = {
    "two": (ENTRY * 2, "2 entry points"),
    "result": (ENTRY, "no result"),
    "size": (f"{RESULT} @compute fn a() {{}}", "no @workgroup_size"),
    "formula": (RESULT + ENTRY.replace("(1)", "(2 * 4)"), r"workgroup size 2 \* 4"),
    "element": (RESULT.replace("f32", "atomic<u32>") + ENTRY, "array<atomic<u32>>, no tensor"),
    "unbound": ("var<storage, read_write> y: array<f32>;" + ENTRY, "y has no binding"),
    "number": ("@group(0) @binding(0) var<uniform> n: vec2f;" + ENTRY, "n is vec2f, no number"),
    "override": ("override n = 1;" + ENTRY, "an override has no value"),
    "length": (RESULT + ENTRY.replace("{}", "{ y[arrayLength(&y) - 1] = 1; }"), "arrayLength"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_that_are_refused(name: str) -> None:
    text, message = KERNELS[name]
    with pytest.raises(WgslError, match=message):
        parse_kernel(Source("tests::op", text, "model.py", 1), "tests::op")


def test_places_in_files(tmp_path: Path) -> None:
    """Of strings as they are, stripped and dedented, of files, and of strings that are made."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            '''
            from textwrap import dedent
            from torch_webgpu_compile.user_wgsl.source import find_source
            whole = find_source("a", """fn f()
              -> f32 {}""", 0)
            def inside():
                text = """
                    fn f()
                      -> f32 {}
                """
                return [find_source("a", given, 0) for given in (dedent(text).strip(), text)]
            dedented, given = inside()
            made = find_source("a", "fn g()\\n" + "  -> f32 {}", 0)
            '''
        )
    )
    names: dict[str, Any] = {}
    exec(compile(program.read_text(), str(program), "exec"), names)
    lines = program.read_text().splitlines()
    for name, number in (("whole", 1), ("dedented", 1), ("given", 2)):
        source = names[name]
        file, line, column = source.place(number, 1).rsplit(":", 2)
        assert file == str(program)
        assert lines[int(line) - 1][int(column) - 1 :].lstrip().startswith("fn f()")
        file, line, column = source.place_of(source.text.index("->")).rsplit(":", 2)
        assert lines[int(line) - 1][int(column) - 1 :].startswith("-> f32 {}")
    line = next(k for k, text in enumerate(lines, 1) if text.startswith("made"))
    assert names["made"].place(2, 3) == f"{program}:{line} (line 2, column 3 of the WGSL)"
    file = tmp_path / "f.wgsl"
    file.write_text("\nfn f(x: f64) -> f32 {}")
    with pytest.raises(WgslError, match=re.escape(f"{file}:2:6")):
        wgsl_op("tests::f", file)


def test_the_place_of_a_definition() -> None:
    line = sys._getframe().f_lineno + 2
    with pytest.raises(WgslError) as raised:
        wgsl_op("tests::f", "fn f(x: f64) -> f32 { return 0; }")
    assert raised.value.place == f"{HERE}:{line}:35"


@pytest.mark.parametrize(
    "complaint",
    [
        "Shader 'k' parsing error: no definition in scope for identifier: `lost`\n"
        "   ┌─ wgsl:{line}:{column}\n   │\n{line} │   return scale_{suffix} * lost(x);\n   │ ^^^\n",
        ":{line}:{column} error: unresolved call target 'lost'\n  return …\n  ^^^^\n",
    ],
    ids=["naga", "tint"],
)
def test_what_a_compiler_says(complaint: str) -> None:
    """It is told as being in the user's file, with the user's names."""
    operator = wgsl_op(
        "tests::lossy",
        """
        const scale = 2.0;
        fn lossy(x: f32) -> f32 {
          return scale * lost(x);
        }
        """,
    )
    line = sys._getframe().f_lineno - 4
    (kernel,) = compile_function(lambda x: operator(x) + 1, x).plan.kernels
    lines = kernel.wgsl.splitlines()
    number = next(k for k, text in enumerate(lines, 1) if "lost(" in text)
    column = lines[number - 1].index("lost") + 1
    suffix = operator.function.unique.removeprefix("lossy_")
    message = complaint.format(line=number, column=column, suffix=suffix)
    error = str(shader_error("Validation", message, kernel))
    assert error.startswith("tests::lossy: ")
    assert "lost" in error.splitlines()[0]
    assert error.splitlines()[1:] == [f"  at {HERE}:{line}:26", "    return scale * lost(x);"]
    assert suffix not in error
    # What is not theirs is this package's bug.
    other = message.replace(f":{number}:", ":1:")
    assert "and report it" in str(shader_error("Validation", other, kernel))


# ---- graphs


def only_kernel(function: Callable[..., Any], *arguments: Any, **options: Any) -> Kernel:
    (kernel,) = compile_function(function, *arguments, **options).plan.kernels
    return kernel


def test_one_kernel_with_what_is_around() -> None:
    op = swish()
    y = torch.randn(10)
    state = compile_function(lambda x, y: torch.relu(op(x * 2, 1.5) + op(y, x)), x, y)
    assert state.plan.dispatch_count == 1
    (kernel,) = state.plan.kernels
    assert kernel.wgsl.count("fn swish_") == 1
    assert kernel.wgsl.count("swish_") == 9  # of four lanes each
    state = compile_function(lambda x: torch.softmax(op(x, 1.0), -1) * 2, x)
    assert state.plan.dispatch_count == 1
    state = compile_function(lambda x: op(x @ x.T, 1.0), x)
    assert state.plan.dispatch_count == 1


def test_gradients_are_one_kernel() -> None:
    op = swish()
    op.register_gradient(
        "fn d(x: f32, beta: f32) -> vec2f { let s = 1 / (1 + exp(-beta * x)); "
        "let d = s * (1 - s); return vec2f(s + x * beta * d, x * x * d); }"
    )

    def gradients(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.tests.swish_backward(grad * 2, x, torch.ones_like(x))

    kernel = only_kernel(gradients, x, x)
    assert kernel.wgsl.count("fn d_") == 1
    assert kernel.wgsl.count("= d_") == 4  # both results are of one call for each lane


def test_results_and_names() -> None:
    gate = wgsl_op("tests::gate", GATE)
    helped = wgsl_op("tests::helped", HELPED)

    def both(a: Tensor, b: Tensor) -> Tensor:
        value, other = gate(a, b)
        return helped(value) * other

    state = compile_function(both, x, x)
    assert state.plan.dispatch_count == 1
    wgsl = state.plan.kernels[0].wgsl
    names = re.findall(r"(?:fn|struct|const) (\w+)", wgsl)
    assert len(set(names)) == len(names)
    suffix = gate.function.unique.removeprefix("gate")
    for line in (f"pair.value = helper{suffix}(a);", f"pair.x = b * x{suffix};"):
        assert line in wgsl
    assert f"struct Pair{suffix} {{ value: f32, x: f32 }}" in wgsl


def test_the_text_is_a_part_of_the_key() -> None:
    def key_of(text: str) -> str:
        op = wgsl_op("tests::keyed", text)
        graph = compile_function(lambda x: op(x) + 1, x).graph
        assert text in format_graph(graph)
        return cache_key(graph, Target(), CompileOptions())

    one, other = (f"fn keyed(x: f32) -> f32 {{ return x * {n}; }}" for n in (2, 3))
    assert key_of(one) != key_of(other)
    assert key_of(one) == key_of(one)


def test_dtypes_of_results() -> None:
    op = swish()
    half, whole = x.half(), torch.arange(10)
    number = torch.tensor(2.0)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert op(half, 1.5).dtype is torch.float16
        assert op(half, number).dtype is torch.float16
        assert op(half, x).dtype is torch.float32
        assert op(half, x.bfloat16()).dtype is torch.float32
        assert op(whole, 2).dtype is torch.float32
        assert op(whole, half).dtype is torch.float16
        assert op(x.to(memory_format=torch.preserve_format).t(), 1).stride() == (1, 10)


BAD_CALLS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "double": (lambda op: op(x.double(), 1.0), TypeError, r"takes no torch.float64; .*float\(\)"),
    "complex": (lambda op: op(x.to(torch.complex64), 1.0), TypeError, "takes no torch.complex64"),
    "string": (lambda op: op(x, "1"), TypeError, "beta is f32, got str"),
    "missing": (lambda op: op(x), TypeError, "missing the argument beta"),
    "more": (lambda op: op(x, 1.0, 2.0), TypeError, r"takes \(x, beta\), got more"),
    "unknown": (lambda op: op(x, 1.0, gamma=2.0), TypeError, r"takes \(x, beta\), got more"),
    "sizes": (lambda op: op(x, torch.ones(3)), RuntimeError, "broadcast|size"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name: str) -> None:
    call, kind, message = BAD_CALLS[name]
    op = swish()
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(kind, match=message),
    ):
        call(op)


def test_numbers_that_do_not_fit() -> None:
    op = wgsl_op("tests::ints", "fn ints(x: f32, i: i32, u: u32) -> i32 { return i + i32(u); }")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert op(x, -5, 4_000_000_000).dtype is torch.int32
        with pytest.raises(OverflowError, match="i is i32, which 2147483648 does not fit"):
            op(x, 1 << 31, 0)
        with pytest.raises(OverflowError, match="u is u32, which -1 does not fit"):
            op(x, 0, -1)
        with pytest.raises(TypeError, match=r"i is i32 and takes no torch.int64; .*int\(\)"):
            op(x, torch.ones(10, dtype=torch.int64), 0)


BAD_GRADIENTS = {
    "parameters": ("fn d(x: f32) -> vec2f { return vec2f(x); }", "other parameters"),
    "results": ("fn d(x: f32, beta: f32) -> f32 { return x; }", "1 results; .*by each of x, beta"),
    "types": ("fn d(x: f32, beta: f32) -> vec2u { return vec2u(0); }", "by each of x, beta"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_GRADIENTS)
def test_gradients_that_are_refused(name: str) -> None:
    text, message = BAD_GRADIENTS[name]
    with pytest.raises(WgslError, match=message):
        swish().register_gradient(text)


def test_the_interpreter_refuses() -> None:
    op = swish()
    for function in (lambda x: op(x, 1.0), shifted()):
        graph = compile_function(function, x).graph
        with pytest.raises(
            UnsupportedOp, match="written in WGSL, which the interpreter does not run"
        ):
            interpret(graph, [x.numpy()])


def test_float16_is_enabled_once() -> None:
    op = wgsl_op("tests::halves", "enable f16; fn halves(x: f32) -> f32 { return f32(f16(x)); }")
    wgsl = only_kernel(op, x).wgsl
    assert wgsl.startswith("enable f16;\n")
    assert wgsl.count("enable f16;") == 1


@pytest.mark.parametrize(
    ("value", "types"),
    [
        ("f32(f16(x))", "f16"),
        ("f32(i64(x) >> 3u)", "i64 or u64"),
        ("f32(0x10000000flu + 5)", "i64 or u64"),
        ("f32(0.1lf)", "f64"),
    ],
)
def test_types_of_a_gpu_without_them(value: str, types: str) -> None:
    op = wgsl_op("tests::typed", f"fn typed(x: f32) -> f32 {{ return {value}; }}")
    every = {"shader-f16", "shader-int64", "shader-f64"}
    only_kernel(op, x, target=Target(features=frozenset(every)))
    with pytest.raises(Exception, match=f"values of {types}, and this GPU has no such type"):
        compile_function(op, x, target=Target(features=frozenset()))


def test_words_of_a_gpu_without_int64() -> None:
    op = wgsl_op("tests::gate", GATE)
    positions = torch.arange(10)
    target = Target(features=frozenset())
    kernel = only_kernel(lambda i: op(i, i + 1)[0].long(), positions, target=target)
    assert not re.search(r"^[^/]*\bi64\b", kernel.wgsl, re.MULTILINE)
    assert "struct Pair_" in kernel.wgsl


# ---- whole kernels


def test_a_kernel_is_a_dispatch() -> None:
    op = shifted()
    state = compile_function(lambda x: torch.relu(op(x.t() * 2, by=-3) + 1), x)
    before, own, after = state.plan.steps
    assert all(isinstance(step, Dispatch) for step in (before, own, after))
    kernel = state.plan.kernels[own.kernel]
    assert kernel.kind == USER_KERNEL
    assert kernel.name.startswith("wgsl_shifted")
    assert kernel.workgroup_size == (64, 1, 1)
    assert [binding.writable for binding in kernel.bindings] == [False, True]
    assert list(map(int, own.grid)) == [1, 1, 1]
    assert list(map(str, own.parameters)) == ["60", "-3", "float(2.0)", f"float({1 / 60})"]
    assert "@group(0) @binding(0) var<storage, read> x: array<f32>;" in kernel.wgsl
    assert "@group(0) @binding(2) var<uniform> numbers: Numbers;" in kernel.wgsl
    assert "@compute @workgroup_size(64, 1, 1)\nfn main(" in kernel.wgsl
    assert kernel.wgsl.count("\n") == SHIFTED.count("\n") + 3  # two marks
    assert serialize.loads(serialize.dumps(state.plan)) == state.plan


def test_a_kernel_of_symbolic_sizes() -> None:
    op = shifted()
    state = compile_function(lambda x, by: op(x, by), x, 4, dynamic=True)
    (step,) = state.plan.steps
    assert str(step.grid[0]) == "(s0*s1 + 63)//64" or not step.grid[0].is_constant
    assert not any(p.is_constant for p in step.parameters[:2])
    assert str(step.parameters[3]).startswith("div(")


def test_arguments_are_copied_if_they_are_not_contiguous() -> None:
    op = shifted()
    assert compile_function(lambda x: op(x), x).plan.dispatch_count == 1
    assert compile_function(lambda x: op(x), x.t()).plan.dispatch_count == 2
    assert compile_function(lambda x: op(x), x[:1].t()).plan.dispatch_count == 1
    assert compile_function(lambda x: op(x[1:]), x).plan.dispatch_count == 2


def test_an_empty_result_needs_no_dispatch() -> None:
    op = shifted()
    assert compile_function(lambda x: op(x), x[:0]).plan.dispatch_count == 0


BAD_KERNELS: dict[str, tuple[dict[str, Any], str]] = {
    "grid": ({"grid": lambda x, by, scale: "all"}, "grid gives 'all'"),
    "dimensions": ({"grid": lambda x, by, scale: (1, 1, 1, 1)}, "not one to three integers"),
    "missing": ({"uniforms": None}, r"uniforms gives \[\], not exactly \['count', 'share'\]"),
    "given": ({"uniforms": lambda x, by, scale: {"by": 1}}, r"not exactly \['count', 'share'\]"),
    "float": ({"uniforms": lambda x, by, scale: {"count": 1.5, "share": 1}}, "is u32, got float"),
    "shape": ({"outputs": lambda x, by=1, scale=1.0: "all"}, "outputs gives 'all', not a shape"),
    "size": ({"grid": lambda x, by, scale: 70_000}, "more than 65,535 workgroups"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_KERNELS)
def test_functions_of_kernels_that_give_something_else(name: str) -> None:
    changes, message = BAD_KERNELS[name]
    op = shifted(**changes)
    with pytest.raises(Exception, match=message):
        compile_function(lambda x: op(x), x)


def test_definitions_of_kernels_that_are_refused() -> None:
    with pytest.raises(TypeError, match="takes z, which is no tensor that the kernel reads"):
        shifted(outputs=lambda x, z: x.shape)
    with pytest.raises(TypeError, match="outputs takes no x"):
        shifted(outputs=lambda by: (1,))
    with pytest.raises(OptionError, match="it is a kernel; say outputs= and grid="):
        shifted(grid=None)
    with pytest.raises(OptionError, match="no function is @compute"):
        wgsl_op("tests::f", "fn f(x: f32) -> f32 { return x; }", grid=lambda x: 1, outputs=None)
    op = shifted()
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(TypeError, match=r"x is f32 and takes no torch\.float16"),
    ):
        op(x.half())


def test_an_operator_that_is_defined_again() -> None:
    first = wgsl_op("tests::again", "fn again(x: f32) -> f32 { return x + 1; }")
    second = wgsl_op("tests::again", "fn again(x: f32, y: f32) -> f32 { return x + y; }")
    assert len(second.overload._schema.arguments) == 2
    assert "x + y" in only_kernel(lambda x: second(x, x), x).wgsl
    assert first.function.text != second.function.text


def test_sources_of_other_frames() -> None:
    assert find_source("a", "fn f() {}", depth=0).file == str(HERE)
