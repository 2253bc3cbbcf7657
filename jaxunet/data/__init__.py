"""Data: sources of images -> rows in a fixed random order -> batches of uint8 images."""
