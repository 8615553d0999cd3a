"""Runs plans on a GPU. The only package that knows a WebGPU provider.

    device = device.open_device()
    executor = executor.Executor(plan, device)

``adapters`` lists GPUs; ``device`` opens one and holds its ``queue`` (the order of all commands),
``buffers`` (memory), ``transfer`` (copies) and ``pipelines`` (compiled kernels); ``executor`` runs
plans: ``sized`` evaluates their sizes, ``program`` binds their memory; ``profiler`` times them.
``native`` is a device of any library that speaks ``webgpu.h``, in terms of ``interface``;
``wgpu_native`` and ``dawn`` are what differs between these libraries, see ``library``.
"""
