"""A chat becomes tokens and boundaries."""
