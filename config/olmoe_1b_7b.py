"""OLMoE-1B-7B (arXiv:2409.02060): 6.9 B parameters, 1.3 B active; for one node of four GPUs."""
vocab_size = 50304
d_model = 2048
n_layer = 16
n_head = 16
qk_norm = "full"
rope_theta = 10000.0
norm_eps = 1e-5
seq_len = 4096

num_experts = 64
top_k = 8
d_expert = 1024
norm_topk = False
aux_loss_coef = 0.01
z_loss_coef = 0.001

ep = 4
capacity_factor = 0.0
global_batch = 1024
micro_batch = 4
lr = 4e-4
min_lr = 4e-5
warmup_steps = 2500
