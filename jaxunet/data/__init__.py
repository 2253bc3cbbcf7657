"""Data: sources (folder, archive, .npz, .bin, digits, CIFAR-10) -> rows in a fixed random order -> batches of uint8 images."""
