"""What Rewarm makes faster where MLX is slow."""
