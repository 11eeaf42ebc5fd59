"""Generate: a chat or a text goes in, events of its answer come out."""
