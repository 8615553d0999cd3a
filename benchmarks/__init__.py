"""Measures this package, PyTorch's own backends and peers on the same machine in one run.

    python -m benchmarks --suite rows           a suite: its cases, the systems that its goals name
    python -m benchmarks --suite rows,products  several; a case that both name is measured once
    python -m benchmarks --suite models gpt2    one case of a suite
    python -m benchmarks gpt2 softmax           cases with every detail, each in a fresh process
    python -m benchmarks --list                 suites, cases and goals
      --small                                   sizes for a CPU or a software adapter
      --systems webgpu,autotuned                other systems than the usual ones
      --plot                                    a figure per suite (`benchmarks.plot`)
      --stop-after 500                          begins no case that would end later
      --resume                                  what the file of results lacks: goes on with a run
    python -m benchmarks.report FILE…           the table of docs/performance.md, from JSON of runs
    python -m benchmarks.tilings gpt2 bert      tilings of products, measured inside their models
    python -m benchmarks.eager                  eager calls and models beside eager CUDA
    python -m benchmarks.generate               tokens per second of a language model
    python -m benchmarks.regional_compilation   compiling a block of 24, and all of them
    python -m benchmarks.kernel_counts          pipelines and bytes of WGSL of models, without a GPU

``cases``, ``kernel_cases`` and ``convolution_cases`` say what is measured, ``suites`` what it must
reach, and ``goals`` whether it does. ``webgpu``, ``pytorch``, ``onnxruntime_webgpu`` and
``tinygrad_webgpu`` measure one system each, ``eager_worker`` the calls of ``eager_cases``, in fresh
and in used processes, ``compile_worker`` the first calls of ``compile_cases``, and
``regional_compilation`` those of repeated blocks; ``limits`` measures what the machine can do at
best. ``runner`` gives cases to a ``worker``: a process that imports everything once, and is
replaced when it crashes, hangs or loses its GPU. ``report`` prints and writes the results.

Times are of a steady stream of calls, and of the GPU alone: by timestamps here, by replays of a
CUDA graph there. f32 is f32: no TF32. Inputs and outputs stay on the GPU.
"""

import os

# First calls compile: what other programs of this user have compiled is not read.
os.environ.setdefault("TORCH_WEBGPU_CACHE", "0")
