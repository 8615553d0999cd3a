"""Loop graphs to kernel groups: legality first, then profit. `compiler.PASSES` has the order."""
