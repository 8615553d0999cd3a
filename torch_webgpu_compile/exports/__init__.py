"""`export`: Python functions, with all that they reach, are captured, compiled and written.

They become a bundle, which the folder `bundle` reads and runs without this one, and without torch.
"""
