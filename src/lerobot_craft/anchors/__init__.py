"""Anchors: which frames and instructions keep the old behaviour, what the teacher did with them, and the cache on disk.

A finished cache is a directory of `manifest.json`, `manifest.sha256` and `shard-*.safetensors`. `store.AnchorStore`
opens one, `shards.write_shard` and `manifest.Manifest.save` make one; nothing here is ever unpickled.
"""
