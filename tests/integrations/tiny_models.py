"""Tiny models of transformers with random weights: one layer of linear attention, one of full attention."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 50

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8}
_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
_EXPERTS = {"mlp_layer_types": ["dense", "sparse"]}
_KDA = {"linear_head_dim": 16, "linear_num_heads": 2}

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_linear": (
        "KimiLinearForCausalLM",
        {**_SIZES, **_LATENT, **_LAYERS, **_EXPERTS, **_KDA, "num_local_experts": 4},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            **_SIZES,
            **_LAYERS,
            "num_experts": 4,
            "head_dim": 16,
            "shared_expert_intermediate_size": 16,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
        },
    ),
    "bailing_hybrid": (
        "BailingHybridForCausalLM",
        {
            **_SIZES,
            **_LATENT,
            **_LAYERS,
            **_EXPERTS,
            "num_local_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 16,
            "num_mtp_layers": 0,
        },
    ),
    "glm5_next": (
        "Glm5NextForConditionalGeneration",
        {
            "text_config": {
                **_SIZES,
                **_LATENT,
                "qk_rope_head_dim": 0,
                "hc_sinkhorn_iters": 2,
                **_EXPERTS,
                **_KDA,
                "layer_types": ["linear_attention", "full_attention"],
                "n_routed_experts": 4,
                "q_lora_rank": 8,
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "num_heads": 2,
                "intermediate_size": 16,
                "out_hidden_size": 32,
            },
        },
    ),
}


def build(modeling: Any, name: str) -> Any:
    """The model ``name`` of its module of transformers, with weights drawn from a fixed seed."""
    class_name, configuration = CONFIGURATIONS[name]
    model_class = getattr(modeling, class_name)
    torch.manual_seed(0)
    return model_class(model_class.config_class(**configuration)).eval()
