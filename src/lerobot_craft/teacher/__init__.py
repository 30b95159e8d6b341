"""The teacher: the policy before fine-tuning, loaded, checked against its file and fingerprinted."""
