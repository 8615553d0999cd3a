"""``torch.device("webgpu")``: eager tensors on the GPU, in pure Python.

`autoload.register` is all that ``import torch`` runs. The first operation on the device imports
`kernels`, which gives PyTorch the rest.
"""
