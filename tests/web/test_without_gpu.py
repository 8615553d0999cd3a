"""The runtime without a GPU: its own tests, which node runs, and its package for npm."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_webgpu_compile
from torch_webgpu_compile import export
from web.build import WEB, build_runtime, has_npm, npm_environment

PACKAGED = Path(torch_webgpu_compile.__file__).parent / "exports" / "runtime"


@pytest.fixture
def runtime() -> Path:
    """The folder with the built runtime; what builds and bundles it is installed then."""
    if not has_npm():
        pytest.skip("there is no npm to build the runtime with")
    return build_runtime().parent


@pytest.mark.usefixtures("runtime")
def test_in_node():
    tests = sorted(str(path) for path in (WEB / "tests").glob("*.test.mjs"))
    assert tests
    run("node", "--test", *tests)


def run(*command: str, folder: Path = WEB) -> str:
    """What a command prints that succeeds."""
    ran = subprocess.run(
        command,
        cwd=folder,
        env=npm_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_python_package_has_this_runtime(runtime: Path) -> None:
    """What `export` writes beside bundles is what the sources in `web/src` make."""
    built = {path.name: path.read_bytes() for path in runtime.glob("torch-webgpu*")}
    packaged = {path.name: path.read_bytes() for path in PACKAGED.iterdir()}
    assert set(built) == set(packaged)
    differ = {name for name in built if built[name] != packaged[name]}
    assert not differ, "`npm run build` in web/ writes them; commit what it makes"


def check_types(folder: Path, *files: str, **options: object) -> None:
    """Fails where TypeScript finds an error in files of a folder, or emits them."""
    chosen = {
        "strict": True,
        "target": "es2022",
        "module": "nodenext",
        "noUncheckedIndexedAccess": True,
        "typeRoots": [str(WEB / "node_modules" / "@webgpu")],
        "types": ["types"],
        **options,
    }
    config = {"compilerOptions": chosen, "files": files}
    (folder / "tsconfig.json").write_text(json.dumps(config))
    run("node", str(WEB / "node_modules" / "typescript" / "bin" / "tsc"), "-p", str(folder))


# Of each marked line TypeScript has to say that it is wrong.
TYPED = """
import {load, type Model, type Tensor} from "./two/torch-webgpu.js";
import {type Report, report} from "./two/torch-webgpu-report.js";
import type {Bundle} from "./two/bundle.js";

export async function use(): Promise<void> {
  const model = await load<Bundle>("two/");
  const {mean, "pair.0": first, "pair.1": count} = await model.run("step", {x: [[1, 2, 3]], n: 2});
  const elements: Float32Array = await mean.read();
  const counts: BigInt64Array = await count.read({keep: true});
  await model.run("step", {x: first, n: count}, {signal: AbortSignal.timeout(elements.length + counts.length)});
  const {output} = await model.run("bare");
  const weight: Float32Array = await model.readState("weight");
  model.writeState("weight", weight);
  const any: Model = model;
  const found: Record<string, Tensor> = await any.run("step", {x: output});
  const {kernels, gpuMemory}: Report = await report(model, "step", {x: [[1, 2, 3]], n: 2}, {calls: 3});
  console.log(kernels, gpuMemory, (await report(any)).timing);
  // @ts-expect-error: no entry
  await report(model, "stop");
  // @ts-expect-error: no entry
  await model.run("stop");
  // @ts-expect-error: an input is missing
  await model.run("step", {x: [[1, 2, 3]]});
  // @ts-expect-error: all of them are
  await model.run("step");
  // @ts-expect-error: no input
  await model.run("step", {x: [[1, 2, 3]], n: 2, m: 1});
  // @ts-expect-error: another dtype
  await model.run("step", {x: count, n: 2});
  // @ts-expect-error: no result
  console.log(found, (await model.run("bare")).mean);
  // @ts-expect-error: other elements
  const wrong: Float32Array = await count.read();
  // @ts-expect-error: no state
  model.writeState("bias", wrong);
}
"""


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("options", [{}, {"types": [], "skipLibCheck": True}], ids=str)
def test_a_bundle_has_types(options: dict[str, object], tmp_path: Path) -> None:
    """With the types of WebGPU, and without them in a project that does not check libraries."""
    linear = nn.Linear(3, 4, bias=False)

    def step(x, n):
        return {"mean": linear(x).mean(), "pair": [x * 2, n + 1]}

    entries = {
        "step": (step, (torch.zeros(5, 3), torch.tensor(2))),
        "bare": (lambda: linear.weight,),
    }
    export(entries, tmp_path / "two")
    (tmp_path / "program.ts").write_text(TYPED)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    check_types(tmp_path, "program.ts", noEmit=True, **options)


PROGRAM = """
import {load, DeviceLostError, type Model} from "torch-webgpu";

export async function use(url: string, signal: AbortSignal): Promise<Float32Array | undefined> {
  const model: Model = await load(url, {signal, progress: ({loadedBytes}) => console.log(loadedBytes)});
  try {
    const {logits} = await model.run("forward", {ids: [[1, 2, 3]]});
    return (await logits!.read()) as Float32Array;
  } catch (error) {
    if (!(error instanceof DeviceLostError)) throw error;
    await model.restore();
    return undefined;
  }
}
console.log(typeof load, new DeviceLostError("gone") instanceof Error);
"""


@pytest.mark.usefixtures("runtime")
def test_the_package_is_installed_from_its_archive(tmp_path: Path) -> None:
    """`npm pack` has the modules and their types, and what needs both finds them."""
    (packed,) = json.loads(run("npm", "pack", "--json", f"--pack-destination={tmp_path}"))
    assert {file["path"] for file in packed["files"]} == {
        "LICENSE",
        "README.md",
        "dist/torch-webgpu-audio.LICENSES.txt",
        "dist/torch-webgpu-audio.d.ts",
        "dist/torch-webgpu-audio.js",
        "dist/torch-webgpu-composed.js",
        "dist/torch-webgpu-image.d.ts",
        "dist/torch-webgpu-image.js",
        "dist/torch-webgpu-report.d.ts",
        "dist/torch-webgpu-report.js",
        "dist/torch-webgpu-text.LICENSES.txt",
        "dist/torch-webgpu-text.d.ts",
        "dist/torch-webgpu-text.js",
        "dist/torch-webgpu.d.ts",
        "dist/torch-webgpu.js",
        "package.json",
    }
    about = json.loads((WEB / "package.json").read_text())
    for named in (about["main"], about["types"], about["unpkg"], about["jsdelivr"]):
        assert (WEB / named).exists()
    address = f"torch-webgpu@{about['version']}/{about['jsdelivr'].removeprefix('./')}"
    assert address in (WEB / "README.md").read_text()
    project = json.loads((WEB / "examples" / "vite" / "package.json").read_text())
    assert project["dependencies"]["torch-webgpu"] == f"^{about['version']}"
    assert (WEB / "LICENSE").read_text() == (WEB.parent / "LICENSE").read_text()
    (tmp_path / "package.json").write_text('{"type": "module", "private": true}')
    (tmp_path / "program.ts").write_text(PROGRAM)
    run(
        "npm",
        "install",
        "--offline",
        "--no-audit",
        "--no-fund",
        packed["filename"],
        folder=tmp_path,
    )
    check_types(tmp_path, "program.ts")
    assert run("node", "program.js", folder=tmp_path) == "function true\n"
    bundled = bundle(tmp_path, "program.js")
    assert run("node", str(bundled), folder=tmp_path) == "function true\n"
    assert list(bundled.parent.glob("torch-webgpu-composed-*.js"))


def bundle(folder: Path, entry: str, *options: str) -> Path:
    """What a bundler, here esbuild, makes of a module, as Vite does: with a file for each `import()`."""
    esbuild = WEB / "node_modules" / "esbuild" / "bin" / "esbuild"
    made = folder / "built"
    command = [
        "--bundle",
        "--splitting",
        "--format=esm",
        "--outbase=.",
        f"--outdir={made}",
        *options,
    ]
    run(str(esbuild), entry, *command, folder=folder)
    return (made / entry).with_suffix(".js")
