"""The 3×3 convolution, plain and fused with GroupNorm and SiLU."""
