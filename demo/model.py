"""Write a tiny made-up model folder that real vLLM serves with `--load-format dummy`."""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = ("llama", "deepseek", "embedding")

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL = (BOS, EOS, PAD, *ROLES)

# Ids that every vocabulary of ours gives to ordinary text, and any real model's has as well:
# above the special tokens and the 256 byte tokens, below the smallest vocabulary.
FIRST_ID, END_ID = 300, 1000
WORDS = 512

# Roles by special tokens and nothing stripped, so that a chat of one message costs exactly its own
# tokens and `CHAT_OVERHEAD` more.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHAT_OVERHEAD = 3


def words() -> list[str]:
    """The invented vocabulary: `WORDS` words of two syllables, each one token of its own."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    pairs = [first + second for first in syllables for second in syllables]
    return sorted(random.Random(0).sample(pairs, WORDS))


def prompt_ids(n: int, seed: int) -> list[int]:
    """`n` ordinary token ids, the same for the same seed.

    Prompts of different seeds share no prefix: the first id differs for any two seeds less than
    700 apart, and the first three together for any two below 343 million, so that they never share
    a block of vLLM's prefix cache. Raises ValueError for a negative `n` or seed.
    """
    if n < 0 or seed < 0:
        raise ValueError(f"prompt_ids({n}, {seed}): neither may be negative")
    span = END_ID - FIRST_ID
    head = [FIRST_ID + seed // span**power % span for power in range(3)]
    rest = random.Random(seed).choices(range(FIRST_ID, END_ID), k=max(0, n - len(head)))
    return (head + rest)[:n]


def prompt_text(n: int, seed: int) -> str:
    """Text of exactly `n` tokens for the models made here (for any other one, about as many).

    Deterministic by seed; two seeds share no first word unless they are a multiple of 512 apart.
    Raises ValueError for a negative `n` or seed.
    """
    if n < 0 or seed < 0:
        raise ValueError(f"prompt_text({n}, {seed}): neither may be negative")
    vocabulary = words()
    rest = random.Random(seed).choices(vocabulary, k=max(0, n - 1))
    return "".join(" " + word for word in [vocabulary[seed % WORDS], *rest][:n])


def make_model(directory: Path, kind: str = "llama", max_len: int = 33000) -> Path:
    """Write the folder of one model kind (`llama`, `deepseek`, `embedding`) and return it.

    There are no weights: vLLM invents them with `--load-format dummy`. `deepseek` needs
    `--dtype bfloat16` on a CPU, `embedding` needs `--runner pooling`. `max_len` is the longest
    context in tokens. Writing twice gives the same files. Raises ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown model kind {kind!r}; one of {', '.join(KINDS)}")
    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = _write_tokenizer(directory, max_len)
    config = {
        "vocab_size": vocab_size,
        "max_position_embeddings": max_len,
        "bos_token_id": SPECIAL.index(BOS),
        "eos_token_id": SPECIAL.index(EOS),
        "pad_token_id": SPECIAL.index(PAD),
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    config |= _deepseek() if kind == "deepseek" else _llama(embedding=kind == "embedding")
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    return directory


def _llama(*, embedding: bool) -> dict[str, Any]:
    return {
        # `LlamaModel` is how an embedding checkpoint of a Llama names itself.
        "architectures": ["LlamaModel" if embedding else "LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,  # vLLM's CPU attention crashes at 16
        "rope_theta": 10000.0,
    }


def _deepseek() -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,  # one dense layer, one of experts
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 32,
        # vLLM's CPU kernel for MLA knows one size only: 512 + 64 (vLLM 0.32, cpu_mla.py).
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 0,
        "rope_theta": 10000.0,
    }


def _write_tokenizer(directory: Path, max_len: int) -> int:
    """Write a byte-level BPE tokenizer, so that any text tokenises; return its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,  # more than there is to merge: each word ends as one token
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(), trainer)
    vocab_size: int = tokenizer.get_vocab_size()
    if vocab_size < END_ID:
        raise RuntimeError(f"the tokenizer has {vocab_size} tokens, prompt_ids needs {END_ID}")
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_len,
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "additional_special_tokens": list(ROLES),
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return vocab_size


def _sentences() -> Iterator[str]:
    """Invented sentences that hold every word twice, once after a space and once alone."""
    vocabulary = words()
    for start in range(0, WORDS, 8):
        yield "".join(" " + word for word in vocabulary[start : start + 8])
        yield from vocabulary[start : start + 8]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="llama")
    parser.add_argument("--max-len", type=int, default=33000, help="longest context in tokens")
    args = parser.parse_args()
    print(make_model(args.directory, args.kind, args.max_len))


if __name__ == "__main__":
    main()
