"""The ops of the UNet, which every kernel backend implements."""
