"""Each change to PyTorch or another library says what it changes, why, and until when."""

from __future__ import annotations

import ast
import functools
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import torch_webgpu_compile
from torch_webgpu_compile import patches
from torch_webgpu_compile.device.import_hooks import around
from torch_webgpu_compile.errors import PyTorchVersionError
from torch_webgpu_compile.patches import TABLE, Patch, When

PACKAGE = Path(torch_webgpu_compile.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("patches/*.py") if path.name != "__init__.py")
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_patch_explains_itself(path):
    paragraphs = (ast.get_docstring(TREES[path]) or "").split("\n\n")
    for word in ("Patched:", "Why:", "Until:"):
        found = [text for text in paragraphs if text.startswith(word)]
        assert len(found) == 1, f"{word} is to begin one paragraph"
        assert len(found[0].removeprefix(word).split()) >= 2
    functions = [node for node in TREES[path].body if isinstance(node, ast.FunctionDef)]
    is_installed = any(function.name == "install" for function in functions)
    assert is_installed or _declares(TREES[path])


def _declares(tree):
    """Whether a module has functions around those of other libraries."""
    names = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return "around" in names


def test_every_patch_is_a_row():
    rows = [row.module for row in TABLE]
    assert len(set(rows)) == len(rows)
    assert sorted(rows) == sorted(
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in FILES
    )


def test_every_row_is_installed():
    """Each time is one at which somebody installs; contexts are entered by their names."""
    others = [path for path in TREES if path not in FILES and path.name != "patches.py"]
    sources = "\n".join(path.read_text() for path in others)
    for when in {row.when for row in TABLE} - {When.CAPTURE}:
        assert sources.count(f"patches.install(patches.When.{when.name}") == 1
    for row in TABLE:
        by_name = f"{row.name}.install(" in sources
        assert by_name == (row.when is When.CAPTURE), row


def _foreign_names(tree):
    """Names of a module that are what other libraries have, or modules of theirs."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            is_own = node.level or (node.module or "").startswith("torch_webgpu_compile")
            if not is_own or (node.module or "").endswith("torch_private"):
                names |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):  # other names for them
        if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Attribute):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if _root(node.value) in names:
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names - {"os", "sys"}  # the environment, and tables of modules, are everybody's


def _root(node):
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _replaced(node):
    """What a statement or call gives another value, as expressions."""
    if isinstance(node, ast.Assign | ast.Delete):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target
    elif isinstance(node, ast.Call):
        name = ast.unparse(node.func).split(".")
        if name[-1] in ("setattr", "delattr") or "patch" in name[:-1]:
            yield ast.Attribute(node.args[0], "...") if node.args else node.func


def replacements(tree):
    """Where a module changes what is another library's."""
    foreign = _foreign_names(tree)
    for node in ast.walk(tree):
        for target in _replaced(node):
            is_part = isinstance(target, ast.Attribute | ast.Subscript)
            if is_part and _root(target) in foreign:
                yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.tensor = None",
        "import torch\nmodule: Any = torch.nn\nmodule.Linear = None",
        "from torch.amp import grad_scaler\nsetattr(grad_scaler, name, value)",
        "from ..torch_private import dynamo_config\ndynamo_config.allow_rnn, x = True, 1",
        "from ..torch_private import _BACKENDS\n_BACKENDS['webgpu'] = 1",
        "import torch\nwith mock.patch.object(torch.nn, 'Linear', None): pass",
        "import torch\ndel torch.Tensor.cuda",
    ],
)
def test_a_replacement_is_found(source):
    assert len(list(replacements(ast.parse(source)))) == 1


def test_nothing_is_replaced_elsewhere():
    """What other libraries have is given another value in files of patches only."""
    # Where the package is not installed, it tells Dynamo of its backend as an installed one would.
    allowed = {PACKAGE / "__init__.py": 1}
    for path, tree in TREES.items():
        if path not in FILES:
            found = list(replacements(tree))
            assert len(found) == allowed.get(path, 0), f"{path}: {found}"
            assert not _declares(tree), path


@pytest.fixture
def broken(monkeypatch):
    """A table of one patch, whose file is not there."""

    def table(*, critical):
        row = Patch("capture.patches.is_not_there", When.BACKEND, critical)
        monkeypatch.setattr(patches, "TABLE", (row, *TABLE))
        monkeypatch.setattr(patches, "_warned", set())

    return table


def test_a_patch_that_fails_warns_of_itself_once(broken):
    broken(critical=False)
    with pytest.warns(RuntimeWarning, match="without its patch 'is_not_there'") as caught:
        patches.install(When.BACKEND)
    assert len(caught) == 1  # the others are installed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patches.install(When.BACKEND)


def test_a_critical_patch_that_fails_is_an_error(broken):
    broken(critical=True)
    with pytest.raises(PyTorchVersionError, match="'is_not_there' of PyTorch cannot be"):
        patches.install(When.BACKEND)


def test_a_context_that_fails_changes_nothing(monkeypatch):
    monkeypatch.setattr(patches, "_warned", set())
    holder = SimpleNamespace(value=1)
    patch = "torch_webgpu_compile.capture.patches.compiling_flag"
    with patches.replaced(patch, lambda: holder, "value", lambda value: value + 1):
        assert holder.value == 2
    with (
        pytest.warns(RuntimeWarning, match=r"without its patch 'compiling_flag'.*Why: FX keeps"),
        patches.replaced(patch, lambda: holder, "missing", lambda value: value + 1),
    ):
        assert vars(holder) == {"value": 1}
    assert vars(holder) == {"value": 1}


class _Owner:
    """Has each kind of function that a patch may go around."""

    def method(self, x):
        return self, x

    @staticmethod
    def static(x):
        return x

    @classmethod
    def of_class(cls, x):
        return cls, x

    @property
    def plain(self):
        return self, 1

    @functools.cached_property
    def cached(self):
        return [self]


def test_a_function_goes_around_each_kind_of_function(monkeypatch):
    module = ModuleType("patched_library")
    contents = vars(_Owner).items()
    module.Owner = type("Owner", (), {k: v for k, v in contents if k[:2] != "__"})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__spec__ = SimpleNamespace(name=module.__name__)
    names = ("method", "static", "of_class", "plain", "cached", "missing")

    @around(*(f"patched_library:Owner.{name}" for name in names))
    def noted(original, *arguments):
        return ("noted", original(*arguments))

    owner = module.Owner()
    assert owner.method(1) == module.Owner.method(owner, 1) == ("noted", (owner, 1))
    assert owner.static(2) == module.Owner.static(2) == ("noted", 2)
    assert owner.of_class(3) == module.Owner.of_class(3) == ("noted", (module.Owner, 3))
    assert owner.plain == ("noted", (owner, 1))
    assert owner.cached is owner.cached
    assert owner.cached == ("noted", [owner])


def test_what_pytorch_does_not_have_is_a_warning_of_the_patch(monkeypatch):
    monkeypatch.setattr(patches, "_warned", set())

    def function(original):
        return original()

    function.__module__ = "torch_webgpu_compile.device.patches.lstm_cells"
    with pytest.warns(RuntimeWarning, match=r"without its patch 'lstm_cells'.*Why: it compares"):
        around("torch.nn.functional:is_not_there")(function)
