#!/usr/bin/env python3
"""Compares `--eval --quantize` with a model in plain Python, for all variants. The weights are those of the fixtures of
dev/reference. The last line is "N passed, N failed".

A number that is closer to the middle of two integers than NEAR may be rounded either way in fp32. Its case has the
tolerance COARSE instead of FINE.

Usage: tests/quantize_test.py TRAIN_DIFFV2
Exit status: 0 all passed, 1 some failed, 2 usage.
"""

import json
import math
import pathlib
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev/reference"))
import fixtures
from variants import VARIANTS

SPECS = ["w16a16", "w4a16", "w16a4", "w4a4", "w4a4:tensor", "logits4", "w3a8:tensor+logits3"]
NEAR, FINE, COARSE = 1e-5, 1e-5, 1e-2


class Rounding:
    """What a SPEC rounds; `closest`: the distance of the quotients so far from the middle of two integers."""

    def __init__(self, spec):
        self.weight = self.activation = self.logits = 16
        self.whole = ":tensor" in spec
        self.closest = 1.0
        for part in spec.replace(":tensor", "").split("+"):
            if part.startswith("logits"):
                self.logits = int(part[6:])
            else:
                self.weight, self.activation = map(int, part[1:].split("a"))

    def row(self, row, largest, bits):
        if bits == 16 or largest == 0:
            return row
        levels = 2 ** (bits - 1) - 1
        quotients = [x * levels / largest for x in row]
        self.closest = min(self.closest, *(abs(abs(q - math.floor(q)) - 0.5) for q in quotients))
        return [round(q) * largest / levels for q in quotients]  # round() rounds ties to even

    def matrix(self, rows, bits):
        largest = [max(map(abs, row)) for row in rows]
        return [self.row(row, max(largest) if self.whole else own, bits) for row, own in zip(rows, largest)]


def product(x, weight):
    return [[sum(a * b for a, b in zip(row, column)) for column in weight] for row in x]


def add(x, y):
    return [[a + b for a, b in zip(r, s)] for r, s in zip(x, y)]


def rmsnorm(row, weight, eps):
    scale = 1 / math.sqrt(sum(x * x for x in row) / len(row) + eps)
    return [x * scale * w for x, w in zip(row, weight)]


def rotated(row, t, theta):
    half = len(row) // 2
    angles = [t * theta ** (-i / half) for i in range(half)]
    first = [x * math.cos(a) - y * math.sin(a) for x, y, a in zip(row, row[half:], angles)]
    return first + [y * math.cos(a) + x * math.sin(a) for x, y, a in zip(row, row[half:], angles)]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


class Model:
    """The weights of a fixture, as lists of rows; vectors are lists of numbers."""

    def __init__(self, path, rounding):
        tensors, metadata = fixtures.safetensors_read(path.read_bytes())
        self.config, self.rounding = json.loads(metadata["config"]), rounding
        self.B, self.T = int(metadata["batch_size"]), int(metadata["seq_len"])
        self.variant = VARIANTS[self.config.get("attention", "baseline")]
        self.tokens = struct.unpack(f"<{self.B * self.T + 1}H", tensors["tokens"][2])
        self.w = {}
        for name, (_, shape, data) in filter(lambda item: fixtures.is_weight(item[0]), tensors.items()):
            values = struct.unpack(f"<{len(data) // 4}f", data)
            width = shape[-1]
            rows = [list(values[i : i + width]) for i in range(0, len(values), width)]
            self.w[name] = rows if len(shape) == 2 else rows[0]

    def linear(self, x, layer, names):
        """The outputs of the matrices `names`, which are one matrix, on the rows x."""
        parts = [self.w[f"model.layers.{layer}.{name}.weight"] for name in names]
        fused = self.rounding.matrix(sum(parts, []), self.rounding.weight)
        y, outputs = product(self.rounding.matrix(x, self.rounding.activation), fused), []
        for part in parts:
            outputs.append([row[: len(part)] for row in y])
            y = [row[len(part) :] for row in y]
        return outputs

    def attend(self, queries, keys, values, t, sink):
        logits = [sum(a * b for a, b in zip(queries[t], key)) / math.sqrt(len(key)) for key in keys[: t + 1]]
        logits = self.rounding.row(logits, max(map(abs, logits)), self.rounding.logits)
        p = [math.exp(x) for x in logits]
        total = sum(p) + (0 if sink is None else math.exp(sink))
        return [sum(a * row[i] for a, row in zip(p, values)) / total for i in range(len(values[0]))]

    def factor(self, layer, projected, head):
        """The factor of an output head's noise head: of a token's projected numbers, or of parameters."""
        name = f"model.layers.{layer}.self_attn.lambda"
        kind, number = self.variant.lambda_, 1.0
        if kind == "exp":
            q1, k1, q2, k2 = (self.w[f"{name}_{i}"] for i in ("q1", "k1", "q2", "k2"))
            dot = lambda a, b: math.exp(sum(x * y for x, y in zip(a, b)))
            number = dot(q1, k1) - dot(q2, k2) + 0.8 - 0.6 * math.exp(-0.3 * layer)
        elif kind != "one":
            number = projected[head] if kind == "input" else self.w[name][head if kind == "head" else 0]
        return {"sigmoid": sigmoid, "tanh": math.tanh, "linear": float}[self.variant.factor](number)

    def attention(self, x, layer):
        """x (B*T,C) after its norm -> (B*T,NH*D)"""
        v, c, theta = self.variant, self.config, self.config["rope_theta"]
        NH, NKV, D = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        OH, DQ, DV = NH // v.merge, D // v.split, D * v.merge
        extra = ["lambda_proj"] * (v.lambda_ == "input") + ["gate_proj"] * (v.gate != "none")
        q, k, value, *more = self.linear(x, layer, ["self_attn." + n for n in ["q_proj", "k_proj", "v_proj", *extra]])
        noise_heads = OH // v.signals if v.signals else 0
        group = (OH + noise_heads) // (NKV // v.merge)
        sinks = self.w.get(f"model.layers.{layer}.self_attn.sinks", [0] * NH)
        rows = []
        for n in range(self.B * self.T):
            t, begin = n % self.T, n - n % self.T
            heads = lambda m, i, width, turn=True: [
                rotated(row[i * width :][:width], u, theta) if turn else row[i * width :][:width]
                for u, row in enumerate(m[begin : n + 1])
            ]
            out = []
            for h in range(OH):
                maps = []
                block, within = divmod(h, v.signals or 1)
                first = block * (v.signals + 1)
                queries = {"none": [h], "last": [h, OH + block]}.get(v.noise, [first + within, first + v.signals])
                for m, query in enumerate(queries):
                    kv = query // group
                    key = kv * v.key_sets + m % v.key_sets
                    sink = None if v.sink == "none" else sinks[h]
                    values = heads(value, kv, DV, False)
                    maps.append(self.attend(heads(q, query, DQ), heads(k, key, DQ), values, t, sink))
                if v.signals:
                    s = self.factor(layer, more[0][n] if more else None, h)
                    maps[0] = [a - s * b for a, b in zip(*maps)]
                if v.xsa:
                    own = value[n][h // (OH // (NKV // v.merge)) * DV :][:DV]
                    share = sum(a * b for a, b in zip(maps[0], own)) / sum(b * b for b in own)
                    maps[0] = [a - share * b for a, b in zip(maps[0], own)]
                out.append(maps[0])
            if v.norm == "head":
                init = 0.8 - 0.6 * math.exp(-0.3 * layer)
                weight = self.w[f"model.layers.{layer}.self_attn.subln.weight"]
                out = [[(1 - init) * y for y in rmsnorm(o, weight, 1e-5)] for o in out]
            out = sum(out, [])
            if v.norm == "all":
                out = rmsnorm(out, self.w[f"model.layers.{layer}.self_attn.subln.weight"], c["rms_norm_eps"])
            if v.gate != "none":
                gates = [sigmoid(g) for g in more[-1][n]]
                out = [o * gates[i // DV if v.gate == "head" else i] for i, o in enumerate(out)]
            rows.append(out)
        return rows

    def loss(self):
        w, eps = self.w, self.config["rms_norm_eps"]
        x = [w["model.embed_tokens.weight"][token] for token in self.tokens[:-1]]
        for layer in range(self.config["num_hidden_layers"]):
            normed = lambda name: [rmsnorm(row, w[f"model.layers.{layer}.{name}.weight"], eps) for row in x]
            heads = self.attention(normed("input_layernorm"), layer)
            x = add(x, self.linear(heads, layer, ["self_attn.o_proj"])[0])
            gate, up = self.linear(normed("post_attention_layernorm"), layer, ["mlp.gate_proj", "mlp.up_proj"])
            hidden = [[g * sigmoid(g) * u for g, u in zip(r, s)] for r, s in zip(gate, up)]
            x = add(x, self.linear(hidden, layer, ["mlp.down_proj"])[0])
        x = [rmsnorm(row, w["model.norm.weight"], eps) for row in x]
        logits = product(x, w.get("lm_head.weight", w["model.embed_tokens.weight"]))
        losses = [math.log(sum(map(math.exp, row))) - row[token] for row, token in zip(logits, self.tokens[1:])]
        return sum(losses) / len(losses)


def measured(trainer, path, directory):
    B = fixtures.unpack(path, directory)["batch_size"]
    T = json.loads((directory / "config.json").read_text())["max_position_embeddings"]
    command = [*trainer, "--init", directory, "--eval", "--val-data", directory / "tokens.bin", "--val-steps", 1]
    command += ["--batch-size", B, "--seq-len", T, "--threads", 1]
    command += ["--quantize", ",".join(SPECS), "--eval-out", directory / "eval.json"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{path.stem}: status {done.returncode}: {done.stderr.strip()[-300:]}")
    return json.loads((directory / "eval.json").read_text())


def differences(trainer, path):
    """What is wrong, one line each; and the number of cases that were compared with the tolerance FINE."""
    wrong, fine = [], 0
    with tempfile.TemporaryDirectory() as directory:
        found = measured(trainer, path, pathlib.Path(directory))
    for spec, got in zip(SPECS, found["quantized"], strict=True):
        rounding = Rounding(spec)
        want = Model(path, rounding).loss()
        precise = rounding.closest > NEAR
        fine += precise
        if not abs(got["val_loss"] - want) <= (FINE if precise else COARSE) * want or got["spec"] != spec:
            wrong.append(f"{path.stem} {spec}: loss {got['val_loss']:.9g}, by the definition {want:.9g}")
        if abs(got["difference"] - (got["val_loss"] - found["loss"])) > 1e-12:
            wrong.append(f"{path.stem} {spec}: difference {got['difference']} of {got['val_loss']}, {found['loss']}")
    return wrong, fine


def main(arguments):
    if len(arguments) != 1:
        print("usage: quantize_test.py TRAIN_DIFFV2", file=sys.stderr)
        return 2
    failed = fine = 0
    for variant in VARIANTS:
        wrong, count = differences(arguments[0].split(), ROOT / f"dev/reference/fixtures/{variant}_a.safetensors")
        print(*(f"FAIL {line}" for line in wrong) if wrong else [f"ok   {variant}"], sep="\n")
        failed, fine = failed + bool(wrong), fine + count
    # A case rounds about 5000 numbers, a share of 2 NEAR of which is near a tie: a tenth of the cases is expected.
    enough = fine >= 0.8 * len(SPECS) * len(VARIANTS)
    print(f"{'ok  ' if enough else 'FAIL'} {fine} of {len(SPECS) * len(VARIANTS)} cases had no number near a tie")
    failed += not enough
    print(f"{len(VARIANTS) + 1 - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
