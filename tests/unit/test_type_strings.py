"""cffi's types are the same when its parser sees only what a string mentions."""

from __future__ import annotations

import pytest
from cffi import FFI, CDefError, cparser

from torch_webgpu_compile.runtime.type_strings import parse_only_needed

HEADER = """
typedef struct Impl *Handle;
typedef struct { int status; Handle handle; } Info;
typedef void (*Callback)(Info const *info, void *user);
typedef enum { First = 1, Second = 2 } Kind;
typedef struct { Callback callback; Kind kind; Info info[2]; } Request;
""" + "".join(f"typedef struct {{ int a; }} Unused{k};\n" for k in range(50))

STRINGS = [
    "Request *",
    "Info[]",
    "Handle[3]",
    "Kind",
    "Callback",
    "int (Request *, Kind)",
    "char *",
]


def _ffi(quick: bool) -> FFI:
    ffi = FFI()
    ffi.cdef(HEADER)
    if quick:
        parse_only_needed(ffi)
    return ffi


def _layout(ffi: FFI, string: str) -> object:
    if string.startswith("int ("):
        return str(ffi.callback(string, lambda *_: 1))[:40]
    kind = ffi.typeof(string)
    inner = getattr(kind, "item", kind)
    fields = [(n, str(f.type), f.offset) for n, f in getattr(inner, "fields", None) or ()]
    return str(kind), fields


@pytest.mark.parametrize("string", STRINGS)
def test_same_types(string):
    assert _layout(_ffi(True), string) == _layout(_ffi(False), string)


def test_values_and_errors():
    ffi = _ffi(True)
    parse_only_needed(ffi)  # again: nothing happens
    request = ffi.new("Request *", {"kind": ffi.cast("Kind", 2), "info": [{"status": 7}]})
    assert (request.kind, request.info[0].status) == (2, 7)
    with pytest.raises(CDefError):
        ffi.new("Missing *")
    ffi.cdef("typedef struct { Request request; } Later;")
    assert ffi.sizeof("Later") == ffi.sizeof("Request")


def test_parses_little(monkeypatch):
    parsed = []
    parser = cparser._get_parser()

    class Recorder:
        def parse(self, source):
            parsed.append(source)
            return parser.parse(source)

    ffi = _ffi(True)
    monkeypatch.setattr(cparser, "_get_parser", Recorder)
    ffi.typeof("Request *")
    assert "Unused" not in parsed[0]
    assert "Request" in parsed[0]
