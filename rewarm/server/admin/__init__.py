"""Endpoints about the server itself, and the page."""
