from __future__ import annotations

from pathlib import Path

from tests.storage.samples import Sample
from tests.workers.desk import SECONDS, Desk
from tierkv.core.instructions import FileLost


def test_a_file_that_somebody_removed_is_told_once_and_its_row_goes(tmp_path: Path) -> None:
    gone, kept = Sample(seed=1), Sample(seed=200)
    with Desk(tmp_path / "data", reconcile_seconds=0.05) as desk:
        for op, sample in enumerate((gone, kept)):
            desk.store(sample, op)
        assert desk.worker._tier.index.drain(SECONDS)
        path = next((tmp_path / "data" / "models").rglob(f"{gone.name.key.hex()}.kv"))
        path.unlink()
        lost = desk.wait_type(FileLost)
        assert (lost.group, lost.rank, lost.key) == (gone.group, 0, gone.name.key)
        assert desk.worker._tier.index.drain(SECONDS)
        seen = len(desk.reports)
        for _ in range(20):
            desk.health(lambda _: True)
        told = [report for report in desk.reports[seen:] if isinstance(report, FileLost)]
        assert len(told) <= 1  # by a round that had begun before its row had gone
        assert desk.load(kept, 9).valid == 3
        desk.stop()
    with Desk(tmp_path / "data") as desk:
        assert (desk.recovered().extents, desk.recovered().index_rows) == (1, 1)
