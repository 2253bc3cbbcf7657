"""The UNet and its cost."""
