"""The report: one self-contained HTML page from results. It reads results only, and needs no script and no network.

Each section is a function from results to markup, or to nothing where its data is missing; `page` puts them in order.
"""
