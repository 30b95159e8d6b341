"""Files that are complete or absent, strict JSON, and numbers as people read them."""
