"""The bench: every claim is a command."""
