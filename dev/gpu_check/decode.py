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
# Memory of the step servers of all arms of MODEL: weights, and for a position the keys and values of 24 layers. DIFF V1
# has 1.5 times as many, YOCO about half.
WEIGHTS_BYTES, POSITION_BYTES = 20 * 2**30, 6 * 24 * 2 * 8 * 128 * 2
ARMS = [  # name, end of the preset's name, variant, with YOCO
    ("Transformer NH", "", "baseline", False),
    ("Transformer 1.5 NH", "-1.5h", "baseline", False),
    ("Transformer 2 NH", "-2h", "baseline", False),
    ("DIFF V1", "", "diff_v1", False),
    ("DIFF V2", "", "diff_v2", False),
    ("DIFF V2 with YOCO", "", "diff_v2", True),
]


def decode(check):
    model = TINY if check.pretend else MODEL
    contexts = TINY_CONTEXTS if check.pretend else CONTEXTS
    batches = TINY_BATCHES if check.pretend else BATCHES
    for B in reversed(batches):
        yield f"operations B {B}", operations, *model, B, contexts
    for B in reversed(batches):
        yield f"steps B {B}", steps, *model, B, contexts
    yield "window", windows, *model


def operations(check, findings, preset, NKV, B, contexts):
    rows, ended = findings.bench(300, "decode", preset, NKV, B, *contexts)
    attention = [r for r in rows if r["case"] == "attention_decode" and r["against"] == ARMS[0][0]]
    wanted = (len(ARMS) - 1) * len(contexts)
    if ended:
        what = f"B {B}: attention_decode of every arm"
        findings.check(what, len(attention) == wanted, f"{len(attention)} of {wanted}")
    for i, r in enumerate(rows):
        if r in attention and r["of"] == f"DIFF V2, B {B}, context {contexts[-1]}":
            of = f"B {B}, context {contexts[-1]}: attention of DIFF V2"
            findings.target(f"{of}, speed relative to the Transformer with NH heads", r["ratio"], SPEED)
            findings.target(f"{of}, share of a copy", rows[i + 1]["ratio"], BANDWIDTH)


def steps(check, findings, preset, NKV, B, contexts):
    """Whole steps of all arms in turns, up to the longest context for which the memory suffices."""
    fits = lambda T: check.pretend or WEIGHTS_BYTES + POSITION_BYTES * B * T <= (check.free_bytes or 0)
    fitting = [T for T in contexts if fits(T)]
    if len(fitting) < len(contexts):
        beyond = f"beyond {fitting[-1]}" if fitting else "of any length"
        findings.fact(f"B {B}: contexts {beyond}", "too little memory for the models of all arms")
    if not fitting:
        return
    with StepServers(check) as servers:
        for _, heads, attention, yoco in ARMS:
            traits = ["--window", TINY_WINDOW if check.pretend else WINDOW, "--yoco"] if yoco else []
            words = [*traits, "decode-turns", preset + heads, attention, NKV, B, fitting[-1]]
            servers.start(*check.program("BENCH_CUDA"), *words)
        for context in fitting:
            measure(findings, preset, B, context, servers.turns(2 if check.pretend else ROUNDS, 120, context))
    if servers.why:
        findings.failed_step(f"B {B}: steps of every arm", servers.why)
    else:
        findings.check(f"B {B}: steps of every arm", True)


def measure(findings, preset, B, context, times):
    """Rows of one context; none if an arm has failed."""
    for i, (name, *_) in enumerate(ARMS if times else ()):
        of = f"{preset} {name}, B {B}, context {context}"
        ratio = findings.rounds("token", of, [(r[i], r[0]) for r in times], ARMS[0][0])
        findings.rows[-1]["note"] = f"{1e3 * B / findings.rows[-1]['measured']:.0f} tokens/s"
        if name == "DIFF V2" and context == max(CONTEXTS):
            what = f"B {B}, context {context}: tokens/s of DIFF V2 relative to the Transformer with NH heads"
            findings.target(what, ratio, SPEED)


def windows(check, findings, preset, NKV):
    """Training attention without and with a window, at one length."""
    T, window = (40, TINY_WINDOW) if check.pretend else (16384, WINDOW)
    for traits in ([], ["--window", window]):
        rows, ended = findings.bench(200, *traits, "kernels", preset, NKV, 1, T, "attention")
        measured = [r["of"] for r in rows if r["case"].startswith("attention")]
        wrong = [of for of in measured if (f"window {window};" in of) != bool(traits)]
        if ended:
            what = f"attention {'with' if traits else 'without'} a window is measured"
            findings.check(
                what, measured and not wrong, f"{len(measured)} measurements, {len(wrong)} of another window"
            )
