"""Records many programs with one tree, in a few processes at a time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from tests.replay.recording import Recording
from tests.replay.sources import ReplayError, Tree, file_name


def record(
    tree: Tree,
    names: Iterable[str],
    folder: Path,
    targets: str,
    processes: int,
    done: Callable[[str], None],
) -> list[str]:
    """Records programs.

    Args:
        names: of the programs.
        folder: of the recordings.
        targets: as JSON.
        done: told of each program, from any thread.

    Returns:
        The programs that ended their process, which is what their recordings say.

    Raises:
        ReplayError: the package cannot be asked.
    """
    waiting: SimpleQueue[str] = SimpleQueue()
    for name in names:
        waiting.put(name)
    ended: list[str] = []
    errors: list[Exception] = []

    def stop() -> None:
        while _next(waiting) is not None:
            pass

    def work() -> None:
        try:
            _work(tree, waiting, folder, targets, done, ended)
        except Exception as error:
            errors.append(error)
            stop()

    count = min(processes, waiting.qsize())
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        stop()  # after Ctrl-C, too
    if errors:
        raise errors[0]
    return ended


def _work(
    tree: Tree,
    waiting: SimpleQueue[str],
    folder: Path,
    targets: str,
    done: Callable[[str], None],
    ended: list[str],
) -> None:
    """Gives programs to one process, and to another one when it ends."""
    while not waiting.empty():
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = _start(tree, folder, targets, output)
            try:
                if not _answer(process):
                    raise ReplayError(_refusal(tree, _end_of(output)))
                while (name := _next(waiting)) is not None:
                    answer = _answer(process, name)
                    if not answer:
                        _record_end(process.wait(), folder / file_name(name), targets)
                        ended.append(name)
                    done(name)
                    if not answer:
                        break
            finally:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    with suppress(BrokenPipeError):
                        pipe.close()


def _answer(process: subprocess.Popen[str], name: str = "") -> str:
    """The next line of a process, which is given a name if there is one; "" from one that ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        if name:
            print(name, file=process.stdin, flush=True)
    return process.stdout.readline()


def _next(waiting: SimpleQueue[str]) -> str | None:
    try:
        return waiting.get_nowait()
    except Empty:
        return None


def _start(tree: Tree, folder: Path, targets: str, output: IO[str]) -> subprocess.Popen[str]:
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, (tree.root, tree.programs))),
        # Some of PyTorch's operator samples come in the order of a set.
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_WEBGPU_CACHE": "0",
        "TORCH_WEBGPU_PROGRESS": "0",
    }
    command = [sys.executable, "-P", "-m", "tests.replay.recorder"]
    return subprocess.Popen(
        [*command, str(tree.asking), str(folder), targets],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=output,
        text=True,
        cwd=tree.programs,
        env={**os.environ, **settings},
        start_new_session=True,  # Ctrl-C is for this process: what is being recorded is finished
    )


def _record_end(status: int, file: Path, targets: str) -> None:
    """What ends the process is a result, too."""
    recording = Recording()
    for target in json.loads(targets):
        recording.add(target, {"error": f"the process ended with status {status}"}, {})
    file.write_bytes(recording.dumps())


def _refusal(tree: Tree, output: str) -> str:
    whose = "its own" if tree.has_own else "this tree's"
    # The first of errors that led to each other.
    cause = (re.findall(r"^[\w.]*Error\b.*", output, re.M) or ["it ends without an error"])[0]
    return (
        f"{tree.label}: its package cannot be asked by {whose} tests/replay/package.py ({cause}); "
        "compare with a commit that has that file, or whose package has what it imports"
    )


def _end_of(output: IO[str]) -> str:
    output.flush()
    output.seek(0)
    return output.read()
