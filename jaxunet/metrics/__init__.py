"""Measures sample quality: FID, KID, precision and recall, Inception Score, and their networks."""
