"""The vocabulary of the UNet: what every kernel backend implements."""
