"""The configuration: defaults that run, and for every mistake the key, what was expected and what came."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from protocol.config import RunConfig, parse_config
from protocol.errors import ConfigError, UserError

DEFAULT_HASH = "f3c461d1926050d34bcf7e09bd4e022770443e982b7a5fa353650172c15ec044"


def test_the_defaults_are_a_valid_run() -> None:
    assert parse_config({}, "empty.toml") == RunConfig()
    assert parse_config(RunConfig().model_dump(), "full.toml") == RunConfig()


def test_derived_numbers() -> None:
    config = parse_config({"train": {"microbatches": 3, "microbatch_size": 5, "sequence_length": 7}}, "run.toml")
    assert (config.tokens_per_microbatch, config.tokens_per_step) == (35, 105)
    assert config.boundary_width == 8
    assert (config.task.positions, config.task.rows, config.task.carried) == (7, 4096, 8)
    assert parse_config({"boundary": {"form": "none"}}, "run.toml").boundary_width == 128


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trian": {}}, "unknown key 'trian': did you mean 'train'?"),
        ({"train": {"lerning_rate": 1.0}}, "unknown key 'train.lerning_rate': did you mean 'learning_rate'?"),
        ({"model": {"n_layers": 4}}, "unknown key 'model.n_layers': did you mean 'layers'?"),
        ({"checkpoint": {"zzzz": 4}}, "unknown key 'checkpoint.zzzz': expected one of every, keep, copies"),
        (
            {"boundary": {"rank": 129}},
            "expected boundary.rank of at most model.dim = 128, got 129: lower it, or set boundary.form = \"none\"",
        ),
        (
            {"pipeline": {"stages": 3}},
            "expected model.layers divisible by pipeline.stages, got 4 layers and 3 stages: "
            "set pipeline.stages to one of [1, 2, 4]",
        ),
        ({"model": {"heads": 3, "kv_heads": 3}}, "model: expected dim divisible by heads, got dim = 128, heads = 3"),
        ({"model": {"kv_heads": 3}}, "model: expected heads divisible by kv_heads, got 4 and 3"),
        ({"model": {"dim": 12}}, "model: expected an even width per head (rotary positions turn pairs), got "
                                 "dim / heads = 12 / 4 = 3"),
        ({"model": {"dim": 1, "heads": 1}}, "model.dim: input should be greater than or equal to 2, got 1"),
        ({"model": {"dim": "128"}}, "model.dim: input should be a valid integer, got '128'"),
        ({"model": {"dim": 128.0}}, "model.dim: input should be a valid integer, got 128.0"),
        ({"model": {"dim": True}}, "model.dim: input should be a valid integer, got True"),
        ({"model": {"qk_norm": 1}}, "model.qk_norm: input should be a valid boolean, got 1"),
        ({"model": {"dtype": "float16"}}, "model.dtype: input should be 'float32' or 'bfloat16', got 'float16'"),
        ({"model": 5}, "model: input should be a valid dictionary or instance of ModelConfig, got 5"),
        ({"boundary": {"form": "svd"}}, "input should be 'bottleneck', 'projected', 'reparam' or 'none', got 'svd'"),
        ({"boundary": {"basis": "file"}}, 'boundary: expected a basis_path for basis = "file", got none: add'),
        ({"boundary": {"basis_path": "u.npy"}}, 'boundary: expected basis_path only with basis = "file", got it with'),
        ({"boundary": {"basis": "moving"}}, 'expected form = "projected" or "reparam" for basis = "moving", got "bott'),
        ({"boundary": {"basis": "moving", "form": "none"}}, 'expected basis = "random" with form = "none"'),
        ({"boundary": {"rates": "adaptive"}},
         'boundary: expected more bits in codec than in least_codec, or in gradient_codec than in least_gradient'),
        ({"boundary": {"rates": "adaptive", "codec": "topk"}},
         'boundary: expected codec to be one of bfloat16, int8, int6, int4, int3, int2 with rates = "adaptive", got'),
        ({"boundary": {"rates": "adaptive", "codec": "int8", "least_codec": "float32"}},
         "expected least_codec to be one of bfloat16, int8, int6, int4, int3, int2 with rates"),
        ({"boundary": {"rates": "adaptive", "codec": "int8", "least_codec": "bfloat16"}},
         'expected least_codec of as many bits as codec = "int8" or fewer, got "bfloat16": lower it, or raise codec'),
        ({"boundary": {"rates": "adaptive", "codec": "int8", "lossless": "zstd"}},
         'boundary: expected lossless = "none" with rates = "adaptive", got "zstd": what a packed payload'),
        ({"boundary": {"rates": "adaptive", "codec": "int8", "least_gradient_codec": "int3"}},
         'boundary: expected least_gradient_codec = "int4" or more bits, got "int3": gradients in fewer bits'),
        ({"boundary": {"move_every": 1}}, "boundary.move_every: input should be greater than or equal to 2, got 1"),
        ({"checkpoint": {"copies": -1}}, "checkpoint.copies: input should be greater than or equal to 0, got -1"),
        ({"train": {"steps": 0}}, "train.steps: input should be greater than or equal to 1, got 0"),
        ({"train": {"beta2": 1.0}}, "train.beta2: input should be less than 1, got 1.0"),
        ({"train": {"learning_rate": float("nan")}}, "train.learning_rate: input should be a finite number, got nan"),
        ({"model": {"rope_base": float("inf")}}, "model.rope_base: input should be a finite number, got inf"),
        ({"train": {"microbatches": 65536}}, "input should be less than or equal to 65535, got 65536"),
        ({"train": {"steps": 20}}, "expected train.warmup_steps below train.steps, got 20 and 20"),
        ({"pipeline": {"stages": 256}}, "pipeline.stages: input should be less than or equal to 255, got 256"),
        ({"data": {"source": "text"}}, "data: expected a path for source = 'text', got none: add path ="),
        ({"data": {"path": "books"}}, "data: expected no path for source = 'stdlib', got 'books': leave it out, or"),
        ({"model": {"family": "vit"}, "data": {"source": "digits", "path": "x"}}, "expected no path for source = 'dig"),
        ({"model": {"family": "vit"}, "data": {"source": "digits", "tokenizer": "t.json"}},
         "expected no tokenizer for source = 'digits', which has no text, got 't.json': leave it out"),
        ({"boundary": {"form": "none", "scaled_basis": True}},
         'boundary: expected scaled_basis = false with form = "none", which has no basis, got true'),
        ({"boundary": {"form": "projected", "stage_embedding": "low_rank"}}, 'expected stage_embedding = "table" or'),
        ({"data": {"vocab_size": 256}}, "data.vocab_size: input should be greater than or equal to 257, got 256"),
        ({"model": {"family": "vit"}}, "expected a data.source of images for model.family = 'vit', got 'stdlib': "
                                       "images (digits) go with vit, text with decoder"),
        ({"data": {"source": "digits"}}, "expected a data.source of text for model.family = 'decoder', got 'digits'"),
        ({"model": {"family": "vit", "patch": 3}, "data": {"source": "digits"}},
         "expected model.patch to divide the 8 pixels of a side of digits, got 3: set it to one of [1, 2, 4, 8]"),
        ({"model": {"family": "vit", "pooling": "max"}, "data": {"source": "digits"}},
         "model.pooling: input should be 'class' or 'mean', got 'max'"),
        ({"name": "My Run"}, "name: string should match pattern '^[a-z0-9][a-z0-9-]{0,39}$', got 'My Run'"),
        ({"name": "run\n"}, "name: string should match pattern"),
        ({"seed": -1}, "seed: input should be greater than or equal to 0, got -1"),
        ({"seed": 1 << 63}, f"seed: input should be less than {1 << 63}, got {1 << 63}"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_mistake_names_the_file_the_key_what_was_expected_and_what_came(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(values, "run.toml")
    assert str(caught.value).startswith("run.toml: ") and message in str(caught.value)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"train": {"steps": 0, "step": 1}, "sede": 3}, "run.toml")
    assert str(caught.value) == (
        "run.toml: train.steps: input should be greater than or equal to 1, got 0; "
        "unknown key 'train.step': did you mean 'steps'?; unknown key 'sede': did you mean 'seed'?"
    )


@pytest.mark.parametrize(("pooling", "positions"), [("mean", 16), ("class", 17)])
def test_an_image_has_a_position_for_each_patch(pooling: str, positions: int) -> None:
    values = {"model": {"family": "vit", "pooling": pooling}, "data": {"source": "digits"}}
    config = parse_config({**values, "train": {"microbatch_size": 5, "microbatches": 3}}, "run.toml")
    assert (config.tokens_per_microbatch, config.tokens_per_step) == (5 * positions, 15 * positions)
    task = config.task
    assert (task.positions, task.rows, task.outputs, task.carried, task.alphabet) == (positions, positions, 10, 1, 10)


def test_a_mistake_is_the_users() -> None:
    assert issubclass(ConfigError, UserError) and ConfigError.exit_code == 2


@pytest.mark.parametrize(
    "values",
    [
        {"boundary": {"rank": 128}},
        {"boundary": {"rank": 129, "form": "none"}},
        {"pipeline": {"stages": 1}},
        {"model": {"layers": 7}, "pipeline": {"stages": 7}},
        {"model": {"kv_heads": 1}},
        {"model": {"dim": 8, "hidden": 1}, "boundary": {"rank": 1}},
        {"train": {"steps": 1, "warmup_steps": 0, "learning_rate": 1}},
        {"checkpoint": {"every": 1, "keep": 1, "copies": 0}},
        {"data": {"source": "jsonl", "path": "books", "tokenizer": "t.json"}},
        {"data": {"tokenizer": "t.json"}},
        {"boundary": {"form": "projected", "stage_embeddings": False, "stage_embedding": "low_rank"}},
        {"boundary": {"basis": "file", "basis_path": "u.npy"}},
        {"boundary": {"basis": "moving", "form": "projected", "move_every": 2, "move_rate": 1.0}},
        {"model": {"family": "vit", "patch": 8, "dim": 20}, "data": {"source": "digits"}},
        {"name": "a" * 40},
        {"boundary": {"rates": "adaptive", "codec": "bfloat16", "least_codec": "int2"}},
        {"boundary": {"rates": "adaptive", "codec": "int4", "least_codec": "int3"}},
        {"boundary": {"rates": "adaptive", "codec": "bfloat16", "rotation": "hadamard"}},
        {"boundary": {"least_codec": "topk", "least_gradient_codec": "int2"}},
    ],
    ids=str,
)
def test_the_edge_of_every_rule_is_inside(values: dict[str, Any]) -> None:
    parse_config(values, "run.toml")


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        RunConfig().train.steps = 5  # type: ignore[misc]


def test_the_hash_is_pinned() -> None:
    """It is in every signed manifest; it changes when a default or a field does, and old runs must then be told."""
    assert RunConfig().hash() == DEFAULT_HASH


def test_the_hash_does_not_depend_on_how_a_value_was_written() -> None:
    spelled = parse_config({"train": {"learning_rate": 1}, "seed": 0}, "a.toml")
    assert spelled.hash() == parse_config({"train": {"learning_rate": 1.0}}, "b.toml").hash()
    back = parse_config(json.loads(json.dumps(spelled.model_dump())), "manifest")
    assert back.hash() == spelled.hash()


OTHERS: dict[str, Any] = {"name": "other", "source": "text", "path": "x", "field": "body", "tokenizer": "t.json",
                          "dtype": "bfloat16", "form": "reparam", "codec": "float32", "kv_heads": 2, "heads": 8,
                          "rank": 16, "layers": 8, "stages": 2, "beta1": 0.5, "beta2": 0.5, "epsilon": 1e-6,
                          "norm_epsilon": 1e-6, "final_learning_rate": 0.5, "gradient_codec": "int4",
                          "scale": "bfloat16", "levels": "uniform", "rotation": "hadamard",
                          "lossless": "zstd", "family": "vit", "pooling": "class",
                          "optimizer": "adamw", "momentum": 0.5, "stage_embedding": "bigram",
                          "schedule": "gpipe", "credits": "fixed",
                          "basis": "file", "basis_path": "x", "rates": "adaptive",
                          "least_codec": "int3", "least_gradient_codec": "int6"}  # fmt: skip
BESIDE = {  # without which a value breaks a rule
    "source": {"path": "x"}, "path": {"source": "text"}, "rotation": {"codec": "int4"},
    "basis": {"basis_path": "x"}, "basis_path": {"basis": "file"}, "rates": {"codec": "int8"},
}  # fmt: skip


def other_values() -> list[dict[str, Any]]:
    """For each field of the configuration, values that differ from the defaults in it (and its section's path)."""
    found = []
    for name, value in RunConfig():
        if not isinstance(value, BaseModel):
            found.append({name: OTHERS.get(name, 1)})
            continue
        for field, default in value:
            other = OTHERS.get(field, not default if isinstance(default, bool) else default * 2 if default else 5)
            found.append({name: {field: other, **BESIDE.get(field, {})}})
            if field == "family":
                found[-1] |= {"data": {"source": "digits"}}
    return found


@pytest.mark.parametrize("values", other_values(), ids=str)
def test_the_hash_changes_with_every_field(values: dict[str, Any]) -> None:
    assert parse_config(values, "run.toml").hash() != RunConfig().hash()


def test_every_field_has_its_sentence() -> None:
    for name, field in RunConfig.model_fields.items():
        section = getattr(RunConfig(), name)
        if isinstance(section, BaseModel):
            assert all(inner.description for inner in type(section).model_fields.values()), name
        else:
            assert field.description, name
