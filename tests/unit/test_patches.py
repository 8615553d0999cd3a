"""Each change to PyTorch or another library says what it changes, why, and until when."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from torch_webgpu_compile.device import autoload, patches

FOLDER = Path(patches.__path__[0])
FILES = sorted(path for path in FOLDER.glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_patch_explains_itself(path):
    tree = ast.parse(path.read_text())
    paragraphs = (ast.get_docstring(tree) or "").split("\n\n")
    for word in ("Patched:", "Why:", "Until:"):
        found = [text for text in paragraphs if text.startswith(word)]
        assert len(found) == 1, f"{word} is to begin one paragraph"
        assert len(found[0].removeprefix(word).split()) >= 2
    assert any(isinstance(node, ast.FunctionDef) and node.name == "install" for node in tree.body)


def test_every_patch_is_installed():
    package = FOLDER.parent
    others = [path for path in package.rglob("*.py") if path.parent != FOLDER]
    sources = "\n".join(path.read_text() for path in others)
    at_import = {*autoload.ESSENTIAL, *autoload.PATCHES}
    for path in FILES:
        assert path.stem in at_import or f"{path.stem}.install" in sources, path.stem
    assert at_import <= {path.stem for path in FILES}


def test_nothing_of_pytorch_is_replaced_elsewhere():
    """What is assigned to an attribute of a module of PyTorch is so in a file of `patches`."""
    package = FOLDER.parent
    for path in package.rglob("*.py"):
        if path.parent == FOLDER:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                assert not ast.unparse(target).startswith("torch."), (
                    f"{path}: {ast.unparse(target)}"
                )
