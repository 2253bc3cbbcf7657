"""Samplers and the programs that draw images with them."""
