"""The bench: what fine-tuning costs old skills in a real simulator, compared across methods."""
