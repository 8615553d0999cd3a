"""Complex numbers as pairs of real tensors: a pass over captured graphs, and its rules."""
