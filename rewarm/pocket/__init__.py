"""The built-in model: very small and trained. Its right answers depend on the exact prompt."""

from pathlib import Path

BUILT_IN = "pocket"
FOLDER = Path(__file__).parent / "model"
"""Its weights, tokenizer and chat template, in mlx-lm's format."""

TABLE = """\
You work at the harbour. Answer in a few words.
harbour master: Ingrid Falk
island ferry: 14:20
door code: 4417
fuel price: 235
fish market: closed
north pier: two red lamps
lighthouse: Tomas Berg
spare key: green drawer"""
"""A system prompt to try it with."""

ASK = """\
Pocket is very small. It knows the lines of its system prompt, what you tell it,
and sums:
  Who is the harbour master?   What is the door code?   Where is the spare key?
  My berth is 27.              ... and later: What is my berth?
  What is 348 + 275?           What is 512 - 77?
  Who are you?                 What can you do?
A table of your own, with a "name: value" in each line: /system @FILE"""
"""Questions that it can answer with that table."""
