"""The loop IR: frozen data from lowering to code generation."""
