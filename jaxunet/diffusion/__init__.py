"""The diffusion process, the sampling of training timesteps and the weighting of losses."""
