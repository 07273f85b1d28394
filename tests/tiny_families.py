"""Settings of tiny transformers models, one of each family."""

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "intermediate_size": 96}
_SIGMOID = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True}
_MLA = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
_NO_GROUPS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5}

FAMILIES = {
    "Mixtral": {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {**_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 48},
    "Qwen3Moe": {**_EXPERTS, "head_dim": 16, "num_experts": 8, "norm_topk_prob": True},
    "DeepseekV3": {**_EXPERTS, **_SIGMOID, **_MLA, **_GROUPS, "num_key_value_heads": 4},
    "DeepseekV2": {
        **{**_EXPERTS, **_SIGMOID, **_MLA, **_GROUPS, "norm_topk_prob": False, "q_lora_rank": None},
        **{"num_key_value_heads": 4, "topk_method": "group_limited_greedy", "n_shared_experts": 2},
    },
    "GptOss": {
        "intermediate_size": 32,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "Glm4Moe": {**_EXPERTS, **_SIGMOID, **_NO_GROUPS, "head_dim": 16, "use_qk_norm": True},
    "MiniMaxM2": {
        "intermediate_size": 32,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
}
