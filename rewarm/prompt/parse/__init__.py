"""From tokens to reasoning, text and tool calls."""
