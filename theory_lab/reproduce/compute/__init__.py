"""What the kinds compute: one module a kind, a thin adapter from settings to the toolkit's functions."""
