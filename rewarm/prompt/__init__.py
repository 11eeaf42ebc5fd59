"""A chat becomes tokens and boundaries, and generated tokens become messages."""
