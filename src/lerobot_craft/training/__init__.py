"""`craft train`: lerobot's own training, composed from its parts, with a constraint on what the teacher could do."""
