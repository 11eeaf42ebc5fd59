"""Text in, events out."""
