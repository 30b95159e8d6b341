"""`craft train --estimate`: how much memory a run will need, found by taking one step without any memory.

The policy is made with parameters that have shapes and types but no memory, and one real step is taken with it:
lerobot's own forward, the anchors' own drift, both gradients, the optimizer. A ledger sees every tensor come and go,
and knows at the end what was alive when there was most of it.
"""
