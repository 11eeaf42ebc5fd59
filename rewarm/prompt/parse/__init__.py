"""Tokens become thinking, text and tool calls."""
