"""Ways to keep old skills while learning a new one: one file each, all in the same loop."""
