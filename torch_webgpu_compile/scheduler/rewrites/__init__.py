"""Passes that change what a graph computes its results by: loop graphs to loop graphs."""
