"""Anchors: which frames and instructions preserve old behavior, the teacher's values on them, and the cache on disk.

A finished cache is a directory with `manifest.json`, `manifest.sha256` and `shard-*.safetensors`. Nothing is unpickled.
"""
