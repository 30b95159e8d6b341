"""lerobot's policies with a loss that is a mean over samples, for `--policy.discover_packages_path`.

lerobot's own losses divide by what a batch holds (actions that are not padding, tokens), and draw noise in the order of
the batch. Both depend on how samples are spread over processes, with or without CRaFT.
"""
