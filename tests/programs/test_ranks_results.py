"""Ranks compute the same as one rank, whatever their number, --zero, micro-batches and the order of their messages."""

import re
import shutil

import pytest
from program import checkpoint, expect_printed_losses, expect_same, expect_speed, read_json, records, tensors
from ranks import EXPERTS, MOST_ZERO, TOLERANCE, expect_losses, expect_same_weights, resume_ranks, run_ranks
from ranks import train_ranks


@pytest.mark.parametrize(
    "model",
    [
        "--attention diff_v2_gated_head --window 5 --yoco --qk-norm --recompute 2 --sparse-blocks 1 "
        "--sparse-block-size 4",
        f"--attention diff_v2 {EXPERTS} --router-aux 0 --router-bias --doc-mask --separator 10",
        "--attention diff_v2",
        "--attention diff_v1",
        "--attention diff_v2_layer_lambda --qk-norm --no-tie-embeddings",
        "--attention sink --doc-mask --separator 10 --recompute 2",
        "--attention diff_v1 --window 5 --full-every 2 --doc-mask --separator 10 --parametrization completep "
        "--base-width 6 --base-depth 1",
        f"--attention baseline {EXPERTS} --router-aux 1 --dense-layers 1",
    ],
)
@pytest.mark.full(cases_from=2)
@pytest.mark.slow(cases_from=5)
def test_one_rank(short, model):
    """ranks, micro-batches and --zero give the losses of one rank"""
    options = f"--steps 12 --total-batch 192 {model}"
    train_ranks(short / "one", 1, options, "--batch-size 12").done()
    for ranks, batch_size, zero in [(2, 2, 0), (3, 4, 1), (4, 1, 2), (2, 6, 3)]:
        if "--router-aux 1" in model and ranks * batch_size < 12:
            continue  # the load-balancing loss counts the tokens of the micro-steps so far
        more = f"--batch-size {batch_size} --zero {zero} --check-ranks-every 1"
        train_ranks(short / f"run{ranks}{zero}", ranks, options, more).done()
        expect_losses(short / "one", short / f"run{ranks}{zero}")


@pytest.mark.full
def test_update_norms(short):
    """statistics of layers and updates, and a largest norm of updates, are those of one rank"""
    keys = ("grad_norm", "update_norm")
    options = "--steps 12 --total-batch 192 --stats-every 6 --change=1-12:update-norm=0.02"
    found = {}
    for ranks, zero in [(1, 0), (2, 0), (3, 1), (2, 2), (2, 3)]:
        run = short / f"run{ranks}{zero}"
        train_ranks(run, ranks, options, f"--batch-size {12 // ranks} --zero {zero} {EXPERTS}").done()
        found[run.name] = [[r[k] for k in keys] for r in records(run, "stats")]
        found[run.name] += [[r["update_norm"], r["update_scale"]] for r in records(run, "train")]
    one = found.pop("run10")
    assert len(one) == 3 * 3 + 12 and min(scale for _, scale in one[9:]) < 1
    for name, other in found.items():
        assert len(other) == len(one), name
        for x, y in zip([x for row in one for x in row], [x for row in other for x in row]):
            assert abs(x - y) <= 1e-2 * abs(x), (name, x, y)


@pytest.mark.full
def test_router_bias(short):
    """a router's bias and losses are those of the tokens of all ranks"""
    # The bias follows the loads of all ranks, also if no loss of the routers needs them.
    found = {}
    for ranks in (1, 2, 3):
        run = short / f"bias{ranks}"
        options = f"--steps 4 --total-batch 192 --batch-size {12 // ranks} --router-bias --router-bias-rate 0.01"
        train_ranks(run, ranks, options, f"--dense-layers 1 --zero {ranks - 1}", EXPERTS).done()
        name = "model.layers.2.block_sparse_moe.gate.e_score_correction_bias"
        bias = tensors(checkpoint(run, 4) / "model.safetensors")[name]
        found[ranks] = (bias, records(run, "train"))
        assert bias.shape == (4,) and abs(bias).sum() > 0
        assert (bias == found[1][0]).all(), ranks
        assert len(found[ranks][1]) == 4
        for one, other in zip(found[1][1], found[ranks][1]):
            for key in ("router_aux", "router_z"):
                assert one[key] > 0 and abs(one[key] - other[key]) <= TOLERANCE * one[key], (ranks, key, other)


@pytest.mark.parametrize(
    ("total_batch", "model"),
    [
        (96, "--matmul-dtype bf16 --window 5 --yoco --qk-norm --attention diff_grouped_2"),
        (192, "--matmul-dtype fp32 --attention diff_v1"),
        (192, "--matmul-dtype fp8 --recompute 1 --attention diff_v2_gated_head --no-tie-embeddings"),
        (96, f"--dense-layers 1 --shared-experts 1 --router-bias --recompute 2 --attention sink {EXPERTS}"),
    ],
    ids=["diff_grouped_2 with YOCO in bf16", "diff_v1 in fp32", "diff_v2_gated_head in fp8", "sink with experts"],
)
@pytest.mark.full(cases_from=2)
@pytest.mark.slow(cases_from=3)
def test_zero_levels(short, total_batch, model):
    """--zero 0, 1, 2 and 3 give the same bits"""
    zero = [short / f"zero{level}" for level in range(MOST_ZERO + 1)]
    # of 3 ranks one validates two batches, the others one
    options = "--steps 6 --batch-size 2 --val-data train.bin --val-steps 4 --val-every 2"
    for level, run in enumerate(zero):
        train_ranks(run, 3, options, f"--total-batch {total_batch} --zero {level}", model).done()
    expect_same_weights(zero[0], zero[1], 6)
    one_step = total_batch == 96  # --zero 2 sums micro-steps in another order
    if one_step:
        expect_same_weights(zero[0], zero[2], 6)
    expect_losses(zero[0], zero[2], 0 if one_step else TOLERANCE)
    expect_same_weights(zero[2], zero[3], 6)
    expect_losses(zero[2], zero[3], 0)
    losses = [[record["loss"] for record in records(run, "val")] for run in zero[2:]]
    assert losses[0] and losses[0] == losses[1]


@pytest.mark.slow
def test_muon(short):
    """Muon gives the losses of one rank, and the same bits at all levels of --zero and after a resume at another"""
    options = "--steps 4 --batch-size 2 --optimizer normuon --attention diff_v2_cross_group"
    options += f" --no-tie-embeddings --dense-layers 1 --router-aux 0 --total-batch 96 {EXPERTS}"
    train_ranks(short / "one", 1, options).done()
    zero = [short / f"zero{level}" for level in range(MOST_ZERO + 1)]
    for level, run in enumerate(zero):
        stop = "--stop-after 2" if level in (0, MOST_ZERO) else ""
        train_ranks(run, 3, options, f"--zero {level} --check-ranks-every 1 {stop}").done()
    resume_ranks(zero[0], 3, f"--zero {MOST_ZERO}").done()
    resume_ranks(zero[MOST_ZERO], 3, "--zero 0").done()
    for run in zero:
        expect_losses(short / "one", run)
        expect_same(checkpoint(zero[1], 4), checkpoint(run, 4), without=["trainer_state.json"])
    train_ranks(
        short / "groups", 4, options.replace("96", "128"), "--zero 2 --zero-group 2 --check-ranks-every 1"
    ).done()


EIGHT = [pytest.param(8, group, marks=pytest.mark.slow) for group in (2, 4)]


@pytest.mark.parametrize(("ranks", "group"), [(4, 2), *EIGHT])
@pytest.mark.full
def test_groups(short, ranks, group):
    """--zero-group gives the losses of one rank, the same bits at all levels of --zero, and whole checkpoints"""
    options = f"--steps 6 --total-batch {ranks * 2 * 32} --check-ranks-every 1"
    train_ranks(short / "one", 1, options, f"--batch-size {ranks * 4}").done()
    for level in range(MOST_ZERO + 1):
        more = f"--batch-size 2 --zero {level} --zero-group {group}"
        train_ranks(short / f"zero{level}", ranks, options, more).done()
        expect_losses(short / "one", short / f"zero{level}")
    expect_same_weights(short / "zero0", short / "zero1", 6)
    expect_same_weights(short / "zero2", short / "zero3", 6)  # micro-steps are summed in another order
    # Four ranks without groups continue the run of a group with the same losses as the run of one rank.
    for name in ("one", "zero3"):
        shutil.copytree(short / name, short / f"{name}more")
    resume_ranks(short / "onemore", 1, "--steps 8").done()
    resume_ranks(short / "zero3more", 1, "--generate 3 --prompt-tokens 1").done()  # one rank has no groups
    resume_ranks(short / "zero3more", 4, f"--steps 8 --zero-group 0 --batch-size {ranks}").done()
    expect_losses(short / "onemore", short / "zero3more")


@pytest.mark.parametrize("zero", [f"--zero {level}" for level in range(MOST_ZERO + 1)])
@pytest.mark.full
@pytest.mark.slow(cases_from=1)
def test_bucket_sizes(short, zero):
    """results are bitwise equal for all bucket sizes"""
    # Without clipping, which divides by the norm: that is a sum over buckets in double precision.
    for elements in (500, 3000, 1000000):
        options = f"--steps 4 --batch-size 2 --total-batch 192 --grad-clip 0 {zero}"
        train_ranks(short / str(elements), 3, options, BUCKET=str(elements)).done()
        expect_same_weights(short / "500", short / str(elements), 4)


@pytest.mark.full
def test_validation(short):
    """validation is the same for any number of ranks"""
    # All 40 windows, one by one; then in batches of three, of which the last has one.
    for ranks, run in [(1, short / "windows"), *((ranks, short / f"run{ranks}") for ranks in (1, 2, 3, 4))]:
        sizes = "--batch-size 1 --val-steps 40" if run.name == "windows" else "--batch-size 3 --val-steps 15"
        zero = ranks - 1 if ranks > 2 else 0
        options = f"--steps 2 --total-batch 576 --val-data train.bin {sizes} --zero {zero}"
        train_ranks(run, ranks, options).done()
        wanted, loss = (records(short / name, "val")[-1]["loss"] for name in ("windows", run.name))
        assert abs(loss - wanted) <= 1e-5 * wanted, ranks
        expect_speed(run, 576, ranks)
    for ranks in (1, 3):
        init = ["--init", checkpoint(short / "windows", 2), "--eval --val-data train.bin --val-steps 14"]
        result = run_ranks(ranks, *init, "--batch-size 3 --threads 1", cwd=short).done()
        assert abs(expect_printed_losses(result.out, 16) - wanted) <= 1e-5 * wanted, ranks


# ---- resumes


@pytest.mark.slow
def test_resume_with_other_ranks(short):
    """a checkpoint can be resumed with any number of ranks"""
    options = "--steps 12 --total-batch 192 --batch-size 1 --val-data train.bin --val-every 4"
    train_ranks(short / "whole", 1, options).done()
    for plan in [((4, 3), (2, 0), (1, 0)), ((1, 0), (3, 3), (4, 2)), ((2, 1), (2, 2), (4, 3))]:  # ranks, --zero
        run = short / str(plan[0][0])
        train_ranks(run, plan[0][0], options, f"--zero {plan[0][1]} --stop-after 3").done()
        resume_ranks(run, plan[1][0], f"--zero {plan[1][1]} --stop-after 7").done()
        resume_ranks(run, plan[2][0], f"--zero {plan[2][1]}").done()
        expect_losses(short / "whole", run)
        starts = [(start["ranks"], start["step"]) for start in read_json(run / "run.json")["starts"]]
        assert starts == [(ranks, step) for (ranks, _), step in zip(plan, (0, 3, 7))]


@pytest.mark.slow
def test_resume_with_the_same_ranks(short):
    """with as many ranks a resume is bitwise equal, and --zero 3 continues exactly what --zero 2 began"""
    options = "--steps 12 --total-batch 192 --batch-size 2"
    for name, zero, resumed in [("one", 1, ""), ("three", 3, ""), ("two", 2, "--zero 3")]:
        train_ranks(short / name, 3, options, f"--zero {zero} --stop-after 5").done()
        resume_ranks(short / name, 3, resumed).done()
        if name != "two":
            train_ranks(short / f"whole{zero}", 3, options, f"--zero {zero}").done()
            expect_same(checkpoint(short / f"whole{zero}", 12), checkpoint(short / name, 12))
    expect_same_weights(short / "whole3", short / "two", 12)


# ---- the order of messages
# LATE: messages of other ranks arrive late, so that a result that does not wait for them is wrong. EARLY: they arrive
# as soon as they are requested, so that a buffer that is still read, or not yet complete, has wrong data.


def train_with_samples(run, *options, **variables):
    """Trains three ranks. Returns the samples that they print."""
    options = [*options, "--steps 4 --sample-every 3 --checkpoint-every 2"]
    result = train_ranks(run, 3, *options, **variables).done()
    samples = re.findall(r"^--- sample after step \d.*?^---$", result.out, re.M | re.S)
    assert samples, result.out
    return samples


@pytest.mark.parametrize(
    ("options", "levels"),
    [("--total-batch 96", (0, 1, 2)), ("--total-batch 192 --check-ranks-every 3", (2,))],
    ids=["updates", "micro-steps"],
)
@pytest.mark.full(cases_from=1)
def test_late_messages(short, options, levels):
    """late or early messages of other ranks do not change results"""
    # A sample and a checkpoint wait for everything, so they are at different steps, and before step 2 only the forward
    # waits. With micro-steps, which --zero 2 sums in another order, a comparison of the ranks is the first to wait.
    options = f"--batch-size 2 {options}"
    early = train_with_samples(short / "early", options, f"--zero {levels[0]}", EARLY="1")
    for zero in levels:
        run = short / f"late{zero}"
        assert train_with_samples(run, options, f"--zero {zero}", LATE="4") == early
        expect_same_weights(short / "early", run, 2, 4)
        expect_losses(short / "early", run, 0)
        assert (
            len(records(run, "train")) == 4 and 4 < records(run, "train")[3]["comm_ms"] < records(run, "train")[3]["ms"]
        )


@pytest.mark.parametrize("gemm", ["fp32", "bf16"])  # products read the weights themselves, or rounded copies
def test_late_layers(short, gemm):
    """late or early parameters of layers do not change results"""
    # With --zero 3, which has no samples, only the computation of a layer waits for its parameters, and it must not
    # fetch those of another layer into the same place before it ends.
    options = (
        f"--steps 4 --batch-size 2 --total-batch 192 --matmul-dtype {gemm} --val-data train.bin --val-steps 4 "
        "--val-every 3 --checkpoint-every 2 --zero 3 --check-ranks-every 4 --no-tie-embeddings"
    )
    train_ranks(short / "early", 3, options, EARLY="1").done()
    train_ranks(short / "late", 3, options, LATE="4").done()
    expect_same_weights(short / "early", short / "late", 2, 4)
    expect_losses(short / "early", short / "late", 0)


@pytest.mark.full
def test_late_ends(short):
    """late or early gradients of the embedding and the LM head do not change results"""
    # The two take turns in one place. In a model of one layer no other wait comes between them. Where the embedding
    # has the gradients of tokens 1 and 2, the other group has padding, which the norm includes.
    data = bytearray((short / "train.bin").read_bytes())
    data[1024::2] = bytes(x % 32 for x in data[1024::2])
    (short / "train.bin").write_bytes(data)
    for zero, order in [(1, {}), (2, {"LATE": "4"}), (3, {"EARLY": "1"})]:
        options = f"--layers 1 --no-tie-embeddings --steps 4 --batch-size 2 --checkpoint-every 2 --zero {zero}"
        train_ranks(short / f"zero{zero}", 3, options, **order).done()
        expect_same_weights(short / "zero1", short / f"zero{zero}", 2, 4)
        expect_losses(short / "zero1", short / f"zero{zero}", 0)
