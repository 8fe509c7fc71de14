"""`rdzv.Store` in the workers of a real job."""

from __future__ import annotations

from tests.e2e.kit import Stage

USER = ("-m", "tests.e2e.workers.store_user")


def test_workers_meet_through_the_store_and_what_the_job_keeps_there_outlives_the_round(stage: Stage) -> None:
    served = stage.daemon()
    nodes = [stage.launch(name, "2", restarts=1, worker=USER) for name in ("a", "b")]
    assert [node.ends() for node in nodes] == [0, 0]
    for restart in (0, 1):
        met = stage.progress(event="met", restart=restart)
        assert sorted((e["rank"], e["total"], e["own"], e["fresh"]) for e in met) == [(0, 3, 1, True), (1, 3, 2, True)]
    kept = stage.progress(event="kept")
    assert [(e["restart"], e["position"], e["starts"]) for e in kept] == [(1, "17", 4)] * 2
    (cut_short,) = stage.progress(event="cut short")
    assert "round" in cut_short["text"]
    assert " error " not in served.text()
