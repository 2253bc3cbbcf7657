"""The diffusion process, and how timesteps are drawn and losses weighted."""
