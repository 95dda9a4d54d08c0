"""`dcp layout`: what sharding a model over ranks pads, for any model, ranks and blocks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import dcp
from dcp.cli import InputError, common, reading_input
from dcp.cli.clusters import show_on, writable
from dcp.cli.show import save_picture

if TYPE_CHECKING:
    from dcp.layout_groups import Buffer, TensorGroup

_FILES = (".json", ".safetensors")
_MOST_RANKS = 1 << 31
_WIDE = 100  # columns of a terminal that show all of the table
_MUCH = 0.03  # padding of a whole model that needs advice


@click.command("layout")
@click.option(
    "--model",
    metavar="NAME|FILE",
    required=True,
    help="A model by name, from shapes alone: gpt-oss-120b, deepseek-v3, llama-3-70b, ...; or a "
    "list of tensors (.json), a .safetensors file, a model.safetensors.index.json, or the folder.",
)
@click.option("--ranks", metavar="LIST", default="64,256", show_default=True, help="Ranks.")
@click.option(
    "--rows",
    metavar="LIST",
    default="1,16,128",
    show_default=True,
    help="Rows of a tensor that stay on one rank.",
)
@click.option(
    "--order",
    metavar="NAME",
    default="model",
    show_default=True,
    help="Of the tensors in a buffer: model, shape, size or search.",
)
@click.option(
    "--by",
    metavar="layer|model|SIZE",
    default="layer",
    show_default=True,
    help="Groups: a layer each, all together, or tensors in turn up to so many bytes (500MB).",
)
@click.option("--layouts", is_flag=True, help="Put every tensor's place into the JSON document.")
@click.option("--simulate", is_flag=True, help="Memory and traffic of a rank, beside others'.")
@click.option(
    "--optimizer",
    metavar="NAME",
    default="adamw",
    show_default=True,
    help="With --simulate: whose state is counted.",
)
@click.option("--plot", metavar="FILE", help="Draw layout and padding (.png, .svg, ...)")
@common
def command(
    json_to: str | None,
    model: str,
    ranks: str,
    rows: str,
    order: str,
    by: str,
    layouts: bool,
    simulate: bool,
    optimizer: str,
    plot: str | None,
) -> dict[str, Any]:
    """Lay a model out over ranks without cutting a block, and say what is padded."""
    from dcp import layout_simulate
    from dcp.layout import ORDERS

    rank_counts, row_counts = _counts("--ranks", ranks), _counts("--rows", rows)
    if order not in ORDERS:
        from dcp.config import suggest

        raise InputError(f"--order {order}: no such order{suggest(order, ORDERS)}")
    if simulate:
        layout_simulate.check_optimizer(optimizer)
    writable(plot, "--plot")
    groups = _groups(model, by)
    plans: list[_Plan] = []
    with _progress(len(rank_counts) * len(row_counts)) as show:
        for count in rank_counts:
            for block_rows in row_counts:
                plans.append(_Plan.of(groups, count, block_rows, order, show))
    document: dict[str, Any] = {
        "model": model,
        "order": order,
        "layouts": [row for plan in plans for row in plan.rows(with_tensors=layouts)],
        "whole": [plan.whole() for plan in plans],
    }
    if simulate:
        document["simulate"] = _footprints(plans, optimizer)
    if plot is not None:
        _draw(plans, model, order, plot)
    _show(document, plans, groups, json_to)
    return document


def _counts(option: str, text: str) -> list[int]:
    counts = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        if not part.isdecimal() or not 1 <= int(part) <= _MOST_RANKS:
            raise InputError(f"{option} {text}: {part!r} must be an integer from 1 to 2^31")
        counts.append(int(part))
    if not counts:
        raise InputError(f"{option}: no number is given")
    return list(dict.fromkeys(counts))


def _groups(model: str, by: str) -> list[TensorGroup]:
    """The tensors of a name or a file, in groups."""
    from dcp.config import parse_bytes
    from dcp.layout_files import TensorList, read_tensors
    from dcp.layout_groups import group_tensors
    from dcp.layout_models import model_tensors

    path = Path(model)
    if path.suffix in _FILES or path.is_dir() or "/" in model:
        with reading_input():
            tensors: Any = read_tensors(path)
    else:
        tensors = model_tensors(model)
    how: str | int = by if by in ("layer", "model") else parse_bytes(by, "--by")
    tied = tensors.tied if isinstance(tensors, TensorList) else None
    try:
        groups = group_tensors(tensors, by=how, tied=tied)
    except dcp.ArgumentError as error:  # a name twice, tied tensors that differ
        raise InputError(f"--model {model}: {error}") from error
    if not any(group.elements for group in groups):
        raise InputError(f"--model {model}: holds no tensor with elements")
    return groups


class _Plan:
    """The buffers of all groups, for one number of ranks and rows."""

    def __init__(
        self, groups: list[TensorGroup], buffers: list[Buffer], ranks: int, block_rows: int
    ) -> None:
        self.groups, self.buffers, self.ranks, self.block_rows = groups, buffers, ranks, block_rows

    @classmethod
    def of(
        cls,
        groups: list[TensorGroup],
        ranks: int,
        block_rows: int,
        order: str,
        show: Callable[[int, int, str], None],
    ) -> _Plan:
        from dcp.layout_groups import plan_groups

        buffers = plan_groups(
            groups,
            ranks=ranks,
            block_rows=block_rows,
            order=order,
            on_progress=lambda done, of: show(done, of, f"{ranks:,} ranks, {_rows(block_rows)}"),
        )
        return cls(groups, buffers, ranks, block_rows)

    def has(self, row: dict[str, Any], group: str) -> bool:
        """Whether a row of the document is of this plan, and of this group."""
        place = row["ranks"], row["rows"], row["groups"][0]
        return place == (self.ranks, self.block_rows, group)

    def rows(self, *, with_tensors: bool) -> list[dict[str, Any]]:
        return [self._row(buffer, with_tensors) for buffer in self.buffers]

    def _row(self, buffer: Buffer, with_tensors: bool) -> dict[str, Any]:
        from dcp.layout_groups import ITEM_BYTES

        layout = buffer.layout
        row = {
            "group": buffer.name,
            "groups": list(buffer.groups),
            "count": buffer.count,
            "dtype": buffer.dtype,
            "row_elements": list(buffer.row_elements) or None,
            "ranks": self.ranks,
            "rows": self.block_rows,
            "shard_elements": layout.shard_elements,
            "used_elements": layout.used_elements,
            "padding": layout.padding,
            "shard_bytes": layout.shard_elements * ITEM_BYTES[buffer.dtype],
            "largest_gap_elements": layout.largest_gap,
            "seconds": buffer.seconds,
            "peers": self._peers(buffer),
            "advice": layout.advice,
        }
        if with_tensors:
            row["tensors"] = [
                {
                    "name": name,
                    "shape": list(shape),
                    "block_elements": layout.block_elements[name],
                    "start": layout.offsets[name],
                }
                for name, shape in layout.shapes.items()
            ]
        return row

    def _peers(self, buffer: Buffer) -> dict[str, float]:
        """What others pad of the whole group, of which this buffer may be a part."""
        from dcp.layout_peers import PEERS, padding_of

        group = next(group for group in self.groups if group.name == buffer.group)
        shapes = list(group.shapes.values())
        return {name: padding_of(rule(shapes, self.ranks), shapes) for name, rule in PEERS.items()}

    def whole(self) -> dict[str, Any]:
        from dcp.layout_peers import PEERS

        used = sum(b.count * b.layout.used_elements for b in self.buffers)
        shard = sum(b.count * b.layout.shard_elements for b in self.buffers)
        peers = {
            name: sum(rule(list(g.shapes.values()), self.ranks) for g in self.groups) / used - 1
            for name, rule in PEERS.items()
        }
        return {
            "ranks": self.ranks,
            "rows": self.block_rows,
            "padding": self.ranks * shard / used - 1,
            "shard_elements": shard,
            "used_elements": used,
            "buffers": sum(b.count for b in self.buffers),
            "seconds": sum({b.group: b.seconds for b in self.buffers}.values()),
            "peers": peers,
        }


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal, while several combinations are planned; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, of, label: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=total)
        finished = 0

        def show(done: int, of: int, label: str) -> None:
            nonlocal finished
            finished += done == of
            part = done / of if done < of else 0.0
            bar.update(task, completed=finished + part, description=label)

        yield show


def _show(
    document: dict[str, Any], plans: list[_Plan], groups: list[TensorGroup], json_to: str | None
) -> None:
    console = show_on(json_to)
    elements = sum(group.elements for group in groups)
    tensors = sum(len(group.shapes) for group in groups)
    console.print(
        f"{document['model']}: {tensors:,} tensors, {elements:,} elements in {len(groups):,} "
        f"groups, order {document['order']}",
        highlight=False,
    )
    heads = ["ranks", "rows", "padding", "FSDP2", "Megatron >=", "a rank", "buffers"]
    if console.width >= _WIDE:
        heads += ["largest gap", "planned in"]
    table = _table(console, ["group", *heads])
    for group in dict.fromkeys(row["groups"][0] for row in document["layouts"]):
        for plan in plans:
            rows = [row for row in document["layouts"] if plan.has(row, group)]
            if rows:
                times = f" x {rows[0]['count']}" if rows[0]["count"] > 1 else ""
                name = "" if plan is not plans[0] else group + times
                table.add_row(name, *_cells(rows)[: len(heads)])
    console.print(table, highlight=False)
    _show_whole(console, document)
    _show_advice(console, document)
    if "simulate" in document:
        _show_footprints(console, document["simulate"])


def _table(console: Any, heads: list[str], title: str | None = None) -> Any:
    """Columns of numbers, the first of names where it holds them; never wrapped."""
    from rich.table import Table

    gap = (0, 2 if console.width >= _WIDE else 1, 0, 0)
    table = Table(box=None, pad_edge=False, padding=gap, title=title, title_justify="left")
    for head in heads:
        names = head in ("group", "system")
        table.add_column(head, justify="left" if names else "right", no_wrap=True)
    return table


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _percent(share: float) -> str:
    return f"{share:.2%}" if share < 1 else f"{share:,.0%}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _cells(rows: list[dict[str, Any]]) -> list[str]:
    """One line of the table: the buffers of a group together."""
    from dcp.layout_groups import ITEM_BYTES

    first = rows[0]
    used = sum(row["used_elements"] for row in rows)
    item = ITEM_BYTES[first["dtype"]]
    padding = first["ranks"] * sum(row["shard_elements"] for row in rows) / used - 1 if used else 0
    return [
        f"{first['ranks']:,}",
        str(first["rows"]),
        _percent(padding),
        _percent(first["peers"]["fsdp2"]),
        _percent(first["peers"]["megatron"]),
        _bytes(sum(row["shard_bytes"] for row in rows)),
        str(len(rows)),
        _bytes(max(row["largest_gap_elements"] for row in rows) * item),
        f"{1e3 * first['seconds']:.1f} ms",
    ]


def _show_whole(console: Any, document: dict[str, Any]) -> None:
    heads = ["ranks", "rows", "padding", "FSDP2", "Megatron >=", "buffers", "planned in"]
    table = _table(console, heads, "whole model")
    for row in document["whole"]:
        table.add_row(
            f"{row['ranks']:,}",
            str(row["rows"]),
            _percent(row["padding"]),
            _percent(row["peers"]["fsdp2"]),
            _percent(row["peers"]["megatron"]),
            str(row["buffers"]),
            f"{1e3 * row['seconds']:.1f} ms",
        )
    console.print()
    console.print(table, highlight=False)


def _show_advice(console: Any, document: dict[str, Any]) -> None:
    """Where a whole model pads much: what helps the buffer that pads most."""
    much = [(w["ranks"], w["rows"]) for w in document["whole"] if w["padding"] > _MUCH]
    worst: dict[tuple[int, int], dict[str, Any]] = {}
    for row in document["layouts"]:
        key = row["ranks"], row["rows"]
        if key not in much:
            continue
        lost = row["count"] * (row["ranks"] * row["shard_elements"] - row["used_elements"])
        if row["advice"] and lost > worst.get(key, {"lost": 0})["lost"]:
            worst[key] = row | {"lost": lost}
    if worst:
        console.print()
    for (ranks, rows), row in worst.items():
        console.print(
            f"{row['group']}, {ranks:,} ranks, {_rows(rows)}: {row['advice']}.", highlight=False
        )


def _three_digits(number: float) -> str:
    return f"{number:,.{0 if number >= 100 else 1 if number >= 10 else 2}f}"


def _show_footprints(console: Any, entries: list[dict[str, Any]]) -> None:
    """All in one unit, so that lines can be compared at a glance."""
    from dcp.layout_simulate import COMPONENTS

    largest = max(entry["memory_bytes"]["total"] for entry in entries)
    unit, size = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    short = {"gradients": "grads", "optimizer": "state", "communication": "comm"}
    short["padding"] = "pad"
    heads = [short.get(name, name) for name in COMPONENTS]
    table = _table(
        console,
        ["system", "ranks", "rows", *heads, "total", "gather", "reduce"],
        f"memory of a rank without activations, and what it receives in a step, {unit}",
    )
    for entry in entries:
        memory, traffic = entry["memory_bytes"], entry["traffic_bytes"]
        counts = [*(memory[name] for name in (*COMPONENTS, "total"))]
        counts += [traffic["gathered"], traffic["reduced"]]
        table.add_row(
            entry["system"],
            f"{entry['ranks']:,}",
            str(entry["rows"] or ""),
            *(_three_digits(count / size) for count in counts),
            style="bold" if entry["system"] == "dcp" else None,
        )
    console.print()
    console.print(table, highlight=False)


def _footprints(plans: list[_Plan], optimizer: str) -> list[dict[str, Any]]:
    """Every system once a number of ranks, dcp also once a number of rows."""
    from dcp.layout_simulate import footprints, has_tied_head

    tied = has_tied_head(plans[0].groups)
    found: list[dict[str, Any]] = []
    peers: set[tuple[str, int]] = set()
    for plan in plans:
        for one in footprints(
            plan.groups, plan.buffers, ranks=plan.ranks, optimizer=optimizer, tied=tied
        ):
            ours = one.system == "dcp"
            if not ours and (one.system, plan.ranks) in peers:
                continue
            peers.add((one.system, plan.ranks))
            rows = plan.block_rows if ours else None
            found.append(one.to_json() | {"ranks": plan.ranks, "rows": rows})
    return sorted(found, key=lambda e: (e["ranks"], e["system"] != "dcp"))


def _draw(plans: list[_Plan], model: str, order: str, path: str) -> None:
    from dcp.layout_plot import draw_model

    widest = max(plan.ranks for plan in plans)
    ranks = sorted({plan.ranks for plan in plans} | set(_between(widest)))
    curves: dict[str, list[tuple[int, float]]] = {}
    rows = list(dict.fromkeys(plan.block_rows for plan in plans))
    known = {(plan.ranks, plan.block_rows): plan for plan in plans}
    with _progress(len(rows) * len(ranks)) as show:
        for block_rows in rows:
            label = _rows(block_rows)
            for count in ranks:
                plan = known.get((count, block_rows)) or _Plan.of(
                    plans[0].groups, count, block_rows, order, show
                )
                whole = plan.whole()
                curves.setdefault(label, []).append((count, whole["padding"]))
                if block_rows == rows[0]:
                    curves.setdefault("FSDP2", []).append((count, whole["peers"]["fsdp2"]))
                    megatron = (count, whole["peers"]["megatron"])
                    curves.setdefault("Megatron, at least", []).append(megatron)
    figure = draw_model(
        [(plan.ranks, plan.block_rows, plan.buffers) for plan in plans],
        sorted(curves.items(), key=lambda item: not item[0].endswith(("row", "rows"))),
        title=f"{model}, sharded at block borders",
    )
    save_picture(figure, path)


def _between(widest: int) -> list[int]:
    """Powers of two, and half-way between them, for a curve up to so many ranks."""
    powers = [1 << k for k in range(3, widest.bit_length())]
    return [n for p in powers for n in (p, p + p // 2) if n <= widest]
