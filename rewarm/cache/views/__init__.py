"""Reads of the tree that never change it."""
