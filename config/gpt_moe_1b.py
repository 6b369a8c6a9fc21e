"""0.9 billion parameters, a fifth of them active: a first real run on one node of four GPUs."""
vocab_size = 50304
d_model = 1024
n_layer = 16
n_head = 16
n_kv_head = 4
qk_norm = "head"
seq_len = 2048

num_experts = 16
top_k = 2
d_expert = 1024
tie_embeddings = True
aux_loss_coef = 0.01
z_loss_coef = 0.001

ep = 4
global_batch = 256
micro_batch = 8
max_steps = 10000
lr = 6e-4
min_lr = 6e-5
warmup_steps = 500
