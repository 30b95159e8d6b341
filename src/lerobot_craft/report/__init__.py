"""The report: one self-contained HTML page from what runs wrote down. It needs no script, no network and no torch.

Each section is a function from what was read to markup, or to nothing where its data is missing; `page` orders them.
"""
