"""The built-in model: very small, trained, and right only where the prompt was really read."""

from pathlib import Path

FOLDER = Path(__file__).parent / "model"
"""Its weights, tokenizer and chat template, in mlx-lm's format."""
