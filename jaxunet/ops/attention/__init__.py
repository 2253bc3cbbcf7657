"""Multi-head attention on packed qkv."""
