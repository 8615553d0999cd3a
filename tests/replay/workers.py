"""Records many programs with one tree, in a few processes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import Empty, SimpleQueue

from tests.replay.recording import Recording
from tests.replay.sources import ROOT, ReplayError, Tree, file_name


def record(
    tree: Tree,
    names: Iterable[str],
    folder: Path,
    targets: str,
    processes: int,
    done: Callable[[str], None],
) -> None:
    """Records programs.

    Args:
        names: of the programs.
        folder: of the recordings.
        targets: as JSON.
        done: told of each program, from any thread.

    Raises:
        ReplayError: the package cannot be asked.
    """
    waiting: SimpleQueue[str] = SimpleQueue()
    for name in names:
        waiting.put(name)
    errors: list[Exception] = []

    def work() -> None:
        try:
            _work(tree, waiting, folder, targets, done)
        except Exception as error:
            errors.append(error)
            while not waiting.empty():  # the others stop too
                waiting.get()

    count = min(processes, waiting.qsize())
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _work(
    tree: Tree,
    waiting: SimpleQueue[str],
    folder: Path,
    targets: str,
    done: Callable[[str], None],
) -> None:
    """Gives programs to one process, and to another one when it ends."""
    name: str | None = ""
    while name is not None:
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = _start(tree, folder, targets, output)
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                if not process.stdout.readline():
                    raise ReplayError(_refusal(tree, _end_of(output)))
                while (name := _next(waiting)) is not None:
                    print(name, file=process.stdin, flush=True)
                    if not process.stdout.readline():
                        _record_end(process.wait(), folder / file_name(name), targets)
                        done(name)
                        break
                    done(name)
            finally:
                process.stdin.close()
                process.kill()
                process.wait()
                process.stdout.close()


def _next(waiting: SimpleQueue[str]) -> str | None:
    try:
        return waiting.get_nowait()
    except Empty:
        return None


def _start(tree: Tree, folder: Path, targets: str, output: object) -> subprocess.Popen[str]:
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, (tree.root, ROOT))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_WEBGPU_PROGRESS": "0",
    }
    command = [sys.executable, "-P", "-m", "tests.replay.recorder"]
    return subprocess.Popen(
        [*command, str(tree.asking), str(folder), targets],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=output,  # type: ignore[arg-type]
        text=True,
        cwd=ROOT,
        env={**os.environ, **settings},
    )


def _record_end(status: int, file: Path, targets: str) -> None:
    """What ends the process is a result, too."""
    recording = Recording()
    for target in json.loads(targets):
        recording.add(target, {"error": f"the process ended with status {status}"}, {})
    file.write_bytes(recording.dumps())


def _refusal(tree: Tree, output: str) -> str:
    whose = "its own" if tree.has_own else "this tree's"
    cause = (output.strip().splitlines() or ["it says nothing"])[-1]
    return (
        f"{tree.label}: its package cannot be asked by {whose} tests/replay/package.py ({cause}); "
        "compare with a commit that has that file, or whose package has what it imports"
    )


def _end_of(output: object) -> str:
    output.flush()  # type: ignore[attr-defined]
    output.seek(0)  # type: ignore[attr-defined]
    return str(output.read()[-4000:])  # type: ignore[attr-defined]
