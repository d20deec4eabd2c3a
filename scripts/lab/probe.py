"""probe.py: the command `probe`: what the attention of a checkpoint has learned, layer by layer, and the rounding error
of bf16 attention, from a file of --dump-qkv (llmc/evaluate/qkv_dump.h).

subtraction  of variants without noise heads: does a model learn to subtract one head from another? W_h = the [C, D]
             block of o_proj of head h. Two heads that read the same values with W_g = -W_h are a subtraction.
  opposition  cos(W_h, -W_g) = -<W_h, W_g> / (|W_h| |W_g|) of two heads of one key/value group; 0 where a block is zero
  adjacent    mean over the pairs of heads 2i, 2i+1, as DIFF V2 pairs them; null: a group has an odd number of heads
  closest     mean over the heads of the largest opposition to another head of the group
  permuted    the same of DRAWS draws, which permute the D columns of each head independently: this keeps norms and the
              distribution of elements, and removes any relation between the columns of two heads. Mean, and quantiles
              of 2.5 and 97.5 %, interpolated linearly
  p           (1 + draws that reach the observed value) / (1 + DRAWS)
maps         of A1 of the signal head, A2 of the noise head, and E = A1 - s A2 of each output head; means over output
             heads, windows and rows. A[t,j] = exp(scale q_t.k_j - lse_t) for the keys that row t attends to, else 0
  correlation     of a row: Pearson's, of A1 and A2 over the visible keys; of rows with 3 or more of them in which both
                  maps vary by more than the rounding of their elements
  cancelled       of a row: 1 - sum|E| / sum(A1 + |s| A2): the share of the mass of both maps that the subtraction
                  removes. Of two equal maps 2s / (1 + s) for 0 <= s <= 1, and 0 for s <= 0
  negative        of a row: sum max(0, -E) / sum|E|; of rows in which more remains than rounding errors
  effective rank  of a map: exp(-sum p ln p), p = singular values divided by their sum; between 1 and T. Not of a map of
                  zeros. Of the first RANK_WINDOWS windows
lambda       s by class of the token at the position: mean and standard deviation over windows, positions and output
             heads, and their number
  classes    first: position 0. punctuation: the token's text is ASCII punctuation, apart from ASCII white space; null
             where tokens have no text. rare: the least frequent tokens of the rest, which together are at most 5 % of
             the probed tokens; of equally frequent ones the larger ID is rarer. other
rounding     of each head's output, and of what remains of a pair after the subtraction, which may cancel the errors of
             its maps or amplify them
  row        the output of a token and query head, or of a token and output head after the subtraction and before norms
             and gates: DV numbers
  error      ||row - exact row|| / ||exact row||; the largest and the mean over the rows. Rows of zeros are left out,
             and differences below 2^-40 of their first term
  exact      in double, from the q, k, v and lambda that the attention has read
  row        bf16 program: as the device has stored it. Otherwise bf16 attention is emulated: q, k, v and lambda are
             rounded to bf16; products, exp and sums are fp32; P = exp(S - max) is rounded to bf16 before the product
             with v, the sum of P is not; the output is rounded to bf16, and once more after the subtraction. All keys
             of a row are one block.
  of inputs  emulation: relative to exact rows of the q, k, v and lambda before they were rounded
  sinks      scale a row, which does not change its relative error: the emulation leaves them out
sources      Roy and Vetterli 2007, "The effective rank"; Phipson and Smyth 2010, "Permutation P-values should never be
             zero"; Ye and others 2026, the post on DIFF V2, which says that W_O^{2i} = -W_O^{2i+1} is not learned; Qiu
             and Yao 2025 (arXiv 2510.04212): rounding with a bias in bf16 flash attention
"""

import json
import math
import struct
from pathlib import Path

import python_environment

from . import cli, run_directory
from .run_directory import RunError, read_json
from .tensors import Tensors

np = python_environment.Later("numpy")
xxhash = python_environment.Later("xxhash")
DRAWS, RANK_WINDOWS, RARE_SHARE = 1000, 32, 0.05
CLASSES = ("all", "first", "punctuation", "rare", "other")
M64 = 2**64 - 1


# ---- files


class Dump(Tensors):
    """A file of --dump-qkv."""

    def __init__(self, path):
        super().__init__(path)
        self.counts, self.windows = self.read("counts"), self.read("key_windows").astype(int)
        self.sets, self.signals, self.noise = map(int, self.read("groups"))
        self.layers = len(self.windows)

    def part(self, name, what, axis=0):
        """A tensor of all batches of a part."""
        batches = 0
        while f"{name}.{batches}.tokens" in self.header:
            batches += 1
        if batches == 0:
            raise RunError(f"{self.path}: not a file of --dump-qkv: it has no {name}.0.tokens")
        return np.concatenate([self.read(f"{name}.{b}.{what}") for b in range(batches)], axis)

    def has(self, name):
        return name in self.header

    def attention(self, part, layer):
        """The attention of a layer. Query heads read their key head, so that q, k and v have the same heads."""
        q, k = self.part(part, f"layer.{layer}.q"), self.part(part, f"layer.{layer}.k")
        heads = np.arange(q.shape[2])
        group = q.shape[2] // k.shape[2]
        keys = heads // self.sets // group * self.sets + heads % self.sets
        return Attention(
            np.moveaxis(q, 2, 0),
            np.moveaxis(k[:, :, keys], 2, 0),
            self.part(part, f"layer.{layer}.lse", axis=1),
            self.windows[layer],
            heads // self.sets // group,
        )

    def output_heads(self, query_heads):
        """(signal head, noise head) of each output head; the noise heads are None without pairs."""
        if not self.noise:
            return np.arange(query_heads), None
        h = np.arange(query_heads // (self.signals + self.noise) * self.signals)
        group, place = h // self.signals * (self.signals + self.noise), h % self.signals
        return group + place, group + self.signals + place // (self.signals // self.noise)


class Attention:
    """q and k [heads, W, T, D], lse [heads, W, T]; values: the head of v of each query head"""

    def __init__(self, q, k, lse, window, values):
        self.q, self.k, self.lse, self.values = q, k, lse, values
        self.scale = float(np.float32(1 / math.sqrt(q.shape[3])))
        t = np.arange(q.shape[2])
        self.visible = (t <= t[:, None]) & ((t > t[:, None] - window) if window else True)

    def maps(self, head):
        """The maps [W, T, T] of a query head."""
        q, k, lse = (x[head].astype(float) for x in (self.q, self.k, self.lse))
        logits = self.scale * (q @ k.swapaxes(1, 2))
        with np.errstate(over="ignore", invalid="ignore"):
            return np.where(self.visible, np.exp(logits - lse[..., None]).astype(np.float32), np.float32(0))


# ---- random numbers (llmc/base/random.h, llmc/base/permute.h), of arrays of 64 bits


def mix(z):
    u = np.uint64
    z = (z ^ (z >> u(30))) * u(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> u(27))) * u(0x94D049BB133111EB)
    return z ^ (z >> u(31))


def permutations(count, seed, epochs):
    """[epochs, count]: the permutation of [0, count) of each epoch."""
    u, half = np.uint64, 3
    while 1 << 2 * half < count:
        half += 1
    golden, mask = 0x9E3779B97F4A7C15, u((1 << half) - 1)
    key = mix(mix(np.array([(seed + golden) & M64], u)) + epochs.astype(u))[:, None]
    x = np.broadcast_to(np.arange(count, dtype=u), (len(epochs), count)).copy()
    walking = np.ones(x.shape, bool)
    while walking.any():
        left, right = x >> u(half), x & mask
        for number in range(1, 9):
            left, right = right, left ^ (mix((key + u(number * golden & M64)) ^ right) & mask)
        x = np.where(walking, left << u(half) | right, x)
        walking = x >= count
    return x.astype(int)


# ---- subtraction


def permuted(name, values):
    """The statistic of a layer, values[0], beside its draws."""
    observed, draws = float(values[0]), np.sort(values[1:])
    low, high = (float(np.quantile(draws, share)) for share in (0.025, 0.975))
    p = (1 + int((draws >= observed).sum())) / (1 + DRAWS)
    return {name: observed, f"{name}_permuted": {"mean": float(draws.mean()), "low": low, "high": high}, f"{name}_p": p}


def subtraction(o_proj, heads, kv_heads, key):
    """o_proj [C, heads * D]. key: of the draws"""
    k, width = heads // kv_heads, o_proj.shape[1] // heads
    if k < 2:
        return None
    blocks = o_proj.astype(float).reshape(len(o_proj), heads, width).swapaxes(0, 1)
    norms = np.sqrt((blocks**2).sum((1, 2)))
    draws = np.arange(1, DRAWS + 1)
    orders = [np.vstack([np.arange(width), permutations(width, key + h, draws)]) for h in range(heads)]
    adjacent, closest = np.zeros(1 + DRAWS), np.zeros(1 + DRAWS)
    for first in range(0, heads, k):
        found = np.full((k, k, 1 + DRAWS), -np.inf)
        for g in range(k):
            for h in range(g + 1, k):
                a, b = first + g, first + h
                sums = (blocks[a].T @ blocks[b])[orders[a], orders[b]].sum(1)
                size = norms[a] * norms[b]
                found[g, h] = found[h, g] = -sums / size if size > 0 else 0
        closest += found.max(1).sum(0)
        adjacent += sum(found[g, g + 1] for g in range(0, k - 1, 2))
    none = {"adjacent": None, "adjacent_permuted": dict.fromkeys(("mean", "low", "high")), "adjacent_p": None}
    odd = none if k % 2 else permuted("adjacent", adjacent / (heads // 2))
    return {"heads_in_group": k, **odd, **permuted("closest", closest / heads)}


# ---- maps


class Mean:
    """A mean that is None where nothing was added."""

    def __init__(self):
        self.sum, self.count = 0.0, 0

    def add(self, values):
        self.sum += float(values.sum())
        self.count += values.size

    def value(self):
        return self.sum / self.count if self.count else None


def effective_ranks(maps):
    """Of the maps [W, T, T] that are not zero."""
    values = np.linalg.svd(maps.astype(float), compute_uv=False)
    sums = values.sum(1)
    shares = values[sums > 0] / sums[sums > 0, None]
    return np.exp(-(shares * np.log(shares, out=np.zeros_like(shares), where=shares > 0)).sum(1))


def correlations(a1, a2, visible):
    """Pearson's, of the rows in which it is defined."""
    n = visible.sum(1)
    x, y = a1.astype(float), a2.astype(float)
    mean_x, mean_y = x.sum(2) / n, y.sum(2) / n
    dx, dy = (np.where(visible, v - mean[..., None], 0) for v, mean in ((x, mean_x), (y, mean_y)))
    xx, yy, xy = (dx * dx).sum(2), (dy * dy).sum(2), (dx * dy).sum(2)
    rounding = 2.0**-20  # of an element: a few 2^-24, from its own and from that of its logit
    varies = (xx > n * (rounding * mean_x) ** 2) & (yy > n * (rounding * mean_y) ** 2) & (n >= 3)
    return xy[varies] / np.sqrt(xx * yy)[varies]


def pair_statistics(found, a1, a2, s, visible):
    """Adds the rows of a pair of maps [W, T, T]; returns the effective maps. s [W, T]"""
    rounding = 2.0**-14  # below 512 an lse in fp32 has errors below 2^-15, and with it each element of a row
    effective = a1.astype(float) - s[..., None] * a2.astype(float)
    mass = (a1.astype(float) + np.abs(s)[..., None] * a2.astype(float)).sum(2)
    rest, negative = np.abs(effective).sum(2), np.maximum(0, -effective).sum(2)
    found["correlation"].add(correlations(a1, a2, visible))
    found["cancelled"].add(1 - rest / mass)
    more = rest > rounding * mass
    found["negative"].add(negative[more] / rest[more])
    return effective


def map_statistics(dump, layer):
    """The numbers of `maps` of a layer."""
    names = ("correlation", "cancelled", "negative", "effective_rank", "effective_rank_signal", "effective_rank_noise")
    attention, found = dump.attention("maps", layer), {name: Mean() for name in names}
    signals, noises = dump.output_heads(len(attention.q))
    s = dump.part("maps", f"layer.{layer}.s") if dump.noise else None
    for h, signal in enumerate(signals):
        a1 = attention.maps(signal)
        a2 = attention.maps(noises[h]) if dump.noise else a1
        if not np.isfinite(a1[..., 0].sum() + a2[..., 0].sum()):
            raise RunError(
                f"the attention maps of layer {layer} are not finite: the model's weights are broken or training "
                "diverged"
            )
        if not dump.noise:
            found["effective_rank"].add(effective_ranks(a1[:RANK_WINDOWS]))
            continue
        effective = pair_statistics(found, a1, a2, s[:, :, h], attention.visible)
        found["effective_rank"].add(effective_ranks(effective[:RANK_WINDOWS]))
        found["effective_rank_signal"].add(effective_ranks(a1[:RANK_WINDOWS]))
        if h == 0 or noises[h] != noises[h - 1]:  # else counted with the signal head before
            found["effective_rank_noise"].add(effective_ranks(a2[:RANK_WINDOWS]))
    return {name: mean.value() for name, mean in found.items()}


# ---- lambda


def is_punctuation(text):
    """Whether the bytes are ASCII punctuation, apart from white space."""
    rest = [b for b in text if b not in b" \t\n\v\f\r"]
    return bool(rest) and all(33 <= b < 127 and not chr(b).isalnum() for b in rest)


def token_classes(dump, tokens, texts):
    """The class of each token [W, T]. texts: of the vocabulary, or None"""
    V = len(dump.counts)
    classes = np.full(V, CLASSES.index("other"))
    if texts:
        classes[[v for v in range(min(V, len(texts))) if is_punctuation(texts[v])]] = CLASSES.index("punctuation")
    probed = np.bincount(tokens.ravel(), minlength=V)
    order = [v for v in range(V) if classes[v] == CLASSES.index("other") and probed[v]]
    order.sort(key=lambda v: (dump.counts[v], -v))
    total = 0
    for v in order:
        total += probed[v]
        if total > RARE_SHARE * tokens.size:
            break
        classes[v] = CLASSES.index("rare")
    found = classes[tokens]
    found[:, 0] = CLASSES.index("first")
    return found


def lambda_statistics(s, classes, has_text):
    found = {}
    for number, name in enumerate(CLASSES):
        own = s if name == "all" else s[classes == number]
        shown = {"mean": float(own.mean()), "sd": float(own.std())} if own.size else {"mean": None, "sd": None}
        found[name] = shown | {"count": own.size} if has_text or name != "punctuation" else None
    return found


# ---- rounding


def to_bf16(x):
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def exact_rows(attention, v, sink):
    """[heads, W, T, DV] in double. sink: with its factor, from the stored lse"""
    rows = []
    for head, value in enumerate(attention.values):
        q, k = attention.q[head].astype(float), attention.k[head].astype(float)
        scores = np.where(attention.visible, attention.scale * (q @ k.swapaxes(1, 2)), -np.inf)
        most = scores.max(2, keepdims=True)
        p = np.exp(scores - most)
        factor = np.exp(most[..., 0] - attention.lse[head]) if sink else 1 / p.sum(2)
        rows.append(p @ v[value].astype(float) * factor[..., None])
    return np.stack(rows)


def emulated_rows(attention, v):
    """[heads, W, T, DV] as bf16 attention computes them, of rounded inputs."""
    rows = []
    for head, value in enumerate(attention.values):
        q, k = attention.q[head], attention.k[head]
        scores = np.where(attention.visible, np.float32(attention.scale) * (q @ k.swapaxes(1, 2)), np.float32(-np.inf))
        p = np.exp(scores - scores.max(2, keepdims=True))
        rows.append(to_bf16(to_bf16(p) @ v[value] / p.sum(2, keepdims=True)))
    return np.stack(rows)


def errors(got, exact, term):
    """The errors of the rows that are not left out. term: what the exact row is the remainder of, or the row itself"""
    error, norm, of = (((x.astype(float)) ** 2).sum(-1) for x in (got - exact, exact, term))
    kept = norm > 2.0**-80 * of
    return np.sqrt(error[kept] / norm[kept])


def rounding_of_layer(dump, layer, sink):
    name = f"layer.{layer}"
    inputs, v = dump.attention("rows", layer), np.moveaxis(dump.part("rows", f"{name}.v"), 2, 0)
    signals, noises = dump.output_heads(len(inputs.q))
    factors = lambda what: np.moveaxis(dump.part("rows", f"{name}.{what}"), 2, 0)[..., None] if dump.noise else None
    s, s_rounded, stored = factors("s"), factors("s_rounded"), dump.has(f"rows.0.{name}.heads")
    found = {"layer": layer}
    if stored:
        got = np.moveaxis(dump.part("rows", f"{name}.heads"), 2, 0)
        combined = np.moveaxis(dump.part("rows", f"{name}.combined"), 2, 0) if dump.noise else None
        wanted = {"": (exact_rows(inputs, v, sink), s), "_of_inputs": None}
    else:
        read = dump.attention("rows", layer)
        read.q, read.k, v_read = to_bf16(inputs.q), to_bf16(inputs.k), to_bf16(v)
        got = emulated_rows(read, v_read)
        combined = to_bf16(got[signals] - s_rounded.astype(np.float32) * got[noises]) if dump.noise else None
        wanted = {"": (exact_rows(read, v_read, False), s_rounded), "_of_inputs": (exact_rows(inputs, v, False), s)}
    for end, exact in wanted.items():
        rows, factor = exact or (None, None)
        of = {"heads": errors(got, rows, rows) if exact else np.zeros(0), "combined": np.zeros(0)}
        if exact and dump.noise:
            of["combined"] = errors(combined, rows[signals] - factor * rows[noises], rows[signals])
        for kind, x in of.items():
            found[f"{kind}{end}_mean"] = float(x.mean()) if x.size else None
            found[f"{kind}{end}_max"] = float(x.max()) if x.size else None
    return found


# ---- the program


def token_texts(path, V):
    """The texts of the tokens, by a tokenizer.bin, or as bytes; None where they have none."""
    if path is None:
        return [bytes([v]) for v in range(256)] if V == 256 else None
    try:
        data = Path(path).read_bytes()
        size = struct.unpack_from("<I", data, 12)[0]
        lengths, at, texts = struct.unpack_from(f"<{size}I", data, 56), 56 + 4 * size, []
        if data[:8] != b"DV2TOK\0\1" or at + sum(lengths) > len(data):
            raise ValueError
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    except (struct.error, ValueError):
        raise RunError(f"{path}: not a tokenizer.bin, or damaged") from None
    for length in lengths:
        texts.append(data[at : at + length])
        at += length
    return texts


def probe(dump, checkpoint, config, tokenizer, seed):
    """The JSON of a checkpoint."""
    weights, state = Tensors(checkpoint / "model.safetensors"), checkpoint / "trainer_state.json"
    beside = checkpoint / "tokenizer.bin"
    texts = token_texts(tokenizer or (beside if beside.exists() else None), len(dump.counts))
    tokens = dump.part("maps", "tokens").astype(int)
    classes, layers = token_classes(dump, tokens, texts), []
    for l in range(dump.layers):
        name, found = f"model.layers.{l}.self_attn.o_proj.weight", None
        if not dump.noise:
            heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
            key = xxhash.xxh3_64_intdigest(name.encode(), seed)
            found = subtraction(weights.read(name), heads, groups, key)
        row = {"layer": l, "subtraction": found, "maps": map_statistics(dump, l), "lambda": None}
        if dump.noise:
            s = dump.part("maps", f"layer.{l}.s")
            row["lambda"] = lambda_statistics(s, np.broadcast_to(classes[..., None], s.shape), texts is not None)
        layers.append(row)
    return {
        "attention": config.get("attention", "baseline"),
        "step": read_json(state, {}).get("step") if state.exists() else None,
        "parameters": sum(math.prod(t["shape"]) for t in weights.header.values()),
        "windows": len(tokens),
        "positions": tokens.shape[1],
        "rank_windows": min(RANK_WINDOWS, len(tokens)),
        "token_text": texts is not None,
        "seed": seed,
        "layers": layers,
    }


def rounding(dump, sink):
    tokens = dump.part("rows", "tokens")
    found = {"windows": len(tokens), "tokens": tokens.shape[1], "emulated": not dump.has("rows.0.layer.0.heads")}
    return found | {"layers": [rounding_of_layer(dump, l, sink) for l in range(dump.layers)]}


def shown(x, width):
    return f" {'-' if x is None else f'{x:.3f}':>{width}}"


def print_subtraction(layers):
    print(
        "opposition of the blocks of o_proj of two heads, cos(W, -W'), and with permuted columns (95 % of draws)\n"
        f"  {'layer':>5}" + "".join(f" {name:>8} {'permuted':>8} {'':>17} {'p':>7}" for name in ("adjacent", "closest"))
    )
    for row in layers:
        line = f"  {row['layer']:5d}"
        for name in ("adjacent", "closest"):
            s = row["subtraction"]
            drawn = s[f"{name}_permuted"]
            span = "" if drawn["low"] is None else f"({drawn['low']:6.3f} .. {drawn['high']:6.3f})"
            line += shown(s[name], 8) + shown(drawn["mean"], 8) + f" {span:>17}" + shown(s[f"{name}_p"], 7)
        print(line)


def print_layers(found):
    names = {"correlation": "correlation", "cancelled": "cancelled", "negative": "negative", "effective_rank": "rank"}
    names |= {"effective_rank_signal": "signal", "effective_rank_noise": "noise"}
    print("maps: correlation of a pair, cancelled and negative mass; effective ranks of all, signal and noise maps")
    print(f"  {'layer':>5}" + "".join(f" {name:>11}" for name in names.values()))
    for row in found["layers"]:
        print(f"  {row['layer']:5d}" + "".join(shown(row["maps"][name], 11) for name in names))
    if found["layers"][0]["lambda"] is None:
        return
    advice = "" if found["token_text"] else " (without a tokenizer, punctuation is unknown: give --tokenizer FILE)"
    print(f"factor of the noise heads by token{advice}\n  {'layer':>5}" + "".join(f" {name:>11}" for name in CLASSES))
    for row in found["layers"]:
        means = ((row["lambda"][name] or {}).get("mean") for name in CLASSES)
        print(f"  {row['layer']:5d}" + "".join(shown(mean, 11) for mean in means))


def print_probe(found):
    print(
        f"{found['attention']}, {found['parameters']} parameters: the first {found['positions']} tokens of "
        f"{found['windows']} windows; ranks of {found['rank_windows']} of them"
    )
    if found["layers"][0]["subtraction"]:
        print_subtraction(found["layers"])
    print_layers(found)


def print_rounding(found):
    print(
        f"rounding errors of {'emulated ' if found['emulated'] else ''}attention in bf16, relative to the norm of a "
        f"row, on {found['tokens']} tokens of {found['windows']} windows"
    )
    columns = ("heads_mean", "heads_max", "combined_mean", "combined_max")
    print(f"  {'layer':>5} {'heads: mean':>12} {'max':>12} {'pairs: mean':>12} {'max':>12}")
    for row in found["layers"]:
        values = (math.nan if row[name] is None else row[name] for name in columns)
        print(f"  {row['layer']:5d}" + "".join(f" {x:12.3g}" for x in values))


def parse_arguments(words):
    parser = cli.Parser(
        prog="lab probe",
        description="Measures what the attention of a checkpoint has learned, and its rounding errors in bf16.",
    )
    parser.add_argument("dump", help="a file of --dump-qkv, of an evaluation of the checkpoint")
    parser.add_argument("--checkpoint", required=True, help="the directory of the checkpoint")
    parser.add_argument("--out", help="write what it has learned as JSON")
    parser.add_argument("--rounding", help="add the rounding errors to this file, which --eval-out has written")
    parser.add_argument("--tokenizer", help="tokenizer.bin (default: that of the checkpoint, or bytes)")
    parser.add_argument("--seed", type=int, default=1, help="of the permutations (default: 1)")
    a = parser.parse_args(words)
    if not a.out and not a.rounding:
        parser.error("--out or --rounding is required")
    if not 0 <= a.seed <= M64:
        parser.error(f"--seed {a.seed}: must be 0 to 2^64 - 1")
    return a


def write_json(path, value):
    run_directory.write_atomic(Path(path), json.dumps(value, indent=1) + "\n")


def main(words):
    a = parse_arguments(words)
    python_environment.ensure("lab")
    try:
        dump, checkpoint = Dump(a.dump), Path(a.checkpoint)
        config = read_json(checkpoint / "config.json", {})
        if a.out:
            found = probe(dump, checkpoint, config, a.tokenizer, a.seed)
            print_probe(found)
            write_json(a.out, found)
        if a.rounding:
            evaluation = read_json(a.rounding, {})
            evaluation["attention_rounding"] = rounding(dump, config.get("attention") in ("sink", "off_by_one"))
            print_rounding(evaluation["attention_rounding"])
            write_json(a.rounding, evaluation)
    except RunError as error:
        cli.fail("lab probe", str(error))
    except OSError as error:
        cli.fail("lab probe", f"{error.filename or a.out}: {error.strerror}")
    return 0
