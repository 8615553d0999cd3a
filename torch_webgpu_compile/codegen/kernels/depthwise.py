"""Depthwise convolutions and their weights' gradients, from tiles of the image."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ...ir.access import VECTOR, flat_values, is_multiple_of
from ...ir.anchors import anchor_members
from ...ir.buffers import Buffer
from ...ir.depthwise_access import (
    channels_are_neighbours,
    stores_neighbours,
)
from ...ir.depthwise_nodes import ConvolutionWindows, DepthwiseConvolution, DepthwiseWeightGradient
from ...ir.graph import AnchorGroup, Member
from ...ir.scalar import Scalar
from ...ir.spaces import numbered
from ...plan.model import KernelCall
from ...symbolic.sizes import Expr, Symbol, as_expr, ceildiv, iteration, product
from ...target import Target
from ..hardening.spelling import all_of
from ..tilings.depthwise import (
    DepthwiseTiling,
    axes_of,
    image_tile,
    plane_sizes,
    tap_sums,
    taps_pitch,
    workgroup_nbytes,
)
from .builder import Computed, KernelBuilder
from .epilogue import Store, points_along, render_epilogue, render_store
from .pointwise import group_origins


def generate_depthwise(
    group: AnchorGroup, buffers: dict[str, Buffer], target: Target, tiling: DepthwiseTiling
) -> KernelCall:
    """The kernel of a depthwise convolution and its epilogue."""
    node = group.anchor
    assert isinstance(node, DepthwiseConvolution)
    builder = KernelBuilder(target, buffers)
    members = anchor_members([group], buffers)
    height, width = plane_sizes(node.positions)
    load_neighbours = channels_are_neighbours(node.image, node, buffers)
    store_neighbours = stores_neighbours(members, node, buffers)
    tile = image_tile(tiling, node.windows)
    planes = product(node.batch)
    plane = iteration("plane", planes)
    batch = flat_values("b", node.batch, plane)
    places = {**batch, **flat_values("d", (as_expr(node.depth),), iteration("depth", node.depth))}
    taps = tuple(map(as_expr, node.windows.kernel))
    tap = {**places, **flat_values("k", taps, iteration("tap", product(taps)))}
    weight = builder.compute(node.weight, [tap], branches=True)
    within = "" if is_multiple_of(planes, tiling.planes) else f"plane < {builder.index(planes)}"
    plane_groups = ceildiv(planes, tiling.planes)
    total = product(_tiles(tiling, height, width)) * plane_groups
    loops = tiling.planes * (tile.lines * tile.quads + node.windows.taps) // tiling.workgroup + 4
    return builder.finish(
        "depthwise",
        {
            "tiling": tiling,
            "tile": tile,
            "image": _load(builder, node.image, "n", node.image_sizes, places, within),
            "weight": replace(weight, guard=within or "true"),
            "store": _store(builder, members, node, within),
            "depth": node.depth,
            "taps_count": node.windows.taps,
            "taps_pitch": taps_pitch(node.windows),
            "total": builder.index(total),
            "plane_groups": builder.index(plane_groups),
            **_walk(builder, tiling, node.windows, height, width),
            "load_neighbours": load_neighbours,
            "store_neighbours": store_neighbours,
            "multiply": list(_add_results(tiling, node.windows)),
        },
        workgroup_size=tiling.workgroup,
        workgroups=total,
        origins=[*node.origins, *group_origins(group.epilogue)],
        flops=product(node.batch) * product(node.positions) * (2 * node.depth * node.windows.taps),
        workgroup_nbytes=workgroup_nbytes(tiling, node.windows, sums=False),
        iterations=as_expr(node.depth * (loops + 1)),
    )


def generate_depthwise_weight_gradient(
    group: AnchorGroup, buffers: dict[str, Buffer], target: Target, tiling: DepthwiseTiling
) -> KernelCall:
    """The kernel of the gradient of a depthwise convolution's weight, and its epilogue."""
    node = group.anchor
    assert isinstance(node, DepthwiseWeightGradient)
    builder = KernelBuilder(target, buffers)
    windows = node.windows
    height, width = plane_sizes(node.positions)
    load_neighbours = channels_are_neighbours(node.image, node, buffers)
    moved_neighbours = channels_are_neighbours(node.moved, node, buffers)
    tile = image_tile(tiling, windows)
    channel, picture = iteration("channel", node.channels), iteration("picture", node.images)
    places = {
        **flat_values("c", (node.channels,), channel),
        **flat_values("r", (node.images,), picture),
    }
    of_channel = of_picture = ""
    if not is_multiple_of(node.channels, tiling.channels):
        of_channel = f"channel < {builder.index(node.channels)}"
    if not is_multiple_of(node.images, tiling.images):
        of_picture = f"picture < {builder.index(node.images)}"
    within = all_of([of_channel, of_picture])
    chunks = product(_tiles(tiling, height, width)) * ceildiv(node.images, tiling.images)
    each = ceildiv(chunks, node.parts)
    total = ceildiv(node.channels, tiling.channels) * node.parts
    adding = tap_sums(tiling, windows)
    names = [f"s{tap}" for tap in range(windows.taps)]
    names += ["0.0f"] * (-len(names) % VECTOR)
    quads = [", ".join(names[k : k + VECTOR]) for k in range(0, len(names), VECTOR)]
    rounds = [quads[k : k + adding.quads] for k in range(0, len(quads), adding.quads)]
    loops = tiling.planes * tile.lines * tile.quads // tiling.workgroup + 2
    run = VECTOR * tiling.vectors
    ending = set() if is_multiple_of(width, run) else set(range(1, run))
    if width.is_constant and ending:  # all of them in the last run of a line, or none
        ending = {width.constant % run}
    return builder.finish(
        "depthwise_weight_gradient",
        {
            "tiling": tiling,
            "tile": tile,
            "image": _load(builder, node.image, "n", node.image_sizes, places, within),
            "moved": _load(builder, node.moved, "m", node.positions, places, within),
            "store": _store_taps(builder, group, node, of_channel),
            "taps": windows.taps,
            "total": builder.index(total),
            "chunks": builder.index(chunks),
            "each": builder.index(each),
            "parts": node.parts,
            **_walk(builder, tiling, windows, height, width),
            "load_neighbours": load_neighbours,
            "moved_neighbours": moved_neighbours,
            "valid": all_of(
                [f"y < {builder.index(height)}", f"{VECTOR} * x < {builder.index(width)}"]
            ),
            "inside": {k: f"{VECTOR} * x + {k} < {builder.index(width)}" for k in sorted(ending)},
            "multiply": list(_add_to_taps(tiling, windows, ending)),
            "rounds": rounds,
            "sums": adding,
            "tile_size": max(tiling.planes * tile.plane, tiling.workgroup),
        },
        workgroup_size=tiling.workgroup,
        workgroups=total,
        origins=[*node.origins, *group_origins(group.epilogue)],
        flops=node.channels * node.images * product(node.positions) * (2 * windows.taps),
        workgroup_nbytes=workgroup_nbytes(tiling, windows, sums=True),
        iterations=each * (loops + 1)
        + len(rounds) * (adding.quads * adding.segment + adding.segments + 3),
    )


def _tiles(tiling: DepthwiseTiling, height: Expr, width: Expr) -> tuple[Expr, Expr]:
    """Tiles of a plane of results, along lines and across them."""
    columns = VECTOR * tiling.vectors * tiling.columns
    return ceildiv(width, columns), ceildiv(height, tiling.rows * tiling.lines)


def _walk(
    builder: KernelBuilder,
    tiling: DepthwiseTiling,
    windows: ConvolutionWindows,
    height: Expr,
    width: Expr,
) -> dict[str, str | int]:
    """How workgroups, and invocations inside of them, go over planes: for the templates.

    Steps are those of what is read, of a workgroup (``step``) and of an invocation (``own``); along
    lines in fours.
    """
    across, along = axes_of(windows)
    tiles_x, tiles_y = _tiles(tiling, height, width)
    own_y, own_x = across.advance(tiling.rows), along.advance(VECTOR * tiling.vectors) // VECTOR
    return {
        "tiles_x": builder.index(tiles_x),
        "tiles_y": builder.index(tiles_y),
        "step_y": own_y * tiling.lines,
        "step_x": own_x * tiling.columns,
        "own_y": own_y,
        "own_x": own_x,
    }


# -- loads and stores ------------------------------------------------------------------------------


def _load(
    builder: KernelBuilder,
    body: Scalar,
    prefix: str,
    sizes: Sequence[Expr],
    places: Mapping[Symbol, Expr],
    within: str,
) -> Computed:
    """The load of elements of a plane, by line ``y`` and by element, or four of them, ``x``.

    ``within``: the condition under which the plane exists, "" if that is always.
    """
    height, width = plane_sizes(sizes)
    symbols = numbered(prefix, sizes)
    y = iteration("y", height)

    def point(x: Expr) -> dict[Symbol, Expr]:
        return {**places, **dict(zip(symbols, (y, x)[-len(symbols) :], strict=True))}

    lanes, limit = points_along("x", width, point)
    found = builder.compute(body, lanes, branches=True)
    guards = ["y >= 0", f"y < {builder.index(height)}", "x >= 0", f"x < {builder.index(limit)}"]
    return replace(found, guard=all_of([within, *guards]))


def _store(
    builder: KernelBuilder, members: Sequence[Member], node: DepthwiseConvolution, within: str
) -> Store:
    """How results of a line are stored."""
    height, width = plane_sizes(node.positions)
    symbols = numbered("m", node.positions)
    batch = flat_values("b", node.batch, iteration("plane", product(node.batch)))
    y = iteration("y", height)

    def point(x: Expr) -> dict[Symbol, Expr]:
        return {**batch, **dict(zip(symbols, (y, x)[-len(symbols) :], strict=True))}

    limits = {"y": height}
    return render_store(builder, members, node.output, ("x", width), point, limits, within)


def _store_taps(
    builder: KernelBuilder, group: AnchorGroup, node: DepthwiseWeightGradient, within: str
) -> Store:
    """The store of the sum of one tap of a channel."""
    taps = tuple(map(as_expr, node.windows.kernel))
    point = {
        **flat_values("p", (as_expr(node.parts),), iteration("part", node.parts)),
        **flat_values("c", (node.channels,), iteration("channel", node.channels)),
        **flat_values("k", taps, iteration("tap", product(taps))),
    }
    members = anchor_members([group], builder.buffers)
    lines = render_epilogue(builder, members, {node.output: "value"}, [point])
    inside = f"tap < {node.windows.taps}" if node.windows.taps % VECTOR else ""
    return Store(1, lines, all_of([within, inside]) or "true")


# -- arithmetic ------------------------------------------------------------------------------------


def _read_lines(
    tiling: DepthwiseTiling, windows: ConvolutionWindows
) -> Iterator[tuple[list[str], list[tuple[int, int]]]]:
    """(statements that load a line of an invocation's image, the (row, tap) that read it)."""
    across, along = axes_of(windows)
    tile = image_tile(tiling, windows)
    readers: dict[int, list[tuple[int, int]]] = {}
    for row in range(tiling.rows):
        for tap in range(across.taps):
            at = across.read_at(row, tap)
            if at is not None:
                readers.setdefault(at - tile.first_line, []).append((row, tap))
    reach = along.reach(VECTOR * tiling.vectors)
    quads = [at // VECTOR - tile.first_quad for at in reach]
    for line, found in sorted(readers.items()):
        loads = [
            f"let v{q} = tile[at + {line * tile.quads + q}];" for q in range(quads[0], quads[1] + 1)
        ]
        yield loads, found


def _element(place: int) -> str:
    return f"v{place // VECTOR}.{'xyzw'[place % VECTOR]}"


def _places(
    tiling: DepthwiseTiling, windows: ConvolutionWindows, vector: int, tap: int
) -> list[int | None]:
    """Which elements of a line a tap reads for four results, counted from the first four."""
    _, along = axes_of(windows)
    start = image_tile(tiling, windows).first_quad * VECTOR
    found = [along.read_at(VECTOR * vector + k, tap) for k in range(VECTOR)]
    return [None if at is None else at - start for at in found]


def _add_results(tiling: DepthwiseTiling, windows: ConvolutionWindows) -> Iterator[str]:
    """Statements that add the products of a line, with all taps that meet it, to results."""
    across, along = axes_of(windows)
    for tap in range(across.taps * along.taps):
        yield f"let w{tap} = taps[first + {tap}];"
    for loads, readers in _read_lines(tiling, windows):
        yield "{"
        yield from loads
        for (row, down), tap in ((r, t) for r in readers for t in range(along.taps)):
            weight = f"w{down * along.taps + tap}"
            for vector in range(tiling.vectors):
                sums = f"a{row}_{vector}"
                places = _places(tiling, windows, vector, tap)
                whole = [_element(at) for at in places if at is not None]
                if len(whole) == VECTOR:
                    image = f"vec4<f32>({', '.join(whole)})"
                    yield f"{sums} = fma({image}, vec4<f32>({weight}), {sums});"
                    continue
                for lane, at in zip("xyzw", places, strict=True):
                    if at is not None:
                        yield f"{sums}.{lane} = fma({_element(at)}, {weight}, {sums}.{lane});"
        yield "}"


def _add_to_taps(
    tiling: DepthwiseTiling, windows: ConvolutionWindows, ending: Collection[int]
) -> Iterator[str]:
    """Statements that add the products of a line, with all elements that meet it, to taps.

    Args:
        ending: numbers of the elements of an invocation's line at which the line may end: from
            number k on, elements are there where ``inside{k}`` holds. What is read for others is
            left out: it may be infinite, although the moved operand is 0 there.
    """
    _, along = axes_of(windows)
    for loads, readers in _read_lines(tiling, windows):
        yield "{"
        yield from loads
        masked: dict[tuple[int, int], str] = {}
        products: list[str] = []
        for (row, down), tap in ((r, t) for r in readers for t in range(along.taps)):
            sums = f"s{down * along.taps + tap}"
            for vector in range(tiling.vectors):
                total = sums
                places = _places(tiling, windows, vector, tap)
                for lane, at in enumerate(places):
                    assert at is not None  # windows are not transposed
                    image = _element(at)
                    end = max((k for k in ending if k <= VECTOR * vector + lane), default=None)
                    if end is not None:
                        image = masked.setdefault((at, end), f"u{at}_{end}")
                    total = f"fma({image}, m{row}_{vector}.{'xyzw'[lane]}, {total})"
                products.append(f"{sums} = {total};")
        for (at, end), name in masked.items():
            yield f"let {name} = select(0.0f, {_element(at)}, inside{end});"
        yield from products
        yield "}"
