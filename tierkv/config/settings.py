"""The settings of a node: the only declaration.

Options of `tierkv serve`, conf/tierkv.toml and `tierkv config` are made from these fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from tierkv.config.machine import Machine
from tierkv.config.parsers import (
    device_names,
    named,
    one_of,
    parse_devices,
    parse_host,
    parse_name,
    parse_number,
    parse_path,
    parse_positive,
    parse_share,
    parse_shares,
    parse_switch,
    parse_ttl,
    parse_users,
    share_rules,
    ttl_rules,
    user_numbers,
    whole,
)
from tierkv.config.sizes import GiB, MiB, format_size, human_size, parse_size
from tierkv.core.codec_gate import CODECS
from tierkv.core.eval_results import Thresholds
from tierkv.core.value.names import PolicyName
from tierkv.errors import ConfigError
from tierkv.wire.socket_directory import default_inline_dir, default_socket_dir, excess_bytes, user_socket_name

PAGE_BYTES = 4096
MOST_BYTES = 2**60
MOST_GPU_BYTES = 2**44  # each page of it has a generation, which every process of an engine maps
MIN_JOURNAL_BYTES, MAX_JOURNAL_BYTES = 64 * 2**10, 64 * MiB
MIN_RECORD_BYTES = MiB

Size = Annotated[int, named(parse_size)]
Seconds = Annotated[float, named(parse_number)]
PositiveNumber = Annotated[float, named(parse_positive)]
PositiveSeconds = PositiveNumber
Share = Annotated[float, named(parse_share)]
Directory = Annotated[Path, named(parse_path)]
DirectIo = Literal["auto", "off"]
Codec = Literal["raw", "fp8"]
FileCodecName = Literal["raw", "zstd"]
LogLevel = Literal["debug", "info", "warning", "error"]


def _setting(
    default: Any, meaning: str, *, unit: str = "", default_text: str = "", example: str = "", topic: str = ""
) -> Any:
    """One field: `default_text` where the default is computed, `topic` opens a new part of the file."""
    words = {"unit": unit, "default_text": default_text, "example": example, "topic": topic}
    return Field(default=default, description=meaning, json_schema_extra=dict(words))


class Settings(BaseModel):
    """Every setting of a node, checked and complete. Fields that depend on the machine are filled in before validation,
    from `context={"machine": Machine}` or the machine this runs on. Raises ConfigError."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data_dir: Directory | None = _setting(
        None,
        "Directory on NVMe for the KV cache. Without it the node lives in memory only and writes nothing to disk.",
        default_text="none, memory only",
        example='"/var/lib/tierkv"',
        topic="Where",
    )
    socket_dir: Directory = _setting(
        Path(),
        "Directory of the node's sockets, its endpoint. Clients find it by the data directory, or by TIERKV_ENDPOINT.",
        default_text="$XDG_RUNTIME_DIR/tierkv/<digest of data_dir>, or the same below /tmp/tierkv-<uid>",
        example='"/run/tierkv"',
    )
    name: Annotated[str, named(parse_name)] = _setting(
        "", "Tells nodes without a data directory of one user apart; part of the default of socket_dir."
    )
    host_bytes: Size = _setting(
        0,
        "Host memory for KV blocks, taken at start. More than the machine or control group has is refused.",
        unit="size",
        default_text="a quarter of the memory, or of the control group's limit if that is less",
        example='"64GiB"',
        topic="How much",
    )
    gpu_devices: Annotated[str, named(parse_devices)] = _setting(
        "",
        "GPUs in whose memory the node keeps a pool of what is hottest, by the number that nvidia-smi shows, with "
        "commas between: engines on the same GPU copy from it without crossing the bus. `cpu` is a pool in host "
        "memory instead, for machines without a GPU; further ones are `cpu:1`, `cpu:2` and so on. Needs gpu_bytes. "
        "Empty: no such tier (docs/operations.md).",
        example='"0,1"',
    )
    gpu_bytes: Size | None = _setting(
        None,
        "Memory of each of gpu_devices for the pool there. The engine must leave it free; where less can be had, the "
        "pool is smaller, or there is none and the node serves without.",
        unit="size",
        default_text="none; has to be said where there are gpu_devices",
        example='"8GiB"',
    )
    read_only: Annotated[bool, named(parse_switch)] = _setting(
        False,
        "Serve the files that are in data_dir and disk_dir and change nothing there; what engines store stays in "
        "memory. Several such nodes can share a directory.",
    )
    nvme_bytes: Size | None = _setting(
        None,
        "Room in data_dir: extents, temporary files, quarantine and index together. What the disk really has left, "
        "less nvme_reserve_bytes, is never exceeded.",
        unit="size",
        default_text="80 % of what is free, plus what the node's files take already",
        example='"1TiB"',
    )
    nvme_reserve_bytes: Size = _setting(
        0,
        "Free space of the file system that the node leaves alone, whoever fills it.",
        unit="size",
        default_text="5 % of the file system, at most 10GiB",
        example='"10GiB"',
    )
    disk_dir: Directory | None = _setting(
        None,
        "Directory on a big, slower disk or a shared file system, below NVMe: what has to leave data_dir goes there, "
        "and is read from there when that is quicker than computing it. Several nodes may share it. Needs data_dir.",
        default_text="none, what leaves NVMe is dropped",
        example='"/mnt/kv/tierkv"',
    )
    disk_bytes: Size | None = _setting(
        None,
        "Room in disk_dir for what this node sees there, whoever has put it there. What the file system really has "
        "left, less disk_reserve_bytes, is never exceeded.",
        unit="size",
        default_text="80 % of what is free, plus what the files there take already",
        example='"20TiB"',
    )
    disk_reserve_bytes: Size = _setting(
        10 * GiB,
        "Free space of disk_dir's file system that the node leaves alone, whoever fills it. Not reckoned from its "
        "size: a file server that doesn't answer must not hold up a start.",
        unit="size",
    )
    nvme_codec: Annotated[FileCodecName, named(one_of(*get_args(FileCodecName)))] = _setting(
        "raw",
        "How files in data_dir are written. zstd: smaller without loss, for more work at each write and read; it pays "
        "on a slow or small disk (docs/operations.md). Files of either kind are read, whichever this says.",
    )
    disk_codec: Annotated[FileCodecName, named(one_of(*get_args(FileCodecName)))] = _setting(
        "raw",
        "How files in disk_dir are written, like nvme_codec. Where they differ, files are written anew on their way "
        "there. Nodes of before this setting leave zstd files alone.",
    )
    session_bytes: Size = _setting(
        0,
        "What one engine process may hold in leases and tickets at one time.",
        unit="size",
        default_text="half of host_bytes",
        example='"32GiB"',
    )
    quarantine_bytes: Size = _setting(
        GiB,
        "Damaged files that are kept for a look, oldest removed first. Part of nvme_bytes. 0: none is kept.",
        unit="size",
    )
    quarantine_days: Seconds = _setting(7.0, "Days after which a damaged file is removed.", unit="days")
    shares: Annotated[str, named(parse_shares)] = _setting(
        "",
        "Whose which part of each tier is: model: and a name or digits of the fingerprint, or tenant: and a name as in "
        "ttl, with commas between; of several that fit the first counts. Who uses less is borrowed from, and has it "
        "back when it wants it: then victims come first from those who use more. Empty: no shares.",
        example='"model:llama=40%, tenant:acme=20%"',
    )
    ttl: Annotated[str, named(parse_ttl)] = _setting(
        "",
        "How long what nobody uses is kept, by tenant: its salt, = and a time like 12h or 7d, with commas between. "
        "`default` is whoever is not named, `none` who has no salt, digest:0123abcd a salt by its digest as "
        "`tierkv du --by tenant` shows it, user:1001 one of inline_users. Empty: as long as there is room.",
        example='"acme=7d, default=30d"',
    )
    pinned_share: Share = _setting(
        0.1,
        "What pins may keep of each tier at most, all together, so that they can't fill it: a share like 10% or 0.1. "
        "0: nothing can be pinned.",
    )
    auto_pin_share: Share = _setting(
        0.0,
        "Share of host_bytes, part of pinned_share, for automatic pins: the prefixes that save most stay in memory as "
        "long as they do. Eviction keeps what is hot anyway; 0 is no automatic pins.",
    )
    journal_bytes: Size = _setting(
        0,
        "What the journal of evictions and movements may take, oldest rows removed first. Part of nvme_bytes.",
        unit="size",
        default_text="1/64 of nvme_bytes, at least 64KiB and at most 64MiB",
        example='"64MiB"',
    )
    journal_days: PositiveSeconds = _setting(30.0, "Days after which rows of the journal are removed.", unit="days")
    slab_bytes: Size = _setting(
        64 * MiB,
        "Piece of host memory that one block size takes at a time. No block can be larger. A multiple of 4KiB.",
        unit="size",
        topic="Shape",
    )
    extent_bytes: Size = _setting(
        16 * MiB, "Most bytes of KV in one file, in one shard: the unit of writing and evicting.", unit="size"
    )
    seal_after_seconds: PositiveSeconds = _setting(
        10.0, "An extent that has not grown for so long is sealed, and written to disk.", unit="seconds"
    )
    touch_seconds: PositiveSeconds = _setting(
        5.0, "How often last-used times are written to the index, all together.", unit="seconds"
    )
    index_map_bytes: Size = _setting(
        64 * MiB, "First size of the index's memory map; it grows by itself. A multiple of 4KiB.", unit="size"
    )
    reconcile_seconds: PositiveSeconds = _setting(
        300.0,
        "How often the files in data_dir are held against what is counted: others may remove some.",
        unit="seconds",
    )
    disk_rescan_seconds: PositiveSeconds = _setting(
        300.0,
        "How often disk_dir is looked through for what other nodes have put there or removed.",
        unit="seconds",
    )
    prefill_tokens_per_second: PositiveNumber = _setting(
        12_000.0,
        "Tokens that an engine prefills in a second at the start of a prompt: what recomputing costs is reckoned "
        "from it, until an engine of the model has told its own rate.",
        unit="tokens/second",
        topic="What stays",
    )
    eviction_policy: Annotated[PolicyName, named(one_of(*get_args(PolicyName)))] = _setting(
        "density",
        "What goes first when a tier is full. density: what saves least for its bytes, by how blocks of its kind were "
        "used again. For comparison: lru, last use alone; arc; gdsf; literal, tokens saved x hit rate.",
    )
    nvme_write_bytes_per_day: Size = _setting(
        0,
        "What may be written to NVMe a day, from the drive's endurance. While it lasts all is written; past it, what "
        "was used again, the dearest first. 0: no limit.",
        unit="size",
        example='"2TiB"',
    )
    codec: Annotated[Codec, named(one_of(*CODECS))] = _setting(
        "raw",
        "How blocks are stored: raw, as they are; or fp8, in half the room of 16-bit ones in every tier, with a small "
        "error, for models that `tierkv eval` has passed (docs/fp8.md); all others stay raw. Needs data_dir.",
        topic="fp8, behind an eval",
    )
    eval_min_agreement: Share = _setting(
        0.95,
        "Share of the next tokens that must be the same with a coded prefix as with a raw one, each predicted from the "
        "true ones before it.",
    )
    eval_max_kl: Annotated[float, named(parse_number)] = _setting(
        0.01,
        "Most that the predictions of the next token may differ on average: Kullback-Leibler divergence.",
        unit="nats",
    )
    eval_max_perplexity_ratio: PositiveNumber = _setting(
        1.02, "Most that the perplexity of what follows a prefix may grow, as a ratio."
    )
    eval_min_retrieval: Share = _setting(
        0.9,
        "Share of the facts hidden in a long context that must be recalled with a coded prefix, of those that are with "
        "a raw one. 0: is not looked at.",
    )
    io_threads: Annotated[int, named(whole(1, 256))] = _setting(
        4, "Threads of the storage worker that read and write files.", unit="threads", topic="Work"
    )
    inflight_writes: Annotated[int, named(whole(1, 4096))] = _setting(
        8, "Extents being written at one time.", unit="extents"
    )
    inflight_reads: Annotated[int, named(whole(1, 4096))] = _setting(
        16, "Extents being read at one time.", unit="extents"
    )
    disk_inflight: Annotated[int, named(whole(1, 256))] = _setting(
        4, "Extents on their way to disk_dir at one time, and as many being read from it.", unit="extents"
    )
    direct_io: Annotated[DirectIo, named(one_of("auto", "off"))] = _setting(
        "auto", 'Pass the page cache by ("auto": where the file system can), or not ("off").'
    )
    huge_pages: Annotated[bool, named(parse_switch)] = _setting(
        True, "Ask for huge pages for the arena; where there are none, ordinary ones are used."
    )
    drain_seconds: Seconds = _setting(
        10.0, "Time a stopping node takes to write what isn't on disk yet; what is left is reported.", unit="seconds"
    )
    lock_wait_seconds: Seconds = _setting(
        5.0, "How long a starting node waits for one that is just ending to let go of data_dir.", unit="seconds"
    )
    inline_users: Annotated[str, named(parse_users)] = _setting(
        "",
        "Users of this machine that may use the node without being trusted: their processes never map its memory, each "
        "user is a tenant of its own, and they share nothing (docs/tenants.md). Names or numbers, with commas between. "
        "Empty: there is no such way in.",
        example='"1001,1002"',
        topic="Tenants that are not trusted",
    )
    inline_dir: Directory = _setting(
        Path(),
        "Directory of the sockets for inline_users, who must be able to reach it.",
        default_text="/tmp/tierkv-<uid>-inline/<last part of socket_dir>",
        example='"/run/tierkv-inline"',
    )
    inline_bytes: Size = _setting(
        0,
        "What one of inline_users may hold in leases and tickets at one time, all of its processes together.",
        unit="size",
        default_text="session_bytes, divided by the number of inline_users",
        example='"4GiB"',
    )
    hang_seconds: Seconds = _setting(
        30.0,
        "A front or worker that gives no sign of life for so long is killed and replaced. A disk that does not "
        "answer is no such case: see stuck_seconds. 0: never.",
        unit="seconds",
        topic="Watching",
    )
    stuck_seconds: PositiveSeconds = _setting(
        20.0,
        "When a single operation on a file takes longer, its tier, NVMe or disk, steps down until it has come back.",
        unit="seconds",
    )
    metrics_port: Annotated[int, named(whole(1, 65_535))] | None = _setting(
        None,
        "Port of the HTTP endpoint: /metrics for Prometheus, and /livez, /readyz and /healthz.",
        default_text="none, no endpoint",
        example="9464",
    )
    metrics_host: Annotated[str, named(parse_host)] = _setting(
        "127.0.0.1", "Address the Prometheus endpoint listens on. There is no password: mind who can reach it."
    )
    record: Directory | None = _setting(
        None,
        "File to write down what engines ask and store, for `tierkv replay`: shortened keys of blocks, no tokens. A "
        "purge covers it (docs/replay.md).",
        unit="file",
        default_text="none, nothing is recorded",
        example='"/var/log/tierkv/requests.jsonl"',
        topic="Recording",
    )
    record_bytes: Size = _setting(
        GiB,
        "What the recording may take in all. When half of it is full the file becomes FILE.1, and the one that was "
        "called so goes. At least 1MiB.",
        unit="size",
    )
    log_level: Annotated[LogLevel, named(one_of(*get_args(LogLevel)))] = _setting(
        "info", "Least serious messages that are logged, on stderr: debug, info, warning or error."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_machine(cls, given: Any, info: ValidationInfo) -> Any:
        present = {key: value for key, value in dict(given).items() if value is not None}
        return present | machine_defaults(present, _machine(info))

    @model_validator(mode="after")
    def _check_together(self, info: ValidationInfo) -> Settings:
        machine = _machine(info)
        _require_pages("slab_bytes", self.slab_bytes)
        _require_pages("index_map_bytes", self.index_map_bytes)
        if self.journal_bytes < MIN_JOURNAL_BYTES:
            raise ConfigError(
                "journal_bytes", f"{format_size(self.journal_bytes)} holds next to nothing; write 64KiB or more"
            )
        if self.extent_bytes < PAGE_BYTES:
            raise ConfigError(
                "extent_bytes", f"{format_size(self.extent_bytes)} is less than a page; write 4KiB or more"
            )
        if self.host_bytes > machine.limit_bytes:
            raise ConfigError(
                "host_bytes",
                f"{_words(self.host_bytes)} is more than {machine.limit_name}, {_words(machine.limit_bytes)}; "
                f"write less, and leave room for the engines",
            )
        if self.host_bytes < self.slab_bytes:
            raise ConfigError(
                "host_bytes",
                f"{_words(self.host_bytes)} is less than one slab (slab_bytes, {_words(self.slab_bytes)}); "
                f"write more, or a smaller slab_bytes",
            )
        self._check_parts(machine)
        if self.auto_pin_share > self.pinned_share:
            raise ConfigError(
                "auto_pin_share", "is a part of pinned_share, and can't be more than that; write less, or more there"
            )
        if self.codec != "raw" and self.data_dir is None:
            raise ConfigError("codec", f"{self.codec} needs data_dir, where the verdicts of `tierkv eval` are")
        if self.eval_max_perplexity_ratio < 1:
            raise ConfigError(
                "eval_max_perplexity_ratio",
                f"{self.eval_max_perplexity_ratio:g} asks for better than raw; write 1 or more",
            )
        self._check_codecs()
        if self.read_only and self.data_dir is None:
            raise ConfigError("read_only", "has no effect without data_dir; write data_dir too, or leave it out")
        if self.record is not None:
            self._check_record(self.record)
        if self.nvme_bytes is not None:
            self._check_nvme(self.nvme_bytes)
        self._check_disk()
        self._check_gpus()
        if self.inline_users:
            self._check_inline()
        if excess := excess_bytes(self.socket_dir):
            raise ConfigError(
                "socket_dir",
                f"the paths of sockets in {self.socket_dir} are {excess} bytes longer than Linux allows; "
                f"write a shorter directory, like /run/tierkv",
            )
        return self

    @property
    def eval_limits(self) -> Thresholds:
        return Thresholds(
            min_agreement=self.eval_min_agreement,
            max_kl=self.eval_max_kl,
            max_perplexity_ratio=self.eval_max_perplexity_ratio,
            min_retrieval=self.eval_min_retrieval,
        )

    @property
    def inline_uids(self) -> tuple[int, ...]:
        """The numbers of inline_users, each once."""
        return user_numbers(self.inline_users)

    @property
    def device_names(self) -> tuple[str, ...]:
        """What gpu_devices names, in order: "cpu", or the number of a GPU."""
        return device_names(self.gpu_devices)

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """What each of them is to give, in order."""
        return (self.gpu_bytes or 0,) * len(self.device_names)

    @property
    def share_rules(self) -> tuple[tuple[str, float], ...]:
        """Names of models and tenants, and what part of each tier is theirs."""
        return share_rules(self.shares)

    @property
    def ttl_rules(self) -> tuple[tuple[str, float], ...]:
        """Names of tenants, and the seconds for which what they don't use is kept."""
        return ttl_rules(self.ttl)

    def _check_parts(self, machine: Machine) -> None:
        """Sizes within others: one that nothing fits into is a mistake, most likely in the unit."""
        for name in ("session_bytes", "inline_bytes"):
            num_bytes = getattr(self, name)
            if num_bytes < PAGE_BYTES:
                raise ConfigError(
                    name, f"{format_size(num_bytes)} is less than a page, and no block fits; write 4KiB or more"
                )
        if 0 < self.quarantine_bytes < PAGE_BYTES:
            raise ConfigError(
                "quarantine_bytes",
                f"{format_size(self.quarantine_bytes)} holds no file; write 4KiB or more, or 0 for none",
            )
        if self.record_bytes < MIN_RECORD_BYTES:
            raise ConfigError(
                "record_bytes", f"{format_size(self.record_bytes)} holds nearly nothing; write 1MiB or more"
            )
        if 0 < self.nvme_write_bytes_per_day < self.extent_bytes:
            raise ConfigError(
                "nvme_write_bytes_per_day",
                f"{_words(self.nvme_write_bytes_per_day)} is less than one extent (extent_bytes, "
                f"{_words(self.extent_bytes)}), which could never be written; write more, or 0 for no limit",
            )
        there = machine.file_system_bytes(self.data_dir) if self.data_dir is not None else 0
        if 0 < there <= self.nvme_reserve_bytes:  # some don't say what they have
            raise ConfigError(
                "nvme_reserve_bytes",
                f"{_words(self.nvme_reserve_bytes)} is all that the file system of data_dir has ({_words(there)}); "
                f"write less",
            )

    def _check_inline(self) -> None:
        if excess := excess_bytes(self.inline_dir, user_socket_name(2**32 - 1)):
            raise ConfigError(
                "inline_dir",
                f"the paths of sockets in {self.inline_dir} are {excess} bytes longer than Linux allows; "
                f"write a shorter directory, like /run/tierkv-inline",
            )
        if self.inline_dir == self.socket_dir or self.inline_dir.is_relative_to(self.socket_dir):
            raise ConfigError("inline_dir", f"{self.inline_dir} lies in socket_dir, which is closed to others")

    def _check_record(self, record: Path) -> None:
        if self.data_dir is not None and record.is_relative_to(self.data_dir):
            raise ConfigError("record", f"{record} lies in data_dir, which holds nothing but the cache; name another")

    def _check_codecs(self) -> None:
        if self.nvme_codec != "raw" and self.data_dir is None:
            raise ConfigError("nvme_codec", "has no effect without data_dir; write data_dir too, or leave it out")
        if self.disk_codec != "raw" and self.disk_dir is None:
            raise ConfigError("disk_codec", "has no effect without disk_dir; write disk_dir too, or leave it out")

    def _check_disk(self) -> None:
        """By name alone: a file server that does not answer must not hold up whoever reads settings."""
        if self.disk_bytes is not None and self.disk_dir is None:
            raise ConfigError("disk_bytes", "has no effect without disk_dir; write disk_dir too, or leave it out")
        if self.disk_dir is None:
            return
        if self.data_dir is None:
            raise ConfigError("disk_dir", "lies below NVMe and needs data_dir; write data_dir too, or leave it out")
        if self.disk_dir == self.data_dir:
            raise ConfigError("disk_dir", "is the same as data_dir; name a directory on another disk")
        if self.disk_dir.is_relative_to(self.data_dir):
            raise ConfigError("disk_dir", f"{self.disk_dir} lies in data_dir, which holds nothing else; name another")
        if self.data_dir.is_relative_to(self.disk_dir):
            raise ConfigError("disk_dir", f"data_dir lies in {self.disk_dir}, which holds nothing else; name another")
        if self.record is not None and self.record.is_relative_to(self.disk_dir):
            raise ConfigError("record", f"{self.record} lies in disk_dir, which holds only the cache; name another")
        if self.disk_reserve_bytes > MOST_BYTES:
            raise ConfigError(
                "disk_reserve_bytes", f"{_words(self.disk_reserve_bytes)} is more than any file system has; write less"
            )
        if self.disk_bytes is not None and self.disk_bytes < self.extent_bytes:
            raise ConfigError(
                "disk_bytes",
                f"{_words(self.disk_bytes)} is less than one extent (extent_bytes, {_words(self.extent_bytes)}); "
                f"write more, or leave disk_dir out",
            )

    def _check_gpus(self) -> None:
        """By the sizes alone: what a GPU really has is found out by the process that opens it."""
        names = self.device_names
        if self.gpu_bytes is None:
            if names:
                raise ConfigError("gpu_bytes", "how much of each of gpu_devices is to be taken isn't said; write 8GiB")
            return
        if not names:
            raise ConfigError("gpu_bytes", "has no effect without gpu_devices; write gpu_devices too, or leave it out")
        if self.gpu_bytes < self.slab_bytes:
            raise ConfigError(
                "gpu_bytes",
                f"{_words(self.gpu_bytes)} is less than one slab (slab_bytes, {_words(self.slab_bytes)}); "
                f"write more, or leave gpu_devices out",
            )
        if self.gpu_bytes > MOST_GPU_BYTES:
            raise ConfigError("gpu_bytes", f"{_words(self.gpu_bytes)} is more than any GPU has; write less")
        if self.gpu_bytes % PAGE_BYTES:
            raise ConfigError("gpu_bytes", f"{self.gpu_bytes} isn't a multiple of 4KiB; write one, like 8GiB")

    def _check_nvme(self, nvme_bytes: int) -> None:
        if self.data_dir is None:
            raise ConfigError("nvme_bytes", "has no effect without data_dir; write data_dir too, or leave it out")
        if self.journal_bytes > max(MIN_JOURNAL_BYTES, nvme_bytes // 2):
            raise ConfigError(
                "journal_bytes",
                f"{_words(self.journal_bytes)} is more than half of nvme_bytes, {_words(nvme_bytes)}, of which it is a "
                f"part; write less",
            )
        if nvme_bytes == 0:
            raise ConfigError(
                "nvme_bytes",
                "0 leaves no room in data_dir; write more, or leave data_dir out to use memory only",
            )
        if nvme_bytes < self.extent_bytes:
            raise ConfigError(
                "nvme_bytes",
                f"{_words(nvme_bytes)} is less than one extent (extent_bytes, {_words(self.extent_bytes)}); "
                f"write more, or a smaller extent_bytes",
            )


def _machine(info: ValidationInfo) -> Machine:
    machine: Machine = (info.context or {}).get("machine") or Machine.here()
    return machine


def _require_pages(name: str, num_bytes: int) -> None:
    if num_bytes == 0 or num_bytes % PAGE_BYTES:
        raise ConfigError(name, f"{format_size(num_bytes)} isn't a multiple of 4KiB; write one, like 64MiB")


def _words(num_bytes: int) -> str:
    """For people: as it would be written where that is short, else rounded."""
    exact = format_size(num_bytes)
    return exact if exact != str(num_bytes) and len(exact) <= 7 else human_size(num_bytes)


def machine_defaults(given: Mapping[str, object], machine: Machine) -> dict[str, object]:
    """Values of the settings that depend on the machine or on other settings, for those that `given` leaves out.
    A given value that can't be read counts as absent here; its own field reports it."""
    host_bytes = _read(parse_size, given.get("host_bytes"), machine.limit_bytes // 4 // MiB * MiB)
    data_dir = _read(parse_path, given.get("data_dir"), None)
    name = _read(parse_name, given.get("name"), "")
    num_users = max(1, _read(_count_users, given.get("inline_users"), 1))
    socket_dir = _read(parse_path, given.get("socket_dir"), default_socket_dir(data_dir, name, machine.environ))
    session_bytes = _read(parse_size, given.get("session_bytes"), host_bytes // 2)
    nvme_bytes = _read(parse_size, given.get("nvme_bytes"), 64 * MAX_JOURNAL_BYTES)
    reserve = min(machine.file_system_bytes(data_dir) // 20, 10 * GiB) if data_dir is not None else 0
    computed = {
        "host_bytes": host_bytes,
        "session_bytes": session_bytes,
        "journal_bytes": max(MIN_JOURNAL_BYTES, min(MAX_JOURNAL_BYTES, nvme_bytes // 64)),
        "nvme_reserve_bytes": reserve,
        "socket_dir": socket_dir,
        "inline_dir": default_inline_dir(socket_dir),
        "inline_bytes": session_bytes // num_users,
    }
    return {key: value for key, value in computed.items() if given.get(key) is None}


def _count_users(value: object) -> int:
    return len(user_numbers(parse_users(value)))


def _read(parse: Callable[[object], Any], value: object, otherwise: Any) -> Any:
    if value is None:
        return otherwise
    try:
        return parse(value)
    except ValueError:  # reported with its name when the field itself is validated
        return otherwise
