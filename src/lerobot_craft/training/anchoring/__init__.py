"""Anchors in training: where they come from, what must hold before the first step, and the drift of the actions."""
