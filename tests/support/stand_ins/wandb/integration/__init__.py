"""A stand-in for `wandb.integration`."""
