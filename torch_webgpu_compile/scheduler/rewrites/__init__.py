"""Passes that change how a graph computes its results: loop graphs to loop graphs."""
