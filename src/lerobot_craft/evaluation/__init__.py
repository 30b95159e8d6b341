"""Evaluation: success rates, what is left of the old tasks, intervals around all of it, and `results.json`.

`results` is the file's schema, `summary` turns runs into the table, `intervals` says how sure each number is,
`continual` scores sequences of tasks, `comparison` asks which of two methods is better, `correlation` which drift
foretells a loss, and `table` writes it all as Markdown.
"""
