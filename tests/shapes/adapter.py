"""A made-up LoRA adapter for the models of demo/model.py."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANK = 8
HIDDEN = 64  # of demo/model.py's Llama: two heads of 32
LAYERS = 2


def make_adapter(directory: Path, seed: int) -> Path:
    """Write an adapter of random weights for the attention's query and value."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module in ("q_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("A", (RANK, HIDDEN)), ("B", (HIDDEN, RANK))):
                weights = rng.standard_normal(shape).astype(np.float32)
                tensors[f"{name}.lora_{part}.weight"] = weights
    save_file(tensors, str(directory / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
