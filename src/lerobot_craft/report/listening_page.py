"""The page of `craft listen`: which instructions still do their own thing."""

from lerobot_craft.evaluation.intervals import CONFIDENCE
from lerobot_craft.evaluation.listening import Listening
from lerobot_craft.evaluation.results import Estimate
from lerobot_craft.evaluation.table import number
from lerobot_craft.report.heatmap import colour, grid
from lerobot_craft.report.layout import page, stamp
from lerobot_craft.report.markup import Markup, element, fragment
from lerobot_craft.report.tables import table


def render_listening(found: Listening) -> str:
    """One HTML page."""
    sections = (
        ("Does it still listen?", listening_grid(found)),
        ("How far instructions are told apart", apart_table(found)),
        ("Command", element("pre", element("code", found.command))),
    )
    return page("Does the policy still listen?", [stamp([found])], sections)


def listening_grid(found: Listening) -> Markup:
    """What is left of the difference between every two instructions: blue is kept, orange is gone."""
    caption = (
        f"What is left of the difference between two instructions: 1 is all of it, 0 is the same movement "
        f"under both, a dash cannot be told apart. {found.frames} frames of {found.episodes} episodes of "
        f"{found.dataset}, each under every instruction; below each share its {CONFIDENCE:.0%} interval over episodes"
    )
    head = [element("th", name, *_mark(found, name), scope="col") for name in found.instructions]
    rows = [
        element("tr", element("th", name, *_mark(found, name), scope="row"), [_cell(gone) for gone in row])
        for name, row in zip(found.instructions, found.gone, strict=True)
    ]
    drawn = grid(caption, [element("th", "told", scope="col"), *head], rows)
    return fragment([element("p", sentence, class_="headline") for sentence in found.sentences()], drawn)


def apart_table(found: Listening) -> Markup:
    """The differences themselves: had each instruction been kept, and as they are."""
    rows = []
    for i, name in enumerate(found.instructions):
        for j in range(len(found.instructions)):
            if i == j or name in found.learned:
                continue
            kept, now = found.apart_if_kept[i][j], found.apart_now[i][j]
            rows.append([name, found.instructions[j], number(kept), number(now)])
    caption = (
        "root mean square over frames, steps and dimensions, in standard deviations of the actions that the policy "
        f"before was trained on; under other noise it varies by {number(max(found.variation))} at most"
    )
    return table(["told", "or told", "had it been kept", "now"], rows, caption)


def _mark(found: Listening, name: str) -> list[Markup]:
    return [element("small", "learned")] if name in found.learned else []


def _cell(gone: Estimate | None) -> Markup:
    if gone is None:
        return element("td", "-")
    left = 1 - gone.value
    below = []
    if gone.low is not None and gone.high is not None:
        below = [element("small", f"{number(1 - gone.high)} to {number(1 - gone.low)}")]
    return element("td", number(left), below, style=f"background:{colour(min(max(left, 0.0), 1.0))}")
