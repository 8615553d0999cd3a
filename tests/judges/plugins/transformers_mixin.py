"""A pytest plugin: transformers' ``tests`` as a package, as far as its source package has them.

The package on the registry has the mixins, but neither the tests of generation nor of exporters,
which they import names of.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

_MISSING = {
    "tests.exporters.test_export": "ExportTesterMixin",
    "tests.generation.test_utils": "GenerationTesterMixin",
}


def _supply(name: str, path: Path) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = [str(path)]
    sys.modules[name] = module
    return module


_tests = Path.cwd() / "tests"
_supply("tests", _tests)  # another package of this name may be on the path
for _name, _mixin in _MISSING.items():
    _, _folder, _file = _name.split(".")
    if not (_tests / _folder / f"{_file}.py").exists():
        _supply(f"tests.{_folder}", _tests / _folder)
        setattr(_supply(_name, _tests / _folder), _mixin, type(_mixin, (), {}))
