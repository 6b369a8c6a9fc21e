"""DeepSeek-V3 (arXiv:2412.19437): 671 B parameters, 38 B active, and a module for multi-token prediction.

The layout is the published one for 256 GB200: pp 4 · vpp 4 · ep 64, experts inside one NVLink domain.
"""
vocab_size = 129280
d_model = 7168
n_layer = 61
n_dense_layers = 3
d_ff = 18432
n_head = 128
attention = "mla"
q_lora_rank = 1536
kv_lora_rank = 512
d_nope = 128
d_rope = 64
d_v = 128
rope_theta = 10000.0
norm_eps = 1e-6
seq_len = 4096
n_mtp = 1
mtp_coef = 0.3

num_experts = 256
top_k = 8
d_expert = 2048
n_shared_experts = 1
score_fn = "sigmoid"
norm_topk = True
route_scale = 2.5
n_groups = 8
topk_groups = 4
bias_update_rate = 1e-3
aux_loss_coef = 1e-4
aux_loss_scope = "sequence"

pp = 4
vpp = 4
ep = 64
# the last stage also has the module for multi-token prediction, and the head twice
pp_layout = [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 1]
recompute = ["norm", "moe_act", "mla_up"]
global_batch = 4096
micro_batch = 1
lr = 2.2e-4
min_lr = 2.2e-5
warmup_steps = 2000
