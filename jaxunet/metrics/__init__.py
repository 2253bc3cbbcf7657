"""How good samples are: feature networks, Fréchet distance, kernel distance, precision and recall, Inception Score."""
