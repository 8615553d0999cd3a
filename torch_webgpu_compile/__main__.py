"""``python -m torch_webgpu_compile doctor``, and ``cache``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m torch_webgpu_compile")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("doctor", help="list GPUs and check that compiled models work")
    command.add_argument(
        "--measure",
        action="store_true",
        help="measure how fast the GPU is; kernels are chosen by it where there is a cache folder",
    )
    command.add_argument(
        "--save-target",
        metavar="FILE",
        help="describe the GPU in a file, with which other machines compile for it",
    )
    command = commands.add_parser("cache", help="show what is in the folder of compiled plans")
    command.add_argument("--clear", action="store_true", help="remove the compiled plans")
    found = parser.parse_args(arguments)
    if found.command == "cache":
        from .inspection.cache_report import cache

        return cache(clear=found.clear)
    from .inspection.doctor import doctor

    return doctor(measure=found.measure, save_target=found.save_target)


if __name__ == "__main__":
    sys.exit(main())
