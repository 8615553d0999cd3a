"""One call of an ATen operator becomes a captured graph."""
