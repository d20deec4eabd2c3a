#!/usr/bin/env python3
"""rooms_figure.py: draws the rooms of llmc/ and their includes as docs/rooms.svg.

Usage: dev/rooms_figure.py [--check] [--out FILE]
  --check   write nothing; compare FILE with what would be drawn
Exit status: 0 the figure is up to date, 1 it is not, or a room has no place in the figure, 2 usage.

An arrow A -> B: a file of A includes a file of B. Arrows that follow from others (A -> B -> C implies A -> C) are left
out. The includes are read by rooms.py.
"""

import argparse
import pathlib
import sys

import rooms

TRAINER = "train_diffv2.c"
# room: column (0 is the left edge), what it holds in two lines
PLACES = {
    TRAINER: (1.6, "model, forward, backward, update, main", "train_diffv2.cu: with CUDA operations"),
    "run": (1.6, "inputs, checkpointing, resume, rollback,", "spikes, divergence, records, signals"),
    "evaluate": (0.8, "validation, choices, recall, attention,", "generation, gradients"),
    "predict": (1.6, "predict_diffv2.c: operations that record", "their cost; memory and time on a GPU"),
    "log": (2.4, "run.json, log.jsonl,", "progress"),
    "options": (0.8, "table, relations, parser, help;", "modes, environment"),
    "checkpoint": (1.6, "safetensors, checksums,", "atomic and background saves"),
    "model": (1.6, "variants, presets, tensors; plan, layouts,", "sharding; parameters, gradients, moments"),
    "experts": (1.6, "routing, products, losses of the router;", "the MLP of a layer of any kind"),
    "comm": (2.4, "ranks: MPI, NCCL or one process;", "launch, watchdog"),
    "ops": (2.4, "ops.h declares the operations; each is", "NAME.h in C and NAME.cuh in CUDA"),
    "text": (0.4, "tokenizer, prompts,", "sampling"),
    "data": (1.4, "token shards, corpora,", "order, batches"),
    "cuda": (2.4, "device, memory, launch; cuBLASLt,", "cuDNN; table of GPUs"),
    "base": (1.5, "errors, memory, files, JSON, hashes,", "random numbers, this machine"),
}
COLUMN, ROW, WIDTH, HEIGHT, MARGIN = 300, 112, 268, 62, 16
STYLE = """<style>
text { font-family: Helvetica, Arial, sans-serif; text-anchor: middle; fill: #1f2328 }
.name { font-size: 15px; font-weight: bold }
.what { font-size: 12px; fill: #59636e }
rect { fill: #f6f8fa; stroke: #8c959f }
path { fill: none; stroke: #57606a; stroke-width: 1.4 }
</style>
<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">
<path d="M0,0 L9,4 L0,8 z" style="fill: #57606a; stroke: none"/></marker></defs>"""


def layers():
    """The rooms of each layer, lowest first; the trainer lies below the highest one, which includes it."""
    return [*rooms.LAYERS[:-1], [TRAINER], rooms.LAYERS[-1]]


def arrows(root):
    """All pairs (A, B) of different rooms where A includes B."""
    found = set()
    for path in rooms.product(root):
        own = path.relative_to(root).parts
        source = own[1] if own[0] == "llmc" else TRAINER if own[0].startswith("train_") else "predict"
        for target in rooms.includes(path, root):
            parts = pathlib.PurePath(target).parts
            room = parts[1] if parts[0] == "llmc" else parts[0]
            if room != source and (parts[0] == "llmc" or room == TRAINER):
                found.add((source, room))
    return found


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


def draw(root):
    rows = layers()
    place = {}
    for depth, names in enumerate(reversed(rows)):
        for name in names:
            if name not in PLACES:
                sys.exit(f"rooms_figure.py: {name} has no place in the figure: add it to PLACES")
            place[name] = (MARGIN + WIDTH / 2 + PLACES[name][0] * COLUMN, MARGIN + depth * ROW)
    width = MARGIN * 2 + WIDTH + max(PLACES[name][0] for name in place) * COLUMN
    height = MARGIN * 2 + HEIGHT + (len(rows) - 1) * ROW
    size = f'width="{width:g}" height="{height:g}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {size}>']
    lines += [STYLE, f'<rect {size} style="fill: white; stroke: none"/>']
    for a, b in without_implied(arrows(root)):
        (x0, y0), (x1, y1) = place[a], place[b]
        # arrows leave and arrive spread over the middle of a box, in the order of their other ends
        x0 += max(-90, min(90, (x1 - x0) * 0.3))
        x1 += max(-90, min(90, (place[a][0] - x1) * 0.3))
        y0, bend = y0 + HEIGHT, min(ROW * 0.6, (y1 - y0 - HEIGHT) * 0.6)
        curve = f"M{x0:g},{y0:g} C{x0:g},{y0 + bend:g} {x1:g},{y1 - bend:g} {x1:g},{y1:g}"
        lines.append(f'<path d="{curve}" marker-end="url(#tip)"/>')
    for name, (x, y) in place.items():
        label = name if name == TRAINER else f"llmc/{name}"
        lines.append(f'<rect x="{x - WIDTH / 2:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        lines.append(f'<text class="name" x="{x:g}" y="{y + 21:g}">{label}</text>')
        for i, text in enumerate(PLACES[name][1:]):
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
