from benchmarks.published import orders, predict_collectives, predict_steps, read, scaling, scores


def test_every_published_step_has_an_estimate_or_a_reason():
    rows = list(predict_steps(print))
    assert len(rows) == len(read("steps"))
    without = [row for row in rows if not row.get("ratio")]
    assert all(row["check"].startswith("not run: ") for row in without) and len(without) < 5
    assert all(1 / 2 < row["ratio"] < 2 for row in rows if row.get("ratio"))  # beyond that, work is counted wrongly


def test_what_training_does_on_more_gpus_is_within_5_points():
    steps = [row for row in predict_steps(print) if row.get("ratio")]
    apart = dict(scaling(steps))
    assert {name.partition("-")[0] for name in apart} == {"mpt", "vitg14", "titan"}
    bsnider = [is_right for name, is_right in orders(steps) if name.startswith("bsnider")]
    assert len(bsnider) > 10 and all(bsnider)


def test_collectives_are_those_of_nvlink_and_the_scores_what_is_wanted():
    rows = list(predict_collectives(print))
    found = list(scores([*rows, *predict_steps(print)]))
    assert {row["wanted"] for row in found if row.get("wanted")} == {"0.150", "5.0", "25%"}
    assert [row["score"] for row in found if row["check"] != "ok"] == []
    assert {row["source"] for row in rows} == {one["id"] for one in read("collectives")}
    assert all(row["size_bytes"] >= 2**20 for row in rows if row.get("ratio"))
