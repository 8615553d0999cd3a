"""Measures this package, PyTorch's own backends and peers on the same machine in one run.

    python -m benchmarks                    every case, all systems that are installed
    python -m benchmarks gpt2 softmax       some cases
    python -m benchmarks --small            sizes for a CPU or a software adapter
    python -m benchmarks --list

``cases`` says what is measured; ``webgpu``, ``pytorch`` and ``onnxruntime_webgpu`` measure one
system each; ``limits`` measures what the machine can do at best; ``runner`` gives every case a
process of its own; ``report`` prints and writes the results.
"""
