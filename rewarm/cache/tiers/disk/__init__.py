"""The disk tier: what the tree holds, kept across restarts."""
