"""Decode: take steps for batches of sequences."""
