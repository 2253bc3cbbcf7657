"""Samplers, and the compiled program that draws images with them."""
