"""What ``torch.webgpu`` shows, and ``torch.autocast`` on the device."""
