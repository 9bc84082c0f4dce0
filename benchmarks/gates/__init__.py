"""What may not cost more than what."""
