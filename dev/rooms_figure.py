#!/usr/bin/env python3
"""rooms_figure.py: draws the rings, their rooms, and what these include as docs/rooms.svg.

Usage: dev/rooms_figure.py [--check] [--out FILE]
  --check   write nothing; compare FILE with what would be drawn
Exit status: 0 the figure is up to date, 1 it is not, or a room has no place in the figure, 2 usage.

An arrow A -> B: a file of A includes or imports a file of B. Arrows that follow from others (A -> B -> C implies
A -> C) are left out, and those of ring 2 to ring 1 end at its frame. The folders of llmc/ops are one box. Includes are
read by rooms.py.
"""

import argparse
import pathlib
import sys

import rooms

OPS = "llmc/ops"
# room: column (0 is the left edge), what it holds in two lines
PLACES = {
    "dev": (1.5, "rooms.py, lines.py,", "same_numbers.py, gpu_check.sh"),
    "dev/bench": (0, "speed of operations and steps,", "beside limits and peers"),
    "dev/emulator": (1, "runs CUDA and PTX", "on CPUs"),
    "dev/fuzz": (2, "readers of files,", "with libFuzzer"),
    "dev/gpu_check": (3, "what a GPU has to show,", "in one command"),
    "tests": (2.5, "cases of operations, models,", "files, programs"),
    "dev/reference": (1.5, "PyTorch in float64;", "the fixtures"),
    "scripts/export": (0.5, "Transformers, Hub,", "TensorBoard, W&B; convert"),
    "scripts/lab": (0.5, "plans, runs,", "one report"),
    "data": (1.5, "corpora, tokenizers,", "choices, needles"),
    "scripts": (0.5, "quickstart, test, recipe,", "environments of Python"),
    "dev/predict": (3, "predict_diffv2: operations that", "record cost; memory, time of a GPU"),
    rooms.TRAINER: (1.5, "model, forward, backward, update,", "main; .cu: with CUDA operations"),
    "llmc/run": (1.5, "inputs, checkpointing, resume, rollback,", "spikes, divergence, records, signals"),
    "llmc/evaluate": (1.5, "validation, choices, recall, attention,", "generation, gradients"),
    "llmc/options": (1, "table, relations, parser, help;", "modes, environment"),
    "llmc/log": (2, "run.json, log.jsonl,", "progress"),
    "llmc/checkpoint": (1.5, "safetensors, checksums,", "atomic and background saves"),
    "llmc/model": (1.5, "variants, presets, tensors; plan, layouts,", "sharding; parameters, gradients, moments"),
    "llmc/experts": (1.5, "routing, products, losses of the router;", "the MLP of a layer of any kind"),
    OPS: (1.5, "linear, rows, gates; attention; measure;", "optimizer: NAME.h in C, NAME.cuh in CUDA"),
    "llmc/text": (1, "tokenizer, prompts,", "sampling"),
    "llmc/comm": (2, "ranks: MPI, NCCL or one process;", "launch, watchdog"),
    "llmc/data": (1, "token shards, corpora,", "order, batches"),
    "llmc/cuda": (2, "device, memory, launch; cuBLASLt,", "cuDNN; table of GPUs"),
    "llmc/base": (1.5, "errors, memory, files, JSON, hashes,", "random numbers, this machine"),
}
RINGS = {"Ring 1: what trains": rooms.RING_1, "Ring 2: includes ring 1, never the reverse": rooms.RING_2}
PAPER = "Ring 3: README.md, docs, results"
COLUMN, ROW, WIDTH, HEIGHT, MARGIN, GAP = 300, 96, 280, 62, 28, 56
STYLE = """<style>
text { font-family: Helvetica, Arial, sans-serif; text-anchor: middle; fill: #1f2328 }
.name { font-size: 15px; font-weight: bold }
.what { font-size: 12px; fill: #59636e }
.ring { font-size: 14px; font-style: italic; text-anchor: start; fill: #59636e }
rect { fill: #f6f8fa; stroke: #8c959f }
.around { fill: #fcfcfd; stroke: #c8d1da; stroke-dasharray: 5 4 }
path { fill: none; stroke: #57606a; stroke-width: 1.4 }
</style>
<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">
<path d="M0,0 L9,4 L0,8 z" style="fill: #57606a; stroke: none"/></marker></defs>"""


def box(room):
    return OPS if room.startswith(OPS) else room


def layers(ring):
    """The boxes of each layer of a ring, lowest first."""
    rows = [list(dict.fromkeys(map(box, names))) for names in ring]
    return [row for n, row in enumerate(rows) if row not in rows[:n]]


def arrows(root):
    """All pairs (A, B) of different boxes where A includes B."""
    found = set()
    for path, targets in rooms.sources(root).items():
        source = rooms.room_of(path)
        for room in map(rooms.room_of, targets):
            if rooms.TESTS not in (source, room) and rooms.LAYER[room] < rooms.LAYER[source]:
                found.add((box(source), box(room)))
    return {(a, b) for a, b in found if a != b}


def without_implied(pairs):
    reach = {}

    def reached(room):
        if room not in reach:
            reach[room] = set()
            for a, b in pairs:
                if a == room:
                    reach[room] |= {b} | reached(b)
        return reach[room]

    return sorted((a, b) for a, b in pairs if not any(b in reached(c) for x, c in pairs if x == a and c != b))


def line(x, y, end):
    return f'<path d="M{x:g},{y + HEIGHT:g} V{end:g}" marker-end="url(#tip)"/>'


def draw(root):
    place, around, y = {}, [], 2 * MARGIN + 12
    for title, ring in reversed(RINGS.items()):
        top = y
        for names in reversed(layers(ring)):
            for name in names:
                if name not in PLACES:
                    sys.exit(f"rooms_figure.py: {name} has no place in the figure: add it to PLACES")
                place[name] = (2 * MARGIN + WIDTH / 2 + PLACES[name][0] * COLUMN, y)
            y += ROW
        around.append((title, top, y - ROW + HEIGHT))
        y += GAP
    width = 4 * MARGIN + WIDTH + max(column for column, *_ in PLACES.values()) * COLUMN
    height = y - ROW - GAP + HEIGHT + 2 * MARGIN
    size = f'width="{width:g}" height="{height:g}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {size}>']
    lines += [STYLE, f'<rect {size} style="fill: white; stroke: none"/>']
    lines.append(f'<text class="ring" x="{MARGIN}" y="{MARGIN - 8}">{PAPER}</text>')
    for title, top, bottom in around:
        box_size = f'width="{width - 2 * MARGIN:g}" height="{bottom - top + MARGIN + 16:g}"'
        lines.append(f'<rect class="around" x="{MARGIN}" y="{top - MARGIN:g}" {box_size} rx="10"/>')
        lines.append(f'<text class="ring" x="{MARGIN + 12}" y="{top - 10:g}">{title}</text>')
    ring_1 = {name for names in layers(rooms.RING_1) for name in names}
    pairs = without_implied(arrows(root))
    lines += [line(*place[a], around[-1][1] - MARGIN) for a in sorted({a for a, b in pairs if b in ring_1} - ring_1)]
    for a, b in pairs:
        if b in ring_1 and a not in ring_1:
            continue
        (x0, y0), (x1, y1) = place[a], place[b]
        # arrows leave and arrive spread over the middle of a box, in the order of their other ends
        x0 += max(-90, min(90, (x1 - x0) * 0.3))
        x1 += max(-90, min(90, (place[a][0] - x1) * 0.3))
        y0, bend = y0 + HEIGHT, min(ROW * 0.6, (y1 - y0 - HEIGHT) * 0.6)
        curve = f"M{x0:g},{y0:g} C{x0:g},{y0 + bend:g} {x1:g},{y1 - bend:g} {x1:g},{y1:g}"
        lines.append(f'<path d="{curve}" marker-end="url(#tip)"/>')
    for name, (x, y) in place.items():
        lines.append(f'<rect x="{x - WIDTH / 2:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        lines.append(f'<text class="name" x="{x:g}" y="{y + 21:g}">{name}</text>')
        for i, text in enumerate(PLACES[name][1:]):
            text = text.replace("&", "&amp;")
            lines.append(f'<text class="what" x="{x:g}" y="{y + 38 + 15 * i:g}">{text}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=root / "docs/rooms.svg")
    options = parser.parse_args()
    figure = draw(root)
    if not options.check:
        options.out.write_text(figure, encoding="utf-8")
        return 0
    if options.out.read_text(encoding="utf-8") == figure:
        return 0
    print(f"{options.out} is not up to date: run dev/rooms_figure.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
