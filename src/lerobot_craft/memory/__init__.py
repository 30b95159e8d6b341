"""Frames of the tasks that a policy can do, which travel with its checkpoint: format, choice, and where they come from.

A memory holds inputs and no answers: observations, instructions, executed actions. What a teacher makes of them is
computed when a fine-tuning starts, by the policy of that moment.
"""
