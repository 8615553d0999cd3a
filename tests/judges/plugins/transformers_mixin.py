"""A pytest plugin: transformers' ``tests`` as a package, as far as its source package has them.

The package on the registry has the mixins, but neither the tests of generation nor of exporters,
which they import names of. Attention's implementations are compared at 1e-7, float16's too, where
the mixin does not know the device: here at what other accelerators have.
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

_NAMED = '["hpu", "npu", "tpu"]'
_path = _tests / "test_modeling_common.py"
_common = ModuleType("tests.test_modeling_common")
_common.__dict__.update(__package__="tests", __file__=str(_path))
sys.modules[_common.__name__] = _common
_text = _path.read_text().replace(_NAMED, f'{_NAMED[:-1]}, "webgpu"]')
exec(compile(_text, _path, "exec"), _common.__dict__)
