"""Frames of a policy's old tasks that travel with its checkpoint: format, choice of frames, and sources.

A memory holds inputs only: observations, instructions, executed actions. Teacher values are computed when a fine-tuning
starts, by the policy of that moment.
"""
