"""WGSL with 64-bit integers, as WGSL without. `tests/gpu/test_missing_features.py` runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torch_webgpu_compile.codegen.wgsl.words import without_int64
from torch_webgpu_compile.codegen.wgsl.words.translate import _Module

_GOLDEN = Path(__file__).parents[1] / "golden"

# What is declared around an expression: names of each type.
_AROUND = """
fn given(a: i64) -> i64 {{ return a; }}
fn main() {{
  var w: i64; var x: i64; var u: u64; var i: i32; var n: u32; var f: f32; var b: bool;
  var v: vec4<i64>; var iv: vec4<i32>; var bv: vec4<bool>; var many: array<i64, 4>;
  {};
}}
"""

WRITTEN = {
    "w = x + 5li": "w = tw_words_add(x, vec2<u32>(5u, 0u))",
    "w = -1li": "w = vec2<u32>(4294967295u, 4294967295u)",
    "w = x - w * x": "w = tw_words_sub(x, tw_words_mul(w, x))",
    "w += x": "w = tw_words_add(w, x)",
    "many[i] -= x / w": "many[i] = tw_words_sub(many[i], tw_words_div_i64(x, w))",
    "w = x & w | x": "w = ((x & w) | x)",
    "b = x < w && i < 3": "b = tw_words_lt_i64(x, w) && i < 3",
    "b = u >= 7lu": "b = tw_words_ge_u64(u, vec2<u32>(7u, 0u))",
    "w = i64(i) % w": "w = tw_words_rem_i64(tw_words_of_i32(i), w)",
    "w = i64(n) >> 3u": "w = tw_words_shr_i64(vec2<u32>(n, 0u), 3u)",
    "n = u32(bitcast<u64>(x) >> 32u)": "n = tw_words_shr_u64(x, 32u).x",
    "i = i32(given(x))": "i = bitcast<i32>(given(x).x)",
    "f = f32(x) * f": "f = tw_words_to_f32_of_i64(x) * f",
    "b = bool(x)": "b = any(x != vec2<u32>(0u))",
    "w = select(0li, x, b)": "w = select(vec2<u32>(0u, 0u), x, b)",
    "w = clamp(x, -1li, w)": ("w = tw_words_clamp_i64(x, vec2<u32>(4294967295u, 4294967295u), w)"),
    "w = ~x": "w = tw_words_not(x)",
    "v = vec4<i64>(iv) + 1li": (
        "v = tw_words_add_x4(tw_words_of_i32_x4(iv), tw_words_repeat_x4(vec2<u32>(1u, 0u)))"
    ),
    "v = vec4<i64>(w, x, w, x)": "v = array<vec2<u32>, 4>(w, x, w, x)",
    "bv = v > vec4<i64>(0li)": (
        "bv = tw_words_gt_i64_x4(v, tw_words_repeat_x4(vec2<u32>(0u, 0u)))"
    ),
    "v = select(v, vec4<i64>(x), bv)": "v = tw_words_select_x4(v, tw_words_repeat_x4(x), bv)",
    "w = v.y": "w = v[1]",
    "iv = vec4<i32>(v)": "iv = tw_words_to_i32_of_i64_x4(v)",
    "let t = array<i64, 2>(x, 0li)": "let t = array<vec2<u32>,2>(x, vec2<u32>(0u, 0u))",
    "if (x == w) { w = x; } else if (b) { w = -x; }": (
        "if (tw_words_eq(x, w)) { w = x; } else if (b) { w = tw_words_neg(x); }"
    ),
    "for (var k = 0li; k < x; k += 1li) { break; }": (
        "for (var k = vec2<u32>(0u, 0u); tw_words_lt_i64(k, x); "
        "k = tw_words_add(k, vec2<u32>(1u, 0u))) { break; }"
    ),
    "i = i + (i << n) // 5li": "i = i + (i << n) // 5li",
}


def _plain(text: str) -> str:
    return re.sub(r"\s+|[()]", "", text)  # parentheses beyond those of calls may come and go


@pytest.mark.parametrize("statement", WRITTEN)
def test_statements(statement: str) -> None:
    end = "\n" if "//" in statement else ""
    written = without_int64(_AROUND.format(statement + end))
    wanted = _AROUND.format(WRITTEN[statement] + end).split("\n  ")[-1]
    assert _plain(written).endswith(_plain(wanted)), written
    declared = "var w: vec2<u32>; var x: vec2<u32>; var u: vec2<u32>;"
    assert declared in written
    assert "var v: array<vec2<u32>, 4>;" in written


@pytest.mark.parametrize("statement", ["w = reverseBits(x)", "w++", "f = bitcast<f64>(x)"])
def test_what_is_not_known_is_an_error(statement: str) -> None:
    with pytest.raises(ValueError, match="has no translation"):
        without_int64(_AROUND.format(statement))


def test_every_kernel_is_understood() -> None:
    """What has no 64-bit integers is the same, read to its end."""
    modules = [
        module
        for path in sorted(_GOLDEN.glob("*.txt"))
        for module in re.findall(
            r"(?ms)^(?:enable f16;\n)?@group\(0\).*?^}$(?!\n(?:fn|@compute))",
            path.read_text(encoding="utf-8"),
        )
    ]
    assert len(modules) > 15
    for module in modules:
        if not re.search(r"\b[iu]64\b|\dl[iu]\b", module):
            assert _Module(module).translated() == module
