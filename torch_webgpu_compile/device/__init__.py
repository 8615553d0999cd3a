"""``torch.device("webgpu")``: eager tensors on the GPU, in pure Python.

`autoload.register` is all that ``import torch`` runs. The first operation on the device imports
`eager.kernels`, which gives PyTorch the rest.

- `eager`: operators;
- `api`: ``torch.webgpu`` and autocast;
- `patches`: what has to be changed in PyTorch and in other libraries.

Memory, views, copies and random numbers are in the folder `tensors` beside this one: compiled
graphs need them too.
"""
