"""A `Report` as one HTML page: the fused graphs as inline SVG, the kernels' WGSL."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..errors import human_bytes
from .compile_time import CompileTime
from .graph_report import (
    HEADS,
    GraphReport,
    HostReport,
    KernelReport,
    cells_of,
    clip,
    dispatches_of,
    human_count,
    lines_of,
    numbered_steps,
)
from .memory import Memory
from .traffic import CopyRate

StepReport = KernelReport | HostReport

_BOX_WIDTH, _BOX_HEIGHT, _GAP_X, _GAP_Y = 260, 64, 28, 46

_STYLE = """
:root { color-scheme: light dark; --box: #eef3fb; --edge: #8a94a6; --line: #c9d2e0;
  --accent: #1f5fbf;
  --host: #fbe3e0; --io: #e6f4ea; --matmul: #fdf1d8; }
@media (prefers-color-scheme: dark) { :root { --box: #223047; --edge: #8a94a6; --line: #3a4a63;
  --accent: #86b4ff; --host: #5a2a26; --io: #1f4029; --matmul: #4a3c16; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
table { border-collapse: collapse; width: 100%; font-size: 13px; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .3rem .7rem; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid var(--line); border-radius: 6px;
  font: 12.5px/1.45 ui-monospace, monospace; }
details { margin: .4rem 0; } summary { cursor: pointer; }
.drawing { overflow: auto; max-height: 80vh; border: 1px solid var(--line); border-radius: 6px; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
svg .name { font-weight: 600; } svg .small { font-size: 11px; opacity: .75; }
svg path { fill: none; stroke: var(--edge); stroke-width: 1.2; }
svg rect { fill: var(--box); stroke: var(--line); }
svg .host rect { fill: var(--host); } svg .io rect { fill: var(--io); }
svg .anchor rect { fill: var(--matmul); }
svg a:hover rect { stroke: var(--accent); stroke-width: 2; }
"""


def page(
    graphs: Sequence[GraphReport],
    on_host: Sequence[str],
    graph_breaks: Sequence[str],
    memory: Memory,
    copy_rate: CopyRate | None = None,
    compile_time: CompileTime | None = None,
) -> str:
    """The whole document; the arguments are fields of a `Report`."""
    dispatches = sum(graph.dispatch_count for graph in graphs)
    body = [
        "<h1>torch_webgpu_compile report</h1>",
        f"<p>{len(graphs)} graphs, {dispatches} dispatches per call. "
        f"On the host: {escape(', '.join(on_host) or 'nothing')}. "
        f"Graph breaks: {len(graph_breaks)}. Memory: {memory}.</p>",
    ]
    if compile_time is not None:
        body.append(f"<p>{'<br>'.join(escape(s.strip()) for s in compile_time.lines)}</p>")
    body += [f"<pre>{escape(reason)}</pre>" for reason in graph_breaks]
    body += [_graph(number, graph, copy_rate) for number, graph in enumerate(graphs)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>torch_webgpu_compile report</title><style>{_STYLE}</style></head>\n"
        f"<body>{''.join(body)}</body></html>\n"
    )


def in_frame(document: str) -> str:
    """A document as an element of another one, with which it shares no style and no names."""
    return (
        f'<iframe srcdoc="{escape(document)}" sandbox '
        'style="width: 100%; height: 40em; border: 0"></iframe>'
    )


def _graph(number: int, graph: GraphReport, copy_rate: CopyRate | None) -> str:
    parts = [
        f"<h2>{escape(graph.name)}: {dispatches_of(graph)}</h2>",
        f'<div class="drawing">{drawing(number, graph)}</div>',
        _table(number, graph),
    ]
    for k, _, step in numbered_steps(graph):
        if isinstance(step, KernelReport):
            parts.append(_kernel(f"k{number}-{k}", step))
    lines = lines_of(graph, copy_rate)
    parts.append(f"<p>{'<br>'.join(escape(line.strip()) for line in lines)}</p>")
    for stage, text in graph.texts.items():
        if stage != "wgsl":
            parts.append(f"<details><summary>{stage}</summary><pre>{escape(text)}</pre></details>")
    return "\n".join(parts)


def _kernel(anchor: str, kernel: KernelReport) -> str:
    sources = "".join(f"<br><code>{escape(source)}</code>" for source in kernel.sources)
    return (
        f'<details id="{anchor}"><summary><b>{escape(kernel.name)}</b> '
        f"{escape(', '.join(kernel.ops))}</summary>{sources}"
        f"<pre>{escape(kernel.wgsl)}</pre></details>"
    )


def _table(number: int, graph: GraphReport) -> str:
    rows = ["".join(f"<th>{name}</th>" for name in HEADS)]
    for k, mark, step in numbered_steps(graph):
        name, *numbers, ops, source = map(escape, cells_of(step, mark))
        if isinstance(step, KernelReport):
            name = f'<a href="#k{number}-{k}">{name}</a>'
        cells = "".join(f'<td class="n">{cell}</td>' for cell in numbers)
        rows.append(f"<td>{name}</td>{cells}<td>{ops}</td><td>{source}</td>")
    head, *body = (f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"


def drawing(number: int, graph: GraphReport) -> str:
    """The dispatches and host calls as SVG; an edge is a buffer that one leaves to another."""
    steps = graph.steps
    layers = _layers(steps)
    columns: dict[int, int] = {}
    place: list[tuple[int, int]] = []
    for layer in layers:
        column = columns.get(layer, 0)
        columns[layer] = column + 1
        place.append((column, layer))
    widest = max(columns.values(), default=1)
    width = widest * (_BOX_WIDTH + _GAP_X) + _GAP_X
    height = (max(layers, default=0) + 1) * (_BOX_HEIGHT + _GAP_Y) + _GAP_Y
    points = []
    for column, layer in place:
        indent = (widest - columns[layer]) * (_BOX_WIDTH + _GAP_X) / 2
        x = _GAP_X + indent + column * (_BOX_WIDTH + _GAP_X)
        points.append((x, _GAP_Y / 2 + layer * (_BOX_HEIGHT + _GAP_Y)))
    edges = [_edge(points[a], points[b], label) for a, b, label in _edges(steps)]
    boxes = [
        _box(f"k{number}-{k}", step, x, y)
        for k, (step, (x, y)) in enumerate(zip(steps, points, strict=True))
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'role="img">{"".join(edges)}{"".join(boxes)}</svg>'
    )


def _edges(steps: tuple[StepReport, ...]) -> list[tuple[int, int, str]]:
    writer: dict[str, int] = {}
    edges = []
    for k, step in enumerate(steps):
        edges += [(writer[name], k, name) for name in step.reads if writer.get(name, k) != k]
        writer.update(dict.fromkeys(step.writes, k))
    return edges


def _layers(steps: tuple[StepReport, ...]) -> list[int]:
    """The length of the longest path to each step."""
    layers = [0] * len(steps)
    for source, destination, _ in _edges(steps):
        layers[destination] = max(layers[destination], layers[source] + 1)
    return layers


def _edge(start: tuple[float, float], end: tuple[float, float], label: str) -> str:
    x1, y1 = start[0] + _BOX_WIDTH / 2, start[1] + _BOX_HEIGHT
    x2, y2 = end[0] + _BOX_WIDTH / 2, end[1]
    bend = max(20.0, (y2 - y1) / 2)
    curve = (
        f"M{x1:.0f} {y1:.0f} C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
    )
    return f'<path d="{curve}"><title>{escape(label)}</title></path>'


def _box(anchor: str, step: StepReport, x: float, y: float) -> str:
    if isinstance(step, HostReport):
        style, name, second, third = "host", "on the host", step.op, ""
    else:
        style = "anchor" if step.kind in ("matmul", "contraction", "attention") else ""
        name = step.name
        second = " ".join(dict.fromkeys(op.removeprefix("aten.") for op in step.ops))
        traffic = f"{human_bytes(step.bytes_read)} → {human_bytes(step.bytes_written)}"
        third = f"{traffic}, {human_count(step.flops)} flop"
    lines = [
        f'<text class="{css}" x="{x + 10:.0f}" y="{y + dy:.0f}">{escape(clip(text, 38))}</text>'
        for css, dy, text in (("name", 20, name), ("", 38, second), ("small", 54, third))
    ]
    title = escape(f"{name}\n{second}")
    return (
        f'<a class="{style}" href="#{anchor}"><title>{title}</title>'
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="7"/>'
        f"{''.join(lines)}</a>"
    )
