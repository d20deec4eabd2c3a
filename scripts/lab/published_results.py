"""published_results.py: published results beside those of a study. Sources: arXiv 2410.05258 (DIFF V1), the DIFF V2
blog post of January 2026, arXiv 2505.06708 (gated attention), and public independent reproductions."""

from statistics import median

from . import layers, stats, tables

V1, V2, GATED = "DIFF V1, arXiv 2410.05258", "DIFF V2, blog post of January 2026", "gated attention, arXiv 2505.06708"


def arm_of(study, attention, suffix=""):
    """The first unmatched arm of an attention variant, with a preset of this suffix."""
    for arm in study.arms:
        options = next(run for run in study.runs if run.arm == arm).options
        preset = str(options.get("preset", ""))
        same = options["attention"] == attention and preset.endswith(suffix) and (suffix or not preset.endswith("h"))
        if same and not arm.endswith("-p"):
            return arm
    return None


def gap(study, attention, against="baseline", suffix=""):
    arm, other = arm_of(study, attention), arm_of(study, against, suffix)
    if not arm or not other or arm == other:
        return None
    e = stats.paired_gap(*(tables.final_losses(study, a, tables.main_rate(study)) for a in (arm, other)))
    if not e:
        return None
    return f"{e.mean:+.4f}" + (
        f" [{e.low:+.4f}, {e.high:+.4f}], n = {e.n}" if e.half is not None else ", one seed, no interval"
    )


def of_layers(study, source, *keys):
    """A function of an attention variant: a list for each key of the numbers of the layers that have all of them in
    layers.layer_table(); empty without layers."""
    table = layers.layer_table(study, tables.main_rate(study))

    def values(attention):
        found = table.get(arm_of(study, attention), {}).get(source, {})
        rows = zip(*(found.get(key, []) for key in keys))
        return list(zip(*(row for row in rows if all(map(stats.finite, row)))))

    return values


def both(say, values):
    """say(*values(attention)) of three variants, of those with values."""
    names = (("Transformer", "baseline"), ("DIFF V1", "diff_v1"), ("DIFF V2", "diff_v2"))
    found = [(name, values(attention)) for name, attention in names]
    return "; ".join(f"{name} {say(*lists)}" for name, lists in found if lists) or None


def largest(high, low):
    """'max / median' of the layer with the largest maximum."""
    return "{:.1f} / {:.2f}".format(*max(zip(high, low)))


def span(low, high, mean):
    return f"{min(low):.3f} to {max(high):.3f}, mean {stats.mean(mean):.3f}"


def speed(study, attention):
    lr = tables.main_rate(study)
    rates = {}
    for name in ("baseline", attention):
        arm = arm_of(study, name)
        found = [s for r in study.runs_of(arm, lr) if (s := r.tokens_per_s)] if arm else []
        rates[name] = median(found) if found else None
    if not rates[attention] or not rates["baseline"] or attention == "baseline":
        return None
    return f"{100 * (rates[attention] / rates['baseline'] - 1):+.0f}%"


def spike_counts(study):
    parts = []
    for row in tables.spike_rows(study):
        if row["grad"]["score"] is not None and row["arm"] in (arm_of(study, "baseline"), arm_of(study, "diff_v2")):
            parts.append(f"{row['label']} at {row['lr']:g}: {row['grad']['score']:.2f}% / {row['loss']['score']:.2f}%")
    return "; ".join(parts) or None


def rows(study):
    """[(claim, published, source, here, limits of the comparison)] of the claims that this study tests."""
    first = study.runs[0]
    here = (
        f"{first.parameters / 1e6:.2f}M parameters and {first.tokens / 1e6:.3g}M tokens"
        if first.parameters
        else f"{first.tokens / 1e6:.3g}M tokens"
    )
    small = f"Here {here}, on other text"
    found = [
        (
            "Loss, DIFF V2 minus Transformer",
            "-0.02 to -0.03",
            V2,
            gap(study, "diff_v2"),
            "Published for large dense models and a mixture of experts on trillions of tokens. "
            f"{small}: the sign may be compared, the magnitude hardly.",
        ),
        (
            "Loss, DIFF V2 minus Transformer with 1.5 NH heads",
            "below 0",
            V2 + ", ablation 4",
            gap(study, "diff_v2", "baseline", "-1.5h"),
            f"{small}; the attention parameters of the two agree but for lambda.",
        ),
        (
            "Loss, DIFF V2 minus Transformer, an independent reproduction",
            "-0.002",
            "a speed run at the size of GPT-2 small",
            gap(study, "diff_v2"),
            f"One run per side at about 124M parameters, without an interval. {small}.",
        ),
        (
            "Loss, DIFF V1 minus Transformer",
            "-0.025 (3.062 against 3.087)",
            V1 + ", 1.4B",
            gap(study, "diff_v1"),
            f"Published at 1.4B parameters and 10B tokens. {small}. "
            "V1 has half as many heads of twice the width: 2 for a model with 4.",
        ),
        (
            "Loss, DIFF V1 minus Transformer, independent reproductions",
            "-0.009; -0.029; +0.005",
            "880M on 105B tokens; 209M on 190M, one seed; a speed run at the size of GPT-2 small",
            gap(study, "diff_v1"),
            f"{small}. The 209M run was worse until about step 1000.",
        ),
        (
            "Loss, pairs across groups minus DIFF V2",
            "above 0, and unstable",
            V2 + ", ablation 1",
            gap(study, "diff_v2_cross_group", "diff_v2"),
            f"{small}.",
        ),
        (
            "Loss, without lambda minus DIFF V2",
            "above 0, stable",
            V2 + ", ablation 2",
            gap(study, "diff_v2_no_lambda", "diff_v2"),
            f"{small}.",
        ),
        (
            "Loss, without the sigmoid minus DIFF V2",
            "above 0",
            V2 + ", ablation 3",
            gap(study, "diff_v2_no_sigmoid", "diff_v2"),
            f"{small}.",
        ),
        (
            "Spike scores, gradient norm / loss",
            "fewer for DIFF V2 at large rates; other measures reduced OLMo 2's gradient norm score from 0.40 to 0.03",
            V2 + "; OLMo 2, arXiv 2501.00656",
            spike_counts(study),
            f"The score requires {stats.SPIKE_LEAST} steps, and depends on the length of the run.",
        ),
        (
            "Largest / median attention logit",
            "Transformer 318.0 / 5.4; DIFF V1 38.8 / 3.3",
            V1 + ", 3B",
            both(largest, of_layers(study, "eval", "logit_max", "logit_median")),
            "Published for 3B parameters; outliers grow over billions of tokens. "
            f"{small}; on the first 64 tokens of a window.",
        ),
        (
            "Largest / median hidden activation",
            "Transformer 3608.6 / 0.6; DIFF V1 1688.2 / 1.2",
            V1 + ", 3B",
            both(largest, of_layers(study, "eval", "hidden_max", "hidden_median")),
            "As above. Massive activations (above 100 and 1000 times the median) do not appear in models this small.",
        ),
        (
            "Context RMS of a head",
            "Transformer [1/sqrt(n), 1); DIFF V2 (0, sqrt 2); the norm of V1 magnifies by up to sqrt(n)",
            V2,
            both(span, of_layers(study, "stats", *(f"context_rms_{key}" for key in ("min", "max", "mean")))),
            "The published ranges assume values of unit RMS. The measured ones are of the output of the heads, with "
            "the learned values.",
        ),
        (
            "Attention mass on the first position",
            "0.467; with a gate 0.048",
            GATED + ", 15B parameters",
            both(lambda x: f"{stats.mean(x):.3f}", of_layers(study, "stats", "first_mass_effective")),
            "Sinks do not appear before roughly 100M training tokens; a uniform causal map of 256 positions has 0.02.",
        ),
        (
            "Sink rate on 64 tokens, %",
            "sinks in all large Transformers",
            "Gu et al. 2024",
            both(lambda x: f"{stats.mean(x):.2f}", of_layers(study, "eval", "sink_rate_effective")),
            "Share of heads whose mean attention to position 0 exceeds 0.3.",
        ),
        (
            "Throughput against the Transformer",
            "DIFF V1 -9% (3B, 2K), -12% (4K), -6% (13B); DIFF V2 negligible",
            V1 + "; " + V2,
            "; ".join(f"{n} {x}" for n, a in (("DIFF V1", "diff_v1"), ("DIFF V2", "diff_v2")) if (x := speed(study, a)))
            or None,
            "Published on GPUs with flash kernels, where attention is a small share of a step. Here on the machine "
            "that is named below, which may have had other load.",
        ),
    ]
    return [row for row in found if row[3]]
