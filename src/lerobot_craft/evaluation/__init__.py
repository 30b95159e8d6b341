"""Evaluation: success rates, what is left of the old tasks, intervals around all of it, and `results.json`.

For a bench: `results` is the file, `summary` makes the table from its runs, `intervals` how sure each number is,
`continual` the scores of sequences, `comparison` which of two methods is better, `correlation` which drift foretells a
loss, `table` all of it as Markdown. For `craft eval`: `evaluate` plays, `matrix` is the file and its tables. For
`craft listen`: `acting` runs the policies, `listening` compares what they did.
"""
