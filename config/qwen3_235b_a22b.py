"""Qwen3-235B-A22B: 235 B parameters, 22 B active.

The layout is the published one for 256 GB200: pp 8 · vpp 3 · ep 32.
"""
vocab_size = 151936
d_model = 4096
n_layer = 94
n_head = 64
n_kv_head = 4
d_head = 128
qk_norm = "head"
rope_theta = 1e6
norm_eps = 1e-6
seq_len = 4096

num_experts = 128
top_k = 8
d_expert = 1536
norm_topk = True
aux_loss_coef = 1e-3
aux_loss_scope = "global"

pp = 8
vpp = 3
ep = 32
global_batch = 8192
micro_batch = 1
lr = 2e-4
min_lr = 2e-5
warmup_steps = 2000
