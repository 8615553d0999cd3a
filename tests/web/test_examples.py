"""The projects of `web/examples`, as their readers would have them."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.web.conftest import WEB
from tests.web.test_without_gpu import bundle, check_types, run

EXAMPLES = WEB / "examples"
POINTS = [[0.0, 0.0], [0.9, 0.9]]

# What of React and Vite, which are not installed, the examples name.
DECLARED = """
declare module "react" {
  export function useState<S>(first: S): [S, (next: S) => void];
  export function useEffect(effect: () => (() => void) | void, dependencies: readonly unknown[]): void;
  export interface PointerEvent<T> { currentTarget: T; clientX: number; clientY: number }
}
declare module "react/jsx-runtime" {
  export namespace JSX {
    interface IntrinsicElements {
      div: { onPointerMove: (event: import("react").PointerEvent<HTMLElement>) => void; style: object; children?: unknown };
      p: { role: string; children?: unknown };
      progress: { max?: number; value?: number };
    }
  }
}
interface ImportMeta { env: { BASE_URL: string } }
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that `export.py` writes, and what pages show of it."""
    folder = tmp_path_factory.mktemp("circle") / "model"
    run(sys.executable, str(EXAMPLES / "export.py"), str(folder))
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / "export.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    odds = module.circle()(torch.tensor(POINTS)).flatten().tolist()
    assert odds[0] > 0.9 > 0.1 > odds[1]
    return folder, " ".join(f"{value:.3f}" for value in odds)


@pytest.fixture
def project(exported, tmp_path, site):
    """A project of Vite, with the npm package and the bundle. `site` has built the package."""
    package = tmp_path / "node_modules" / "torch-webgpu"
    shutil.copytree(WEB / "dist", package / "dist")
    shutil.copy(WEB / "package.json", package)
    shutil.copytree(EXAMPLES / "vite", tmp_path, dirs_exist_ok=True)
    for name in ("useModel.ts", "Circle.tsx"):
        shutil.copy(EXAMPLES / "react" / name, tmp_path / "src")
    shutil.copytree(exported[0], tmp_path / "public" / "model")
    (tmp_path / "src" / "declared.d.ts").write_text(DECLARED)
    return tmp_path


def test_worker(exported, site, context):
    folder = site[0] / "example"
    shutil.copytree(EXAMPLES / "worker", folder)
    shutil.copytree(exported[0], folder / "model")
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.goto(f"{site[1]}example/")
    page.get_by_text(exported[1], exact=True).wait_for()
    found = page.evaluate(
        """async () => {
          const {run} = await import("./client.js");
          const wrong = run("forward", {points: [[0, 0]]}).catch(({name, message}) => [name, message]);
          const {output} = await run("forward", {input: new Float32Array(8)});
          return [...await wrong, output.shape];
        }"""
    )
    assert found[0] == "InputError"
    assert "forward has no input points" in found[1]
    assert found[2] == [4, 1]


def test_vite(project, exported, site, context):
    built = bundle(project, "src/main.ts", '--define:import.meta.env={"BASE_URL":"/example-vite/"}')
    folder = site[0] / "example-vite"
    shutil.copytree(project / "public", folder)
    shutil.copytree(built.parents[1], folder, dirs_exist_ok=True)
    page_text = (project / "index.html").read_text()
    assert '"/src/main.ts"' in page_text
    (folder / "index.html").write_text(page_text.replace("/src/main.ts", "src/main.js"))
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.goto(f"{site[1]}example-vite/")
    page.get_by_text(exported[1], exact=True).wait_for()


def test_types_of_vite_and_react(project):
    files = [str(path.relative_to(project)) for path in (project / "src").iterdir()]
    options = {"module": "esnext", "moduleResolution": "bundler", "jsx": "react-jsx"}
    check_types(project, *files, noEmit=True, **options)
    bundle(project, "src/Circle.tsx", "--external:react", "--jsx=automatic")
