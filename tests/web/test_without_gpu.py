"""The runtime without a GPU: its own tests, which node runs, and its package for npm."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from web.build import WEB, build_runtime, has_npm, npm_environment


def test_in_node():
    if not has_npm():
        pytest.skip("there is no npm to build the runtime with")
    build_runtime()  # installs what the tests bundle the modules with
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


def test_the_package_is_installed_from_its_archive(tmp_path: Path) -> None:
    """`npm pack` has the module and its types, and what needs both finds them."""
    if not has_npm():
        pytest.skip("there is no npm to build the runtime with")
    build_runtime()
    (packed,) = json.loads(run("npm", "pack", "--json", f"--pack-destination={tmp_path}"))
    names = {file["path"] for file in packed["files"]}
    assert {
        "package.json",
        "README.md",
        "dist/torch-webgpu.js",
        "dist/torch-webgpu-composed.js",
        "dist/index.d.ts",
    } <= names
    assert all(name.startswith("dist/") for name in names - {"package.json", "README.md"})
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
    typescript = WEB / "node_modules" / "typescript" / "bin" / "tsc"
    options = {
        "strict": True,
        "target": "es2022",
        "module": "nodenext",
        "typeRoots": [str(WEB / "node_modules" / "@webgpu")],
        "types": ["types"],
    }
    (tmp_path / "tsconfig.json").write_text(json.dumps({"compilerOptions": options}))
    run("node", str(typescript), "-p", str(tmp_path))
    assert run("node", "program.js", folder=tmp_path) == "function true\n"
