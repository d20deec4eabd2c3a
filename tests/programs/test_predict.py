"""predict_diffv2: its report and its JSON. tests/prediction.h tests what it predicts, tests/golden has its text."""

import re

import pytest
from program import program, read_json, run


def predict(*options, **more):
    return run(*program("PREDICT_DIFFV2", "./predict_diffv2"), *options, **more)


def test_json(tmp_path):
    """the JSON of 4096 GPUs has the numbers of the report"""
    path = tmp_path / "prediction.json"
    model = "--preset 13.1b --batch-size 1 --ranks 4096 --zero 2 --recompute 1 --device H200"
    out = predict(model, "--out", path).done().out
    shown = [float(x) for x in re.search(r"^  step +(\S+) to +(\S+) ms", out, re.M).groups()]
    json = read_json(path)
    for end, ms in zip(("fast", "slow"), shown):
        assert abs(json[end]["step_ms"] - ms) < 0.01
    assert shown[0] < json["step_ms"] < shown[1]
    assert abs(sum(json["classes"].values()) / json["step_ms"] - 1) < 1e-9
    # 2 bytes per weight, and the gradients of two layers and the embedding; the rest is sharded 4096 times
    assert 36e9 < json["memory_bytes"] < 44e9 and json["fits"]


def test_bytes_of_ranks():
    """a rank sends half of the gradients and of the parameters, and with --zero 3 parameters once more"""
    model = "--layers 12 --hidden 256 --heads 4 --kv-heads 2 --head-dim 64 --ffn 768 --vocab 512 --seq-len 32"
    out = predict("--device h100", model, "--batch-size 1 --ranks 2 --link-gbs 10").done().out
    rows = re.findall(r"^  (\d) +[\d.]+ MiB +([\d.]+) MiB +([\d.]+) ms ", out[out.index("by --zero level") :], re.M)
    assert [row[0] for row in rows] == list("0123")
    sent = [float(row[1]) for row in rows]
    for mib, row in zip(sent, rows):
        assert abs(float(row[2]) - mib * 1.048576 / 10) < 0.1
    count = lambda what: int(re.search(rf"^  {what} +(\d+)$", out, re.M)[1]) / 2**20
    # sums of gradients in fp32, gathered too with --zero 0; parameters in bf16 from 1 on
    assert abs(sent[0] / (0.5 * 8 * count("total")) - 1) < 0.01 and sent[1] == sent[2]
    assert abs(sent[1] / (0.5 * 6 * count("total")) - 1) < 0.01
    # all 12 layers in the backward except for the last two, and in the forward except for the first two, which the
    # update has gathered
    more = 0.5 * 10 / 12 * 2 * (count("attention") + count("MLP"))
    assert abs(sent[3] - sent[2] - more) < 0.01 * more


@pytest.mark.parametrize("option", ["--lr 3", "--checkpoint-every 2", "--threads 1", "--train-data none*.bin --keep 1"])
def test_options_of_training(option, tmp_path):
    """options that concern training alone are accepted and change nothing"""
    assert predict("--device A100", option, cwd=tmp_path).done() == predict("--device A100", cwd=tmp_path).done()
