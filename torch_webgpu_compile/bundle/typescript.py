"""`declarations`: what a bundle takes and gives, as types of TypeScript, for editors and compilers.

    import type { Bundle } from "./model/bundle";
    const model = await load<Bundle>("model/");

``web/src/signatures.ts`` has what the runtime makes of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .manifest import Entry, Manifest, State, Tensor
from .signature import sizes_text

DECLARATIONS = "bundle.d.ts"
"""The name of the file, beside the manifest."""


def declarations(manifest: Manifest) -> str:
    """The text of `DECLARATIONS`: ``export type Bundle``.

    It has the names of entries, inputs, results and states, with the dtypes that they have in any
    variant. Comments say their sizes.
    """
    variants = manifest.variants
    lines = [
        _comment(f"The bundle {manifest.name}, for `load<Bundle>(…)`; from {manifest.producer}"),
        "export type Bundle = {",
        "  entries: {",
    ]
    for name, entry in variants[0].entries.items():
        every = [variant.entries[name] for variant in variants]
        inputs = [each.inputs for each in every]
        results = [{key: r.tensor for key, r in each.results.items()} for each in every]
        ranges = ", ".join(f"{s.name}: {s.low} to {s.high}" for s in entry.sizes.values())
        returned = _tree(json.loads(entry.structure))
        returns = f"returns {returned}" if returned[0] in "[{" else ""
        about = "; ".join(filter(None, (ranges, returns)))
        lines += [f"    {line}" for line in ([_comment(about)] if about else [])]
        lines += [f"    {_key(name)}: {{", "      inputs: {", *_tensors(entry, inputs), "      };"]
        lines += ["      results: {", *_tensors(entry, results), "      };", "    };"]
    lines += ["  };", "  states: {"]
    for name, state in variants[0].state.items():
        dtypes = [each.state[name] for each in variants]
        lines += [f"    {_comment(f'{state.kind} {state.sizes}')}", f"    {_row(name, dtypes)}"]
    return "\n".join([*lines, "  };", "};", ""])


def _tensors(entry: Entry, variants: list[dict[str, Tensor]]) -> Iterator[str]:
    for name, tensor in variants[0].items():
        yield f"        {_comment(sizes_text(entry, tensor))}"
        yield f"        {_row(name, (each[name] for each in variants))}"


def _row(name: str, variants: Iterable[Tensor | State]) -> str:
    dtypes = dict.fromkeys(json.dumps(each.dtype.name) for each in variants)
    return f"{_key(name)}: {' | '.join(dtypes)};"


def _tree(structure: Any) -> str:
    """What a function returned, with the names of results: ``{logits, cache: [cache.0]}``."""
    if isinstance(structure, list):
        return f"[{', '.join(map(_tree, structure))}]"
    if "result" in structure and isinstance(structure["result"], str):
        return str(structure["result"])
    if "constant" in structure and not isinstance(structure["constant"], Mapping):
        return json.dumps(structure["constant"])
    return f"{{{', '.join(f'{key}: {_tree(value)}' for key, value in structure.items())}}}"


def _key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else json.dumps(name)


def _comment(text: str) -> str:
    """A comment of one line, which no name can end."""
    return f"/** {' '.join(text.split()).replace('*/', '* /')} */"
