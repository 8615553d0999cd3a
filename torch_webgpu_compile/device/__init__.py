"""``torch.device("webgpu")``: eager tensors on the GPU, in pure Python.

`autoload.register` is all that ``import torch`` runs. The first operation on the device imports
`eager.kernels`, which gives PyTorch the rest.

- `devices`: the GPUs, which of them is current; `generators`: their random numbers;
- `tensors`: the memory of tensors, views and copies;
- `eager`: operators;
- `api`: ``torch.webgpu`` and autocast;
- `patches`: what has to be changed in PyTorch and in other libraries.
"""
