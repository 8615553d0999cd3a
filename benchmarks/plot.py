"""A figure per suite: how far each goal is reached. Needs matplotlib: the extra ``benchmarks``.

python -m benchmarks.plot FILE…    SVG next to the JSON of the runs
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .goals import Verdict
from .report import RESULTS, verdicts
from .suites import SUITES

_REACHED, _MISSED, _UNKNOWN = "#2a7f62", "#c8553d", "#9aa0a6"
# A bar much longer than the others makes them unreadable: it is cut, and its label has the value.
_LONGEST = 2.5


def draw(results: dict[str, Any], folder: Path = RESULTS) -> list[Path]:
    """Writes ``<suite>.svg`` for every suite with a measurement. Raises ImportError without
    matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    bars: dict[str, list[tuple[str, Verdict]]] = {}
    for suite, case, verdict in verdicts(results):
        if verdict.share is not None:
            bars.setdefault(suite, []).append((case, verdict))
    machine = results["machine"]
    where = f"{machine.get('adapter')}, PyTorch {machine.get('torch')}, {results['date']}"
    drawn = []
    folder.mkdir(parents=True, exist_ok=True)
    for suite, found in bars.items():
        figure = Figure(figsize=(8.5, 1.3 + 0.36 * len(found)), layout="constrained")
        _draw_bars(figure.add_subplot(), found)
        figure.suptitle(SUITES[suite].title, x=0.01, ha="left", fontweight="bold")
        figure.text(0.99, 0.99, where, ha="right", va="top", fontsize=7, color="#5f6368")
        name = f"{suite}{'-small' if results['small'] else ''}.svg"
        # Without a date and with fixed ids, the same results give the same file; text stays text.
        with rc_context({"svg.hashsalt": suite, "svg.fonttype": "none"}):
            figure.savefig(folder / name, metadata={"Date": None})
        drawn.append(folder / name)
    return drawn


def _draw_bars(axes: Any, found: list[tuple[str, Verdict]]) -> None:
    colours = {True: _REACHED, False: _MISSED, None: _UNKNOWN}
    shares = [verdict.share or 0.0 for _, verdict in found]
    places = range(len(found))
    axes.barh(
        places,
        [min(share, _LONGEST) for share in shares],
        color=[colours[verdict.reached] for _, verdict in found],
        height=0.62,
    )
    axes.axvline(1.0, color="#202124", linewidth=1.2)
    axes.text(1.0, -0.75, "goal", ha="center", va="bottom", fontsize=8)
    for place, (_, verdict), share in zip(places, found, shares, strict=True):
        text = f"{verdict.measured}  ({verdict.goal})"
        text += f", {verdict.note}" if verdict.note else ""
        end = max(1.0, min(share, _LONGEST))  # not across the goal's line
        axes.text(end + 0.02, place, text, va="center", fontsize=8)
    axes.set_yticks(places, [case for case, _ in found], fontsize=9)
    axes.set_ylim(len(found) - 0.4, -0.8)
    # Room for the labels at the right of the longest bar.
    axes.set_xlim(0, max(1.0, *(min(share, _LONGEST) for share in shares)) + 1.1)
    axes.set_xlabel("measured / goal; the goal is reached at 1", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def main() -> None:
    """Draws the runs that the arguments name."""
    for name in sys.argv[1:]:
        path = Path(name)
        for drawn in draw(json.loads(path.read_text()), path.parent):
            print(drawn)


if __name__ == "__main__":
    main()
