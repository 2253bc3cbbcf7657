"""AdamW over all weights at once, with their averages."""
