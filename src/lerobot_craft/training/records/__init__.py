"""What a person sees of a run and what stays of it: lines, metrics.jsonl, lambda_history.csv, wandb, the summary."""
