"""How long compilation takes."""
