from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import transformers

from tierkv.errors import IdentityError
from tierkv.integrations.vllm.running_code import code_settings


class Foreign:
    __module__ = "a_plugin.models"


class Registered:
    """As vLLM keeps a class that a plugin gave it."""

    model_cls = Foreign


class Lazy:
    """As vLLM keeps a class by its name."""

    def __init__(self, module_name: str) -> None:
        self.module_name = module_name


class Model:
    def __init__(self, architecture: str, **models: Any) -> None:
        self.architecture = architecture
        self.registry = type("Registry", (), {"models": models})
        self.hf_config = type("Config", (), {"auto_map": {}})


class Engine:
    def __init__(self, model: Model) -> None:
        self.model_config = model


def test_vllm_s_own_code_is_told_by_its_release(plain_config: Any) -> None:
    assert plain_config.model_config.architecture == "LlamaForCausalLM"
    assert code_settings(plain_config) == {}


@pytest.mark.parametrize("registered", [Registered(), Lazy("a_plugin.models")], ids=["class", "name"])
def test_a_class_from_outside_has_no_identity(registered: Any) -> None:
    with pytest.raises(IdentityError, match=r"LlamaForCausalLM comes from a_plugin\.models"):
        code_settings(Engine(Model("LlamaForCausalLM", LlamaForCausalLM=registered)))


def test_a_class_that_the_registry_does_not_know_has_no_identity() -> None:
    with pytest.raises(IdentityError, match="does not know NewForCausalLM"):
        code_settings(Engine(Model("NewForCausalLM")))


def backend_model() -> Model:
    return Model("TransformersForCausalLM", TransformersForCausalLM=Lazy("vllm.model_executor.models.transformers"))


def test_the_transformers_backend_adds_the_library_s_release() -> None:
    release = ".".join(transformers.__version__.split(".")[:2])
    assert code_settings(Engine(backend_model())) == {"transformers": release}


def test_code_that_is_shipped_with_weights_has_no_identity() -> None:
    model = backend_model()
    model.hf_config.auto_map = {"AutoConfig": "configuration.New"}
    assert code_settings(Engine(model))
    model.hf_config.auto_map = {"AutoModelForCausalLM": "modeling.New"}
    with pytest.raises(IdentityError, match="shipped with its weights"):
        code_settings(Engine(model))
