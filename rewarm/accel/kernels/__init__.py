"""CUDA sources, which MLX compiles when they are first used."""
