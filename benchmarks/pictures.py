"""Makes the pictures of README.md in docs/images, by `make pictures`; arguments choose some: `kill`, `speed`.

`kill` runs `dtrain train digits` on two workers, kills one with SIGKILL in the middle, and draws what the
terminal shows. `speed` draws what `benchmarks/results` holds. Both are SVG with a background of their own, so
that they can be read on light and dark pages, and load nothing from elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import psutil

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"

COMMAND = ["train", "digits", "--strategy", "multi_worker", "--workers", "2", "--epochs", "6"]
KILL_IN_EPOCH = 3
MONOSPACE = "ui-monospace, Menlo, Consolas, monospace"
SANS = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
PANEL = 'rx="8" fill="#ffffff" stroke="#c9d1dc"'
INK = 'fill="#3d4859"'
NO_BREAK = "\N{NO-BREAK SPACE}"  # browsers join other spaces
WIDTH = 108  # characters of a line

Line = tuple[str, str]  # the text, and its colour

PLAIN, GREEN, RED, YELLOW = "#d6deeb", "#8fd19e", "#ff8f87", "#f3d083"


def recorded() -> list[Line]:
    """What a terminal shows while a worker is killed, and after."""
    lines: list[Line] = [("$ dtrain " + " ".join(COMMAND), PLAIN)]  # as typed
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "dtrain", *COMMAND],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            text=True,
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        killed = False
        for raw in process.stdout or ():
            line = raw.rstrip().replace(folder, "~")
            if not line:
                continue
            # The launcher's lines are shown as a whole, the others as far as they fit.
            shown = (
                textwrap.wrap(line, WIDTH, subsequent_indent=" " * 9)
                if line.startswith("[dtrain]")
                else [line]
            )
            lines += [(text, _colour(line)) for text in shown]
            if not killed and re.search(rf"\b[Ee]poch {KILL_IN_EPOCH}\b", line):
                pid = worker_of(process.pid, 1)
                time.sleep(0.25)  # in the middle of the epoch
                os.kill(pid, signal.SIGKILL)
                lines.append((f"$ kill -9 {pid}          # worker 1, from another terminal", RED))
                killed = True
        if process.wait() or not killed:
            raise SystemExit("\n".join(text for text, _ in lines) + f"\nstatus {process.returncode}")
    return lines


def worker_of(launcher: int, index: int) -> int:
    """The process id of a worker, which TF_CONFIG in its environment tells."""
    for child in psutil.Process(launcher).children(recursive=True):
        config = json.loads(child.environ().get("TF_CONFIG", "{}"))
        if config.get("task") == {"type": "worker", "index": index}:
            return child.pid
    raise SystemExit(f"worker {index} is not running")


def _colour(line: str) -> str:
    if line.startswith("[dtrain]"):
        return YELLOW
    return GREEN if re.search("test accuracy|speed:|files:", line) else PLAIN


def terminal(lines: Sequence[Line], *, title: str) -> str:
    """Lines of a terminal as SVG."""
    size, row, left, top = 13, 19, 18, 46
    width, height = left * 2 + int(WIDTH * size * 0.602), top + row * len(lines) + 12
    parts = [
        _opening(width, height, title),
        f'<rect width="{width}" height="{height}" rx="8" fill="#1b2333"/>',
        *(
            f'<circle cx="{20 + 18 * n}" cy="18" r="5.5" fill="{c}"/>'
            for n, c in enumerate((RED, YELLOW, GREEN))
        ),
        f'<g font-family="{MONOSPACE}" font-size="{size}">',
    ]
    for number, (text, colour) in enumerate(lines):
        shown = text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
        # Its length is fixed, so that any font fits.
        length = f' textLength="{len(shown) * size * 0.602:.1f}" lengthAdjust="spacingAndGlyphs"'
        place = f'x="{left}" y="{top + row * number}" fill="{colour}" xml:space="preserve"'
        parts.append(f"<text {place}{length if shown else ''}>{escape(shown).replace(' ', NO_BREAK)}</text>")
    return "\n".join([*parts, "</g>", "</svg>", ""])


class Bar(NamedTuple):
    """One measured thing: its name, milliseconds per step, and whether it is dtrain's."""

    name: str
    milliseconds: float
    ours: bool


# The cases of the plot: their keys in the results, and what they are.
CASES = {
    "small-mpi": "two workers, a small network (steps below 1 ms)",
    "mid-mpi": "two workers, a CNN (much computing, few gradients)",
    "big-mpi": "two workers, a wide network (30 MB of gradients per step)",
}
NAMES = {
    "dtrain": "dtrain, model.fit",
    "stock loop": "tf.distribute, a loop written by hand",
    "DDP": "PyTorch DDP over Gloo",
}


def newest_measurement() -> dict[str, Any]:
    """The results with most of the cases; of several, those measured last."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("speed*.json")]
    return max(results, key=lambda data: (len(set(CASES) & set(data["cases"])), data["measured_at"]))


def speed_plot(data: dict[str, Any]) -> str:
    """Milliseconds per step of each case as SVG; in each, the longest bar is the slowest."""
    width, left, right, row = 760, 258, 74, 22
    y, body = 58, []
    for key, says in CASES.items():
        if key not in data["cases"]:
            continue
        measured = data["cases"][key]["milliseconds_a_step"]
        bars = [
            Bar(says, _median(measured[name]), name == "dtrain")
            for name, says in NAMES.items()
            if name in measured
        ]
        longest = max(bar.milliseconds for bar in bars)
        body.append(f'<text x="18" y="{y + 14}" font-weight="600" fill="#1b2333">{escape(says)}</text>')
        y += 24
        for bar in bars:
            length = max(2.0, bar.milliseconds / longest * (width - left - right))
            colour = "#1f6feb" if bar.ours else "#9aa7b8"
            body += [
                f'<text x="{left - 10}" y="{y + 14}" text-anchor="end" {INK}>{escape(bar.name)}</text>',
                f'<rect x="{left}" y="{y + 3}" width="{length:.1f}" height="15" rx="2" fill="{colour}"/>',
                f'<text x="{left + length + 6:.1f}" y="{y + 15}" {INK}>{bar.milliseconds:.3g} ms</text>',
            ]
            y += row
        y += 12
    hardware, versions = data["hardware"], data["versions"]
    tensorflow = versions.get("tensorflow") or f"tensorflow-cpu {versions.get('tensorflow-cpu', '')}"
    note = f"{hardware['cores']} cores of {hardware['cpu']}, {tensorflow}, Keras {versions['keras']}"
    note += f", PyTorch {versions['torch']}" if "torch" in versions else ""
    height = y + 26
    title = "Milliseconds per step, two workers over MPI, median: shorter is faster"
    return "\n".join(
        [
            _opening(width, height, title),
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" {PANEL}/>',
            f'<g font-family="{SANS}" font-size="13">',
            f'<text x="18" y="32" font-size="16" font-weight="600" fill="#1b2333">{escape(title)}</text>',
            *body,
            f'<text x="18" y="{height - 14}" font-size="11.5" fill="#5b6778">{escape(note)}; '
            f"measured by {escape(data['command'].partition(' --')[0])}</text>",
            "</g>",
            "</svg>",
            "",
        ]
    )


def _median(measured: Any) -> float:
    return float(measured["median"] if isinstance(measured, dict) else measured)


def _opening(width: int, height: int, title: str) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(title)}</title>'


def main() -> None:
    """Make the pictures that are named, or both."""
    asked = sys.argv[1:] or ["kill", "speed"]
    if set(asked) - {"kill", "speed"}:
        raise SystemExit(f"pictures are kill and speed, not {' '.join(asked)}")
    IMAGES.mkdir(exist_ok=True)
    if "speed" in asked:
        (IMAGES / "speed.svg").write_text(speed_plot(newest_measurement()), encoding="utf-8")
    if "kill" in asked:
        title = "dtrain train digits on two workers; worker 1 is killed, and the job continues"
        (IMAGES / "kill.svg").write_text(terminal(recorded(), title=title), encoding="utf-8")
    print(f"{', '.join(f'{name}.svg' for name in asked)} in {IMAGES}")


if __name__ == "__main__":
    main()
