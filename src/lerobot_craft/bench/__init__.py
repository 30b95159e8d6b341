"""The bench: what fine-tuning costs old skills in a real simulator, method against method."""
