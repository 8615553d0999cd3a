"""Whether models learn on the device as they do on the CPU: `tasks`, `curves`."""
