"""Tensors of the device: what compiled graphs and eager operators both need of it.

- `storages`, `templates`, `factories`: their memory; `aliasing`: views of it;
- `copying`, `sparse`: to the device, from it, and within it; `deferred`: work put off;
- `devices`: the GPUs, and which of them is current; `generators`: their random numbers;
- `determinism`: PyTorch's switches for repeatable results.
"""
