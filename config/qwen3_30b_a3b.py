"""Qwen3-30B-A3B: 30 B parameters, 3 B active. The layout is the published one for 8 GB200: ep 8."""
vocab_size = 151936
d_model = 2048
n_layer = 48
n_head = 32
n_kv_head = 4
d_head = 128
qk_norm = "head"
rope_theta = 1e6
norm_eps = 1e-6
seq_len = 4096

num_experts = 128
top_k = 8
d_expert = 768
norm_topk = True
aux_loss_coef = 1e-3
aux_loss_scope = "global"

ep = 8
global_batch = 512
micro_batch = 4
lr = 3e-4
min_lr = 3e-5
warmup_steps = 2000
