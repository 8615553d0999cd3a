"""GB/s of uploads and downloads, next to a plain memcpy and, where there is CUDA, to PyTorch's
copies from and to pageable memory.

python benchmarks/transfer.py
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

import torch

from torch_webgpu_compile.runtime.device import open_device

SIZES = [4 << 10, 64 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]


def gigabytes_per_second(nbytes: int, call: Callable[[], object]) -> float:
    """From the median of calls, after two that are not counted."""
    times = []
    for repeat in range(9):
        start = time.perf_counter()
        call()
        if repeat >= 2:
            times.append(time.perf_counter() - start)
    return nbytes / statistics.median(times) / 1e9


def main() -> None:
    """Prints a line per size."""
    device = open_device()
    print(device, f"torch CUDA: {torch.cuda.is_available()}")
    print("upload: until the GPU has it. new: download into memory that was never touched.")
    for nbytes in SIZES:
        gpu = device.allocate(nbytes)
        host = torch.ones(nbytes, dtype=torch.uint8)
        other = torch.ones(nbytes, dtype=torch.uint8)

        def upload() -> None:
            device.upload(gpu, (host.data_ptr(), nbytes))  # noqa: B023
            device.queue.submit([], "upload")
            device.synchronize()

        def download() -> None:
            device.download_many([(gpu, 0, nbytes, other.data_ptr())])  # noqa: B023

        def download_new() -> None:
            fresh = torch.empty(nbytes, dtype=torch.uint8)  # noqa: B023
            device.download_many([(gpu, 0, nbytes, fresh.data_ptr())])  # noqa: B023

        def memcpy() -> None:
            ctypes.memmove(other.data_ptr(), host.data_ptr(), nbytes)  # noqa: B023

        calls = {"upload": upload, "download": download, "new": download_new, "memcpy": memcpy}
        if torch.cuda.is_available():
            cuda = host.cuda()

            def to_cuda() -> None:
                cuda.copy_(host)  # noqa: B023
                torch.cuda.synchronize()

            calls["to CUDA"] = to_cuda
            calls["from CUDA"] = lambda: other.copy_(cuda)  # noqa: B023
            calls["from CUDA, new"] = lambda: cuda.cpu()  # noqa: B023
        figures = [
            f"{name} {gigabytes_per_second(nbytes, call):6.2f}" for name, call in calls.items()
        ]
        print(f"{nbytes >> 10:>7} KiB: {'  '.join(figures)}")


if __name__ == "__main__":
    main()
