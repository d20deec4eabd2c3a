"""The part `decode`: decoding with a key/value cache at several contexts, by variant, and attention with a window.

The baselines and DIFF V2 have the same key/value heads, so their caches have the same size; DIFF V1 reads the values
twice. Ratios are of milliseconds, to the Transformer with NH heads in the same round.
"""

from runner import StepServers
from speed import BANDWIDTH

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
    model = TINY if check.pretend else MODEL
    contexts = TINY_CONTEXTS if check.pretend else CONTEXTS
    batches = TINY_BATCHES if check.pretend else BATCHES
    for B in batches:
        yield f"operations B {B}", operations, *model, B, contexts
    for B in batches:
        yield f"steps B {B}", steps, *model, B, contexts
    yield "window", windows, *model


def operations(check, part, preset, NKV, B, contexts):
    rows, ended = part.bench(300, "decode", preset, NKV, B, *contexts)
    attention = [r for r in rows if r["case"] == "attention_decode" and r["against"] == ARMS[0][0]]
    wanted = (len(ARMS) - 1) * len(contexts)
    if ended:
        part.check(f"B {B}: attention_decode of every arm", len(attention) == wanted, f"{len(attention)} of {wanted}")
    for i, r in enumerate(rows):
        if r in attention and r["of"] == f"DIFF V2, B {B}, context {contexts[-1]}":
            of = f"B {B}, context {contexts[-1]}: attention of DIFF V2"
            part.target(f"{of}, speed relative to the Transformer with NH heads", r["ratio"], SPEED)
            part.target(f"{of}, share of a copy", rows[i + 1]["ratio"], BANDWIDTH)


def steps(check, part, preset, NKV, B, contexts):
    """Whole steps of all arms in turns, with the longest cache for which the memory suffices."""
    for T in reversed(contexts):
        with StepServers(check) as servers:
            for _, heads, attention, yoco in ARMS:
                traits = ["--window", TINY_WINDOW if check.pretend else WINDOW, "--yoco"] if yoco else []
                words = [*traits, "decode-turns", preset + heads, attention, NKV, B, T]
                servers.start(*check.commands["BENCH_CUDA"], *words)
            if not servers.why:
                for context in [c for c in contexts if c <= T]:
                    measure(part, preset, B, context, servers.turns(2 if check.pretend else ROUNDS, 120, context))
                if not servers.why and T < contexts[-1]:
                    part.fact(f"B {B}: contexts beyond {T}", "too little memory for the models of all arms")
                break
    part.check(f"B {B}: steps of every arm", not servers.why, servers.why)


def measure(part, preset, B, context, times):
    """Rows of one context; none if an arm has failed."""
    for i, (name, *_) in enumerate(ARMS if times else ()):
        of = f"{preset} {name}, B {B}, context {context}"
        ratio = part.rounds("token", of, [(r[i], r[0]) for r in times], ARMS[0][0])
        part.rows[-1]["note"] = f"{1e3 * B / part.rows[-1]['measured']:.0f} tokens/s"
        if name == "DIFF V2" and context == max(CONTEXTS):
            what = f"B {B}, context {context}: tokens/s of DIFF V2 relative to the Transformer with NH heads"
            part.target(what, ratio, SPEED)


def windows(check, part, preset, NKV):
    """Training attention without and with a window, at one length."""
    T, window = (40, TINY_WINDOW) if check.pretend else (16384, WINDOW)
    ms = {}
    for traits in ([], ["--window", window]):
        rows, ended = part.bench(200, *traits, "kernels", preset, NKV, 1, T, "attention")
        rows = [r for r in rows if r["case"].startswith("attention")]
        for r in rows:
            ms.setdefault((r["case"], r["of"].split(":")[0]), []).append(r["measured"])
        if ended:
            shown = [r for r in rows if f"window {window};" in r["of"]]
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
                part.fact(what, f"{times[count + i] / times[i]:.1%}")
