"""The bench: a command for every figure in the documentation."""
