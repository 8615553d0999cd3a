"""What Jinja makes of templates, for other processes."""

from __future__ import annotations

import jinja2
import pytest

from torch_webgpu_compile.codegen.wgsl.template_code import TemplateCode

NAME = "sum.jinja"


class Templates(dict):
    """Sources; each `text` is a process of its own."""

    compiled = 0

    def text(self, **inputs) -> str:
        def compiled(*arguments, **options):
            self.compiled += 1
            return compile_template(*arguments, **options)

        environment = jinja2.Environment(
            loader=jinja2.DictLoader(self), bytecode_cache=TemplateCode()
        )
        compile_template = environment._compile
        environment._compile = compiled
        return environment.get_template(NAME).render(inputs)


@pytest.fixture
def templates() -> Templates:
    return Templates({NAME: "{{ a }} + {{ b }}"})


def test_a_template_is_compiled_once_until_it_is_edited(templates, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", str(tmp_path))
    assert [templates.text(a=1, b=b) for b in range(3)] == ["1 + 0", "1 + 1", "1 + 2"]
    assert templates.compiled == 1
    templates[NAME] = "{{ a }} - {{ b }}"
    assert templates.text(a=1, b=2) == templates.text(a=1, b=2) == "1 - 2"
    assert templates.compiled == 2


@pytest.mark.parametrize("content", [b"", b"torch_webgpu_compile 1 x 1 x\n\x00", None])
def test_damaged_entries_are_made_again(templates, content, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", str(tmp_path))
    templates.text(a=1, b=2)
    (entry,) = tmp_path.glob("*.template")
    entry.write_bytes(entry.read_bytes()[:-9] if content is None else content)
    assert templates.text(a=1, b=2) == "1 + 2"
    assert templates.compiled == 2


def test_without_a_folder(templates, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", "0")
    assert templates.text(a=1, b=2) == templates.text(a=1, b=2) == "1 + 2"
    assert templates.compiled == 2
