"""DeepSeek-V2-Lite (arXiv:2405.04434, appendix B): 16 B parameters, 2.7 B active; for one node of four GPUs."""
vocab_size = 102400
d_model = 2048
n_layer = 27
n_dense_layers = 1
d_ff = 10944
n_head = 16
attention = "mla"
q_lora_rank = 0
kv_lora_rank = 512
d_nope = 128
d_rope = 64
d_v = 128
rope_theta = 10000.0
norm_eps = 1e-6
seq_len = 4096

num_experts = 64
top_k = 6
d_expert = 1408
n_shared_experts = 2
norm_topk = False
aux_loss_coef = 1e-3
aux_loss_scope = "sequence"

ep = 4
global_batch = 512
micro_batch = 2
lr = 4.2e-4
min_lr = 4.2e-5
warmup_steps = 2000
