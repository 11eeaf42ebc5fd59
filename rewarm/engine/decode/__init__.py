"""Decoding: one step of a batch."""
