"""Compiled graphs as functions of torch tensors: what goes in and out around an executor."""
