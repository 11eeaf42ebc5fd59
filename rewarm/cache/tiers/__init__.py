"""What lies below memory."""
