"""Report of the chaos suite: counts per phase and process, and recovery times."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import numpy as np

from pipeline.runtime.text import Table
from tests.chaos.faults import ACTIONS, PHASES
from tests.chaos.run import Outcome, Round


def outcomes(rounds: Sequence[Round]) -> list[Outcome]:
    """Returns the injected faults of all rounds."""
    return [outcome for finished in rounds for outcome in finished.outcomes]


def problems(rounds: Sequence[Round]) -> list[str]:
    """Returns a sentence about each check that failed."""
    found = []
    for finished in rounds:
        sentences = [f"lost {i}" for i in finished.lost]
        sentences += [f"duplicated {i}" for i in finished.duplicated]
        sentences += finished.problems
        sentences += [f"{o.fault}: {p}" for o in finished.outcomes for p in o.problems]
        found += [f"{finished.job}: {sentence}" for sentence in sentences]
    return found


def cells(rounds: Sequence[Round]) -> Table:
    """Returns the table of faults: one row per phase, one column per process or resource."""
    found = outcomes(rounds)
    counts = Counter((o.fault.phase, o.fault.target) for o in found)
    targets = [target for target in ACTIONS if any(t == target for _, t in counts)]
    header = ["phase", *targets, "faults", "recovery p50", "p95", "max"]
    rows = Table([header])
    for phase in [*PHASES, "all"]:
        chosen = [o for o in found if phase in (o.fault.phase, "all")]
        if not chosen:
            continue
        numbers = [sum(o.fault.target == target for o in chosen) for target in targets]
        seconds = [o.seconds for o in chosen]
        times = (float(np.quantile(seconds, q)) for q in (0.5, 0.95, 1.0))
        row = [phase, *map(str, numbers), str(len(chosen))]
        rows.append([*row, *(f"{time:.1f} s" for time in times)])
    return rows


def action_cells(rounds: Sequence[Round]) -> Table:
    """Returns the table of recovery times by process and action."""
    found = outcomes(rounds)
    rows = Table([["process", "action", "faults", "recovery p50", "p95", "runs that ended"]])
    for target, actions in ACTIONS.items():
        for action in actions:
            chosen = [o for o in found if (o.fault.target, o.fault.action) == (target, action)]
            if chosen:
                times = (np.quantile([o.seconds for o in chosen], q) for q in (0.5, 0.95))
                ended = sum(code != 0 for o in chosen for code in o.exits)
                row = [target, action, str(len(chosen)), *(f"{time:.1f} s" for time in times)]
                rows.append([*row, str(ended)])
    return rows


def text(rounds: Sequence[Round]) -> str:
    """Formats the report as plain text."""
    lost, duplicated = (
        sum(len(getattr(finished, name)) for finished in rounds) for name in ("lost", "duplicated")
    )
    found = problems(rounds)
    lines = [
        cells(rounds).text(),
        "",
        action_cells(rounds).text(),
        "",
        f"{len(outcomes(rounds))} faults in {len(rounds)} rounds: {lost} items lost,"
        f" {duplicated} duplicated, {len(found)} checks failed",
    ]
    return "\n".join([*lines, *found])


def to_json(rounds: Sequence[Round]) -> str:
    """Returns the report with all faults as JSON."""
    values = {
        "faults": len(outcomes(rounds)),
        "lost": sum(len(finished.lost) for finished in rounds),
        "duplicated": sum(len(finished.duplicated) for finished in rounds),
        "problems": problems(rounds),
        "table": cells(rounds),
        "actions": action_cells(rounds),
        "rounds": [finished.to_dict() for finished in rounds],
    }
    return json.dumps(values, indent=1)


def figure(rounds: Sequence[Round]) -> bytes:
    """Draws the recovery times by process, one point per fault, as PNG."""
    from matplotlib.figure import Figure

    from pipeline.eval.report.plot import COLORS, REFERENCE, apply_style, legend_below, to_png

    found = outcomes(rounds)
    targets = [target for target in ACTIONS if any(o.fault.target == target for o in found)]
    drawing = Figure(figsize=(7, 3.6), layout="constrained")
    panel = drawing.subplots()
    for number, phase in enumerate(PHASES):
        chosen = [o for o in found if o.fault.phase == phase]
        offset = (number - len(PHASES) / 2) / (1.6 * len(PHASES))
        places = [targets.index(o.fault.target) + offset for o in chosen]
        color = COLORS[number % len(COLORS)] if number < len(COLORS) else REFERENCE
        seconds = [max(o.seconds, 0.01) for o in chosen]
        panel.plot(places, seconds, "o", color=color, markersize=4, alpha=0.8, label=phase)
    panel.set_yscale("log")
    panel.set_xticks(range(len(targets)), targets, rotation=25)
    panel.set_ylabel("seconds to the next commit")
    apply_style(panel)
    legend_below(drawing, [panel])
    return to_png(drawing)
