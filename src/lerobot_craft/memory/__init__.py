"""Frames of a policy's old tasks that travel with its checkpoint: format, choice of frames, and sources.

A memory holds inputs only: observations, instructions, executed actions. Each fine-tuning computes teacher values anew.
"""
