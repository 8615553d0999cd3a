"""The public API of the device: ``torch.webgpu``, and ``torch.autocast`` on the device."""
