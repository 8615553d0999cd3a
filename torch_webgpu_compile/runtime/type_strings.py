"""cffi's parser of type strings, made quick for large headers."""

from __future__ import annotations

import re
from typing import Any


def parse_only_needed(ffi: Any) -> None:
    """Makes the parser of an `FFI` see only the type names that a string mentions.

    For ``ffi.new("WGPUBufferDescriptor *")`` cffi parses, beside that string, a declaration of
    every type name of the library's header: 13 ms of a server's time for each of the forty strings
    that a device's opening needs, half a second of every program's first call.
    """
    parser: Any = getattr(ffi, "_parser", None)
    if not hasattr(parser, "_parse") or not hasattr(parser, "_declarations"):
        return  # a cffi with other insides: as slow as before
    if "_parse" in vars(parser):
        return  # done before
    parse = parser._parse

    def parse_with_mentioned(source: str) -> Any:
        everything = parser._declarations
        words = set(re.findall(r"\w+", source))
        parser._declarations = {
            name: declared
            for name, declared in everything.items()
            if name.removeprefix("typedef ") in words
        }
        try:
            return parse(source)
        finally:
            parser._declarations = everything

    parser._parse = parse_with_mentioned
