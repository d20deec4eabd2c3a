"""The part `decode`: decoding with a key/value cache at several contexts, by variant, and attention with a window.

The baselines and DIFF V2 have the same key/value heads, so their caches have the same size; DIFF V1 reads the values
twice. Ratios are of milliseconds, relative to the Transformer with NH heads in the same round.
"""

import statistics

from benchmarks import BANDWIDTH, bench, percent, target
from torch_comparison import StepServer

MODEL, TINY = ("1.4b", 8), ("tiny", 2)  # preset, key/value heads
CONTEXTS, TINY_CONTEXTS = (1024, 4096, 16384, 65536), (20, 70)
BATCHES, TINY_BATCHES = (1, 8), (1, 2)
WINDOW, TINY_WINDOW = 1024, 16
SPEED = 0.97  # target: tokens/s of DIFF V2 relative to the Transformer with NH heads
ROUNDS = 7
ARMS = [  # name, end of the preset's name, variant, with YOCO
    ("Transformer NH", "", "baseline", False),
    ("Transformer 1.5 NH", "-1.5h", "baseline", False),
    ("Transformer 2 NH", "-2h", "baseline", False),
    ("DIFF V1", "", "diff_v1", False),
    ("DIFF V2", "", "diff_v2", False),
    ("DIFF V2 with YOCO", "", "diff_v2", True),
]


def decode(check, part):
    preset, NKV = TINY if check.pretend else MODEL
    contexts = TINY_CONTEXTS if check.pretend else CONTEXTS
    batches = TINY_BATCHES if check.pretend else BATCHES
    for B in batches:
        if part.pending(f"operations B {B}"):
            operations(check, part, preset, NKV, B, contexts)
            part.end(f"operations B {B}")
    for B in batches:
        if part.pending(f"steps B {B}"):
            steps(check, part, preset, NKV, B, contexts)
            part.end(f"steps B {B}")
    if part.pending("window"):
        windows(check, part, preset, NKV)
        part.end("window")


def operations(check, part, preset, NKV, B, contexts):
    found, ended = bench(check, part, 300, "decode", preset, NKV, B, *contexts)
    rows = [r for r in found if r["table"] == "decode"]
    for r in rows:
        part.record(r)
    attention = {(r["arm"], r["context"]): r for r in rows if r["kernel"] == "attention_decode"}
    wanted = (len(ARMS) - 1) * len(contexts)
    if ended:
        part.check(f"B {B}: attention_decode of every arm", len(attention) == wanted, f"{len(attention)} of {wanted}")
    part.state["copy"] = max((r["rate"] for r in found if r["table"] == "peaks" and r["unit"] == "GB/s"), default=None)
    last = attention.get(("DIFF V2", contexts[-1]))
    if last:
        of = f"B {B}, context {contexts[-1]}: attention of DIFF V2"
        target(part, f"{of}, speed relative to the Transformer with NH heads", 1 / last["ratio"], SPEED, percent)
        target(part, f"{of}, share of a copy", last["share"], BANDWIDTH, percent)


def start(check, preset, NKV, B, T):
    """Servers of all arms and the header of each; the second is the reason if one does not start."""
    window = TINY_WINDOW if check.pretend else WINDOW
    servers, headers = [], []
    for _, heads, attention, yoco in ARMS:
        traits = ["--window", window, "--yoco"] if yoco else []
        command = [*check.commands["BENCH_CUDA"], *traits, "decode-turns", preset + heads, attention, NKV, B, T]
        servers.append(StepServer(check, command))
        headers.append(servers[-1].read_line(120))
        if headers[-1] is None:
            return servers, headers, servers[-1].why()
    return servers, headers, None


def steps(check, part, preset, NKV, B, contexts):
    """Whole steps of all arms in turns, with the longest cache for which the memory suffices."""
    why = ""
    for T in reversed(contexts):
        servers, headers, why = start(check, preset, NKV, B, T)
        try:
            if why is None:
                for context in [c for c in contexts if c <= T]:
                    why = why or measure(check, part, preset, B, context, servers, headers)
                if why is None and T < contexts[-1]:
                    part.fact(f"B {B}: contexts beyond {T}", "too little memory for the models of all arms")
                break
        finally:
            for s in servers:
                s.close()
    part.check(f"B {B}: steps of every arm", why is None, why or "")


def measure(check, part, preset, B, context, servers, headers):
    """One context; the reason if an arm fails."""
    rounds = []
    for _ in range(2 if check.pretend else ROUNDS):
        rounds.append([s.step(120, context) for s in servers])
        if None in rounds[-1]:
            return servers[rounds[-1].index(None)].why()
    copy = part.state.get("copy")
    for i, (name, _, _, yoco) in enumerate(ARMS):
        ms = statistics.median(r[i] for r in rounds)
        ratios = [r[i] / r[0] for r in rounds]
        row = {"table": "decode_steps", "of": f"{preset} {name}", "B": B, "context": context, "ms": ms}
        row.update(ratio=statistics.median(ratios), least=min(ratios), most=max(ratios), tokens_per_s=1e3 * B / ms)
        words = headers[i].split()
        if not yoco:  # whose layers attend to different numbers of positions
            row["rate"] = 1e-6 * (int(words[0]) + B * context * int(words[4])) / ms
            row["share"] = row["rate"] / copy if copy else None
        part.record(row)
        if name == "DIFF V2" and context == max(CONTEXTS):
            of = f"B {B}, context {context}: tokens/s of DIFF V2 relative to the Transformer with NH heads"
            target(part, of, 1 / row["ratio"], SPEED, percent)
    return None


def windows(check, part, preset, NKV):
    """Training attention without and with a window, at one length."""
    T, window = (40, TINY_WINDOW) if check.pretend else (16384, WINDOW)
    ms = {}
    for traits in ([], ["--window", window]):
        found, ended = bench(check, part, 200, *traits, "kernels", preset, NKV, 1, T, "attention")
        rows = [r for r in found if r["table"] == "kernels"]
        for r in rows:
            part.record(r)
            ms.setdefault((r["kernel"], r["shape"].split(":")[0]), []).append(r["ms"])
        if ended:
            shown = [r for r in rows if f"window {window}," in r["shape"]]
            part.check(
                f"attention {'with' if traits else 'without'} a window is measured",
                len(rows) > 0 and len(shown) == (len(rows) if traits else 0),
                f"{len(rows)} measurements, {len(shown)} of them with a window",
            )
    for (kernel, of), times in ms.items():
        count = len(times) // 2  # the first with the default backend, the last with the built-in kernel
        for backend, i in (("the default backend", 0), ("the built-in kernel", count - 1)):
            if of == "diff_v2" and count >= 2:
                what = f"T {T}: {kernel} of diff_v2 by {backend}, window {window} relative to none"
                part.fact(what, percent(times[count + i] / times[i]))
