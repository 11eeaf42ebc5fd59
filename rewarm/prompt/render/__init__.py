"""From a chat to tokens and boundaries."""
