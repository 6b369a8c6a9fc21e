"""Mixtral-8x7B (arXiv:2401.04088): 47 B parameters, 13 B active. On 8 GPUs each has an expert of each layer."""
vocab_size = 32000
d_model = 4096
n_layer = 32
n_head = 32
n_kv_head = 8
rope_theta = 1e6
norm_eps = 1e-5
seq_len = 4096

num_experts = 8
top_k = 2
d_expert = 14336
norm_topk = True
aux_loss_coef = 0.02

ep = 8
global_batch = 256
micro_batch = 1
lr = 3e-4
min_lr = 3e-5
warmup_steps = 2000
