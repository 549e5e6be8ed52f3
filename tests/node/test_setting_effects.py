"""Every setting has an effect: it arrives where it is acted upon, and a test shows what it does there.

What arrives from where (option, variable, file) and which wins is in tests/config/test_sources.py and
tests/cli/test_serve.py. A setting without a row here fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.config.machines import machine
from tests.config.test_sources import GOES_WITH, VALUES
from tests.kinds.markers import names_of_tests
from tests.kinds.tables import ROOT
from tierkv.config import Settings
from tierkv.core.eval_results import Thresholds
from tierkv.core.state import Limits
from tierkv.node.clock import NodeClock
from tierkv.node.control import FrontSettings
from tierkv.node.front import limits_of
from tierkv.node.incarnation import front_settings
from tierkv.node.tier_room import TierRoom
from tierkv.node.worker_command import WorkerResources, device_worker_config, disk_worker_config, worker_config
from tierkv.workers.device.config import DeviceWorkerConfig
from tierkv.workers.disk_config import DiskWorkerConfig
from tierkv.workers.worker_config import WorkerConfig

RESOURCES = WorkerResources(channel_fd=1, arena_fd=2, arena_bytes=3, lifeline_fd=4)


def limits(settings: Settings) -> Limits:
    return limits_of(front_settings(settings), settings.nvme_bytes or 2**40, settings.disk_bytes or 2**40)


def worker(settings: Settings) -> WorkerConfig:
    return worker_config(settings, RESOURCES, NodeClock(0.0, 0.0), 5, sends_rows=True, discard_index=False)


def disk_worker(settings: Settings) -> DiskWorkerConfig:
    return disk_worker_config(settings, RESOURCES, NodeClock(0.0, 0.0), sends_rows=True, discard_index=False)


def device_worker(settings: Settings) -> DeviceWorkerConfig | None:
    if not settings.device_names:
        return None
    return device_worker_config(settings, RESOURCES, 0, epoch=1, export_fd=6)


def front(settings: Settings) -> FrontSettings:
    return front_settings(settings)


def eval_limits(settings: Settings) -> Thresholds:
    return settings.eval_limits


def itself(settings: Settings) -> Settings:
    """The supervisor acts on the settings as they are."""
    return settings


THRESHOLD_TEST = "test_each_limit_holds_at_its_value_and_not_a_hair_beyond"

# setting -> what it becomes for those who act on it, by name; and the test that shows the effect
EFFECTS: dict[str, tuple[dict[str, Callable[[Settings], Any]], str]] = {
    "data_dir": ({"data_dir": worker}, "e2e/test_cli.py::test_files_appear_below_the_data_directory_and_nowhere_else"),
    "socket_dir": ({"socket_dir": front}, "e2e/test_settings.py::test_sizes_names_and_levels_do_what_they_say"),
    "read_only": ({"read_only": worker}, "e2e/test_small_disks.py::test_a_node_that_reads_only_changes_nothing"),
    "name": (
        {"name": itself},
        "tests/config/test_settings.py::test_nodes_without_a_data_directory_are_told_apart_by_name",
    ),
    "host_bytes": ({"host_bytes": limits}, "e2e/test_caps.py::test_host_memory"),
    "nvme_bytes": ({"nvme_bytes": limits}, "e2e/test_caps.py::test_room_on_disk"),
    "nvme_reserve_bytes": (
        {"nvme_reserve_bytes": front, "reserve_bytes": worker},
        "tests/workers/test_storage.py::test_the_reserve_is_not_written_into",
    ),
    "disk_dir": (
        {"disk_dir": disk_worker},
        "e2e/test_disk_tier.py::test_what_left_nvme_is_found_on_disk_with_the_right_bytes_also_after_a_restart",
    ),
    "disk_bytes": (
        {"disk_bytes": limits},
        "e2e/test_disk_tier.py::test_the_disk_tier_keeps_to_its_capacity",
    ),
    "disk_reserve_bytes": (
        {"disk_reserve_bytes": front, "reserve_bytes": disk_worker},
        "tests/node/test_tier_room.py::test_a_shortage_names_the_settings_of_its_own_tier",
    ),
    "disk_rescan_seconds": (
        {"rescan_seconds": disk_worker},
        "e2e/test_disk_tier.py::test_what_one_node_has_put_there_another_one_finds",
    ),
    "disk_inflight": (
        {"disk_inflight": limits, "io_threads": disk_worker},
        "tests/node/test_setting_effects.py::test_demotions_and_reads_of_the_disk_tier_have_threads_of_their_own",
    ),
    "gpu_devices": (
        {"gpu_devices": front, "device": device_worker},
        "e2e/test_gpu_tier.py::test_two_devices_are_apart_and_each_engine_uses_its_own",
    ),
    "gpu_bytes": (
        {"gpu_bytes": front, "device_bytes": limits, "num_bytes": device_worker},
        "e2e/test_gpu_tier.py::test_a_pool_keeps_to_gpu_bytes_whatever_is_stored_there",
    ),
    "nvme_codec": (
        {"codec": worker},
        "e2e/test_lossless.py::test_a_node_that_compresses_gives_back_the_same_bytes_from_less_disk",
    ),
    "disk_codec": (
        {"codec": disk_worker},
        "e2e/test_lossless.py::test_what_leaves_nvme_is_written_anew_in_the_codec_of_the_disk_tier",
    ),
    "session_bytes": ({"session_bytes": limits}, "e2e/test_caps.py::test_what_one_session_holds"),
    "quarantine_bytes": ({"quarantine_bytes": worker}, "e2e/test_caps.py::test_quarantine"),
    "quarantine_days": ({"quarantine_seconds": worker}, "tests/storage/test_quarantine.py::test_what_is_too_old_goes"),
    "shares": (
        {"shares": limits},
        "e2e/test_shares.py::test_a_tenant_keeps_its_share_of_both_tiers_while_another_one_floods_them",
    ),
    "ttl": (
        {"ttl": limits},
        "e2e/test_expiry.py::test_what_a_tenant_has_not_used_for_its_time_is_gone_from_every_tier_also_over_a_restart",
    ),
    "auto_pin_share": (
        {"auto_pin_share": limits},
        "tests/core/test_auto_pins.py::test_the_hottest_prefixes_are_pinned_within_their_share",
    ),
    "pinned_share": (
        {"pinned_share": limits},
        "tests/core/test_pins.py::test_pins_can_not_fill_a_tier_and_the_refusal_says_who_has_what",
    ),
    "journal_bytes": (
        {"journal_bytes": worker},
        "tests/storage/test_journal.py::test_the_oldest_rows_go_when_there_is_too_much",
    ),
    "journal_days": ({"journal_seconds": worker}, "tests/storage/test_journal.py::test_rows_that_are_too_old_go"),
    "slab_bytes": ({"slab_bytes": limits}, "e2e/test_settings.py::test_sizes_names_and_levels_do_what_they_say"),
    "extent_bytes": ({"extent_bytes": limits}, "e2e/test_settings.py::test_sizes_names_and_levels_do_what_they_say"),
    "seal_after_seconds": (
        {"seal_after_seconds": limits},
        "e2e/test_settings.py::test_sizes_names_and_levels_do_what_they_say",
    ),
    "touch_seconds": (
        {"touch_seconds": limits},
        "tests/core/test_cascade.py::test_last_use_goes_to_disk_every_so_many_seconds",
    ),
    "prefill_tokens_per_second": (
        {"prefill_tokens_per_second": limits},
        "tests/core/test_ghosts.py::test_asking_for_what_was_evicted_is_told_as_a_regret_with_what_it_costs",
    ),
    "eviction_policy": (
        {"policy": limits},
        "tests/core/value/test_orders.py::test_with_data_density_is_something_else",
    ),
    "nvme_write_bytes_per_day": (
        {"nvme_write_bytes_per_day": limits},
        "tests/core/test_admission.py::test_past_the_budget_only_what_was_used_again_is_written",
    ),
    "index_map_bytes": (
        {"index_map_bytes": worker},
        "tests/storage/test_catalog.py::test_a_huge_map_is_had_whole",
    ),
    "codec": (
        {"codec": front},
        "e2e/test_fp8_gate.py::test_a_model_that_has_passed_gets_the_codec_and_others_stay_raw",
    ),
    **{
        name: ({name.removeprefix("eval_"): eval_limits}, f"tests/core/test_eval_results.py::{THRESHOLD_TEST}")
        for name in ("eval_min_agreement", "eval_max_kl", "eval_max_perplexity_ratio", "eval_min_retrieval")
    },
    "io_threads": (
        {"io_threads": worker},
        "tests/workers/test_storage.py::test_a_read_finds_a_thread_while_writes_hold_all_others",
    ),
    "inflight_writes": (
        {"inflight_writes": limits},
        "tests/core/test_cascade.py::test_no_more_reads_and_writes_than_allowed_are_under_way",
    ),
    "inflight_reads": (
        {"inflight_reads": limits},
        "tests/core/test_cascade.py::test_no_more_reads_and_writes_than_allowed_are_under_way",
    ),
    "direct_io": ({"direct_io": worker}, "tests/storage/test_directory.py::test_direct_transfers_can_be_switched_off"),
    "huge_pages": (
        {"huge_pages": itself},
        "tests/node/test_arena.py::test_huge_pages_are_asked_for_only_where_the_kernel_allows_them",
    ),
    "drain_seconds": (
        {"drain_seconds": itself},
        "e2e/test_node_lifecycle.py::test_a_budget_that_is_too_short_is_kept_and_the_loss_is_said",
    ),
    "lock_wait_seconds": (
        {"lock_wait_seconds": itself},
        "tests/node/test_lock.py::test_a_start_waits_for_the_lock_and_takes_it_when_it_comes_free",
    ),
    "reconcile_seconds": (
        {"reconcile_seconds": worker},
        "e2e/test_capacity.py::test_files_that_somebody_removed_stop_counting",
    ),
    "hang_seconds": ({"hang_seconds": front}, "e2e/test_health.py::test_a_hung_front_is_replaced_and_engines_go_on"),
    "stuck_seconds": (
        {"stuck_seconds": worker},
        "tests/workers/test_pulse.py::test_a_call_that_does_not_come_back_closes_the_gate_until_it_does",
    ),
    "inline_users": (
        {"has_gateway": front},
        "e2e/test_tenants.py::test_a_user_that_was_not_named_gets_neither_a_session_nor_a_connection",
    ),
    "inline_dir": (
        {"inline_dir": itself},
        "e2e/test_tenants.py::test_no_tenant_sees_or_harms_what_another_stored_in_any_tier",
    ),
    "inline_bytes": (
        {"inline_bytes": itself},
        "tests/gateway/test_service.py::test_what_a_user_holds_is_capped_over_all_of_its_sessions",
    ),
    "metrics_port": (
        {"metrics_port": front},
        "e2e/test_cli.py::test_metrics_equal_what_was_done_and_stand_still_when_nothing_is",
    ),
    "metrics_host": (
        {"metrics_host": front},
        "tests/node/test_supervisor.py::test_a_metrics_address_that_can_not_be_had_names_the_setting",
    ),
    "record": (
        {"record": front},
        "e2e/test_recording.py::test_what_engines_ask_is_recorded_replayed_and_purged",
    ),
    "record_bytes": (
        {"record_bytes": itself},
        "tests/workers/test_recorder.py::test_a_full_file_becomes_the_older_one_and_each_can_be_read_by_itself",
    ),
    "log_level": (
        {"log_level": worker},
        "e2e/test_settings.py::test_sizes_names_and_levels_do_what_they_say",
    ),
}


@pytest.mark.scenario("B238", then="every setting there is has a row with its effect; a new one without fails")
def test_every_setting_has_an_effect() -> None:
    assert set(EFFECTS) == set(Settings.model_fields)


def settings(**given: Any) -> Settings:
    usual = {"data_dir": "/d", "disk_dir": "/k", "inline_users": "7"}
    return Settings.model_validate(usual | given, context={"machine": machine()})


@pytest.mark.scenario("B238", then="each setting, changed alone, arrives changed where it is acted upon")
@pytest.mark.parametrize("name", EFFECTS)
def test_a_setting_arrives_where_it_is_acted_upon(name: str) -> None:
    given = VALUES[name][2]
    usual: dict[str, Any] = {"inline_users": ""} if name == "inline_users" else {}
    for field, made_of in EFFECTS[name][0].items():
        beside = GOES_WITH.get(name, {})
        before = getattr(made_of(settings(**usual)), field, None)
        after = getattr(made_of(settings(**beside, **{name: given})), field)
        assert before != after, field
        if isinstance(given, Path):
            assert str(after) == str(given)
        elif isinstance(given, int | float) and field == name:
            assert after == given


def test_demotions_and_reads_of_the_disk_tier_have_threads_of_their_own() -> None:
    assert disk_worker(settings(disk_inflight=3)).io_threads == 6


def test_room_on_disk_is_what_was_asked_for_less_the_reserve() -> None:
    assert TierRoom(2**30, 2**20).num_bytes == 2**30


@pytest.mark.parametrize("name", EFFECTS)
def test_the_test_of_a_setting_exists(name: str) -> None:
    path, _, test = EFFECTS[name][1].partition("::")
    assert test in names_of_tests((ROOT / path).read_text())
