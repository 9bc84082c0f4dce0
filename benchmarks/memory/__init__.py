"""What a step holds on each device."""
