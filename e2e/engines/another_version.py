"""What --kv-transfer-config names to have the connector meet a vLLM that nobody has tested, or one that lacks some of
what it uses."""

from __future__ import annotations

import os
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

import tierkv.integrations.vllm as connector

VERSION = "TIERKV_TEST_VLLM_VERSION"
LACKING = "TIERKV_TEST_VLLM_LACKS"
"""Environment variables: what this vLLM says that it is, and a method that its connectors don't have. Without them, and
so in a test's own process, nothing is changed."""

vllm.__version__ = os.environ.get(VERSION, vllm.__version__)
if LACKING in os.environ:
    delattr(KVConnectorBase_V1, os.environ[LACKING])


def __getattr__(name: str) -> Any:
    """vLLM asks for the class several times, here as of the connector's own module."""
    return getattr(connector, name)
