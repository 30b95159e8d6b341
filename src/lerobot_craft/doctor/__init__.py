"""What `craft doctor` knows: small checks, each a function from the surroundings to a `Check`.

`examine` runs them all. Whatever could take the process down with it (a GL back-end, a shared library that does
not fit torch) is tried in a child process, so that a broken machine is reported instead of crashing the report.
"""

from lerobot_craft.doctor.check import Check, Status, is_ready
from lerobot_craft.doctor.examination import examine
from lerobot_craft.doctor.report import as_json, as_lines, verdict, wants_colour
from lerobot_craft.doctor.surroundings import Surroundings

__all__ = [
    "Check",
    "Status",
    "Surroundings",
    "as_json",
    "as_lines",
    "examine",
    "is_ready",
    "verdict",
    "wants_colour",
]
