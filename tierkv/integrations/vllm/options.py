"""`kv_connector_extra_config`: what an operator may say to the connector. All of it is optional."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tierkv.errors import ConfigError
from tierkv.integrations.vllm.adapters import AdapterPolicy

NAME = "kv_connector_extra_config"


class Options(BaseModel):
    """`endpoint` is the directory of the node's sockets, or `data_dir` the data directory that it serves (else
    TIERKV_ENDPOINT, TIERKV_DATA_DIR). `load_deadline_seconds` is the longest that a request waits for blocks to come
    from NVMe. `salt` parts what this engine caches from engines with another one. `adapters="immutable"` is the promise
    that what lies at a LoRA adapter's path never changes. `block_tokens`, if given, must be the engine's block size.
    `node_user`: whose node is believed, besides our own user's and root's. `device`: whose pool in the node blocks are
    copied from and to, as far as it has them: "auto" is the GPU that the engine's KV lies on, "none" no pool, "cpu" one
    in host memory (for an engine on a CPU, to try it out)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str | None = None
    data_dir: str | None = None
    load_deadline_seconds: float = Field(default=2.0, gt=0, le=60, strict=True)
    salt: str = Field(default="", max_length=256)
    adapters: AdapterPolicy = AdapterPolicy.PROVEN
    block_tokens: int | None = Field(default=None, ge=1)
    node_user: str | int | None = None
    device: str = Field(default="auto", pattern=r"^(auto|none|cpu(:\d+)?|cuda:\d+)$")

    @classmethod
    def read(cls, transfer_config: Any) -> Options:
        """ConfigError names the field, and what it may be."""
        return cls.of(transfer_config.kv_connector_extra_config or {})

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """As `read`."""
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join([NAME, *map(str, first["loc"])])
            if first["type"] == "extra_forbidden":
                raise ConfigError(name, f"unknown; known are {', '.join(cls.model_fields)}") from error
            given_text = "what is given" if "salt" in first["loc"] else repr(first["input"])[:100]
            raise ConfigError(name, f"{given_text}: {first['msg']}") from error
