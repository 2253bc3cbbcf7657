"""The loggers that `train.loggers` chooses: csv, tensorboard, wandb, mlflow and others."""
