"""Changes to PyTorch and to other libraries, each in a file of its own.

PyTorch has no place where a device in Python could say what these change. The docstring of each
file has three paragraphs that begin with ``Patched:``, what is replaced; ``Why:``, what happens
without it; and ``Until:``, the condition under which the file can go. Each has functions that go
`around` others, or an ``install``.
"""
