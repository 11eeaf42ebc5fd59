"""Chat to tokens and boundaries; generated tokens to messages."""
