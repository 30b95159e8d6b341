"""The output directory: one run at a time, checkpoints whole or not at all."""
