"""Steps as the profilers see them."""
