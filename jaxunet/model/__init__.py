"""The UNet and what it costs."""
