"""Attention becomes ``webgpu::attention``, also where it is written out in plain operators."""
