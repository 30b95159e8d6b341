"""The report: one self-contained HTML page from the files that runs wrote. It needs no script, no network and no torch.

`inputs` reads, `tables`, `figures`, `trainings` and `prose` make sections (None if their data is missing), and `page`
orders them. What a section looks like is in `templates/`.
"""
