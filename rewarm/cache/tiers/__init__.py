"""The tiers below memory."""
